"""Cross entropy and its gradient against float64 log-softmax.

In: a dtype and a tier. Out: the report of `cases.run`.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from workloads import cases, device, operands
from workloads.gates import Reading, elementwise, exact, frobenius, unit_roundoff
from workloads.reference import float64

VOCABULARIES = (3, 50_257)
MORE_VOCABULARIES = (32_000, 128_256)
IGNORED = -100
FORWARD, BACKWARD = 2.0, 3.0


def check(dtype: str, tier: str) -> dict[str, Any]:
    """Every vocabulary, peaked logits, smoothing, ignored rows, sum and mean."""
    sizes = VOCABULARIES if tier == "smoke" else VOCABULARIES + MORE_VOCABULARIES
    return cases.run(_cases(operands.DTYPES[dtype], sizes))


def _cases(dtype: torch.dtype, sizes: Iterable[int]) -> Iterator[cases.Case]:
    for size in sizes:
        plain = functools.partial(_against_float64, size, dtype)
        yield f"V {size}", plain
        yield f"V {size} logits x 30", functools.partial(plain, scale=30.0)
    yield "V 1000 sum", functools.partial(_against_float64, 1000, dtype, reduction="sum")
    if dtype != torch.float16:  # eager PyTorch's sums over classes and rows exceed the range of fp16
        yield "V 1000 smoothing 0.1", functools.partial(_against_float64, 1000, dtype, smoothing=0.1)
    yield "V 1000 one -inf column", functools.partial(_against_float64, 1000, dtype, masked=True)
    yield "ignored rows give exact zeros", functools.partial(_ignored, dtype)
    yield "a certain answer costs exactly nothing", functools.partial(_certain, dtype)
    yield "NaN reaches the loss", functools.partial(_nan, dtype)


def plain(x: torch.Tensor, target: torch.Tensor, *, reduction: str, smoothing: float) -> torch.Tensor:
    """The formula in plain operations, in the dtype of `x`."""
    logs = x - x.logsumexp(-1, keepdim=True)
    kept = target != IGNORED
    rows = -logs.gather(-1, target.clamp_min(0)[:, None])[:, 0] * (1 - smoothing)
    if smoothing:
        rows = rows - smoothing * logs.mean(-1)
    total = torch.where(kept, rows, 0.0).sum()
    return total if reduction == "sum" else total / kept.sum()


def _with_gradient(
    function: Any, x: torch.Tensor, target: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, ...]:
    call = functools.partial(function, target=target.to(x.device), **options)
    return operands.with_gradients(call, {"dlogits": x})


def _loss(x: torch.Tensor, target: torch.Tensor, *, reduction: str, smoothing: float) -> torch.Tensor:
    """The function under test, as a trainer calls it."""
    return F.cross_entropy(x, target, reduction=reduction, label_smoothing=smoothing, ignore_index=IGNORED)


def _data(rows: int, size: int, dtype: torch.dtype, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    x = operands.normal(rows, size, dtype=dtype, seed=size, scale=scale)
    target = torch.randint(size, (rows,), generator=operands.generator(2), device=device())
    target[::7] = IGNORED
    return x, target


def _against_float64(
    size: int,
    dtype: torch.dtype,
    *,
    scale: float = 1.0,
    reduction: str = "mean",
    smoothing: float = 0.0,
    masked: bool = False,
) -> Iterable[Reading]:
    x, target = _data(23, size, dtype, scale)
    if masked:
        x[:, 5] = float("-inf")
        target[target == 5] = 6
    options = {"reduction": reduction, "smoothing": smoothing}
    loss, grad = _with_gradient(_loss, x, target, **options)
    (wide,) = float64(x)
    ref_loss, ref_grad = _with_gradient(plain, wide, target, **options)
    _, eager_grad = _with_gradient(plain, x, target, **options)
    weight = 1.0 if reduction == "sum" else 1.0 / float((target != IGNORED).sum())
    loss_slack, grad_slack = _slack(wide, dtype, weight, smoothing)
    grad_slack += 2 * unit_roundoff(dtype) * ref_grad.abs()  # the weights of rows and classes are rounded too
    yield elementwise(loss[None], ref_loss[None], loss_slack, name="loss")
    yield frobenius(grad, ref_grad, eager_grad, factor=BACKWARD, name="dlogits frobenius")
    yield elementwise(grad, ref_grad, grad_slack, name="dlogits elementwise")


def _slack(
    x: torch.Tensor, dtype: torch.dtype, weight: float, smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The allowed errors: rounding a log-probability to the dtype has a relative error, which p inherits."""
    logs = x.log_softmax(-1)
    size = logs.clamp_min(torch.finfo(torch.float64).min).abs() + x.abs().nan_to_num(posinf=0.0).amax()
    unit = unit_roundoff(dtype) + 2**-24 * x.shape[-1] ** 0.5
    finite = torch.where(logs.isinf(), 0.0, size)
    rows = finite.amax(-1) * weight
    share = logs.exp() * (2 + 2 * finite) + smoothing / x.shape[-1]
    return unit * rows.sum(), weight * unit * share


def _ignored(dtype: torch.dtype) -> Iterable[Reading]:
    x, target = _data(14, 129, dtype, 1.0)
    _, grad = _with_gradient(_loss, x, target, reduction="mean", smoothing=0.0)
    rows = grad[target == IGNORED]
    yield exact(rows, torch.zeros_like(rows))
    target[:] = IGNORED
    loss, grad = _with_gradient(_loss, x, target, reduction="sum", smoothing=0.0)
    yield exact(loss, torch.zeros_like(loss), name="all ignored, loss")
    yield exact(grad, torch.zeros_like(grad), name="all ignored, dlogits")


def _certain(dtype: torch.dtype) -> Iterable[Reading]:
    target = torch.arange(16, device=device())
    x = torch.zeros(16, 64, dtype=dtype, device=device())
    x[target, target] = 1024.0
    loss, grad = _with_gradient(_loss, x, target, reduction="mean", smoothing=0.0)
    yield exact(loss, torch.zeros_like(loss), name="loss")
    yield exact(grad, torch.zeros_like(grad), name="dlogits")


def _nan(dtype: torch.dtype) -> Iterable[Reading]:
    x, target = _data(5, 33, dtype, 1.0)
    x[3, 4], target[3] = float("nan"), 4
    loss = _loss(x, target, reduction="mean", smoothing=0.0)
    yield Reading("loss is a number", float(not loss.isnan()), 0.0)
