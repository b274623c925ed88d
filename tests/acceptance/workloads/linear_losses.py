"""Output layer and loss together: plain, in chunks by PyTorch, and fused by Liger, against float64.

In: a way to compute it, a dtype. Out: the report of `cases.run`; `lacks` says why this stack does not have a
way. The loss and the gradients of rows and weight are judged; a lost chunk shows in all three.
"""

import functools
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from workloads import cases, device, operands
from workloads.gates import Reading, elementwise, exact, frobenius, unit_roundoff
from workloads.losses import IGNORED
from workloads.reference import float64, precision

# Rows, width, vocabulary: more rows than width, fewer, and one that no chunk divides.
SHAPES = ((128, 64, 1000), (37, 96, 517), (257, 32, 3001))
SPREAD = 8.0  # as in attention_reference: independent roundings, eight times their root sum of squares
Loss = Callable[..., torch.Tensor]


def lacks(way: str) -> dict[str, str] | None:
    """The feature or package that this way needs and that is absent; None if it must work."""
    if way == "chunked" and not hasattr(F, "linear_cross_entropy"):
        reason = f"torch {torch.__version__} has no linear_cross_entropy: it came with 2.13"
        return {"package": "torch>=2.13", "reason": reason}
    if way == "liger" and not importlib.util.find_spec("liger_kernel"):
        return {"package": "liger-kernel", "reason": "the liger_kernel package is not part of this stack"}
    if way == "liger" and device().type != "cuda":
        return {"feature": "gpu", "reason": "Liger's kernels are Triton's, which need a GPU"}
    return None


def check(way: str, dtype: str) -> dict[str, Any]:
    """Every shape, with ignored rows, and the gradient of ignored rows."""
    with precision(dtype):
        return cases.run(_cases(WAYS[way], operands.DTYPES[dtype]))


def _cases(loss: Loss, dtype: torch.dtype) -> Iterator[cases.Case]:
    for rows, width, vocabulary in SHAPES:
        shape = f"{rows} x {width} over {vocabulary}"
        yield shape, functools.partial(_against_float64, loss, dtype, rows, width, vocabulary)
    yield "ignored rows leave no gradient", functools.partial(_ignored, loss, dtype)


def plain(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss of a model without a fused loss: logits in float32, then cross entropy."""
    return F.cross_entropy(F.linear(x, weight).float(), target, ignore_index=IGNORED)


def chunked(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """PyTorch's function, which never holds all logits at once."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=32)
    return F.linear_cross_entropy(x, weight, target, ignore_index=IGNORED, options=options)


def liger(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Liger's fused kernel."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss: torch.Tensor = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED)(weight, x, target)
    return loss


WAYS: dict[str, Loss] = {"plain": plain, "chunked": chunked, "liger": liger}


def _data(
    dtype: torch.dtype, rows: int, width: int, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = operands.normal(rows, width, dtype=dtype, seed=1)
    weight = operands.normal(vocabulary, width, dtype=dtype, seed=2, scale=width**-0.5)
    target = torch.randint(vocabulary, (rows,), generator=operands.generator(3), device=device())
    target[::5] = IGNORED
    return x, weight, target


def _with_gradients(
    loss: Loss, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    call = functools.partial(loss, target=target.to(x.device))
    return operands.with_gradients(call, {"dx": x, "dweight": weight})


def _exact(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x @ weight.T, target, ignore_index=IGNORED)


def _against_float64(
    loss: Loss, dtype: torch.dtype, rows: int, width: int, vocabulary: int
) -> Iterable[Reading]:
    x, weight, target = _data(dtype, rows, width, vocabulary)
    got = _with_gradients(loss, x, weight, target)
    a, w = float64(x, weight)
    ref, yardstick = _with_gradients(_exact, a, w, target), _with_gradients(plain, x, weight, target)
    logits = a @ w.T
    unit = unit_roundoff(dtype) + 2**-24 * vocabulary**0.5
    # Rounding a logit changes its probability by the same relative error; so does rounding dlogits.
    relative = SPREAD * unit * (1 + float(logits.abs().max()))
    kept = (target != IGNORED).to(a.device).double()
    p = (logits.softmax(-1) + F.one_hot(target.clamp_min(0).to(a.device), vocabulary)) * (
        kept / kept.sum()
    ).unsqueeze(-1)
    slack = (p.square() @ w.square()).sqrt(), (p.mT.square() @ a.square()).sqrt()
    yield elementwise(got[0][None], ref[0][None], relative, name="loss")
    for index, name in ((1, "dx"), (2, "dweight")):
        factor, bound = 3.0, relative * slack[index - 1]
        yield frobenius(got[index], ref[index], yardstick[index], factor=factor, name=f"{name} frobenius")
        yield elementwise(got[index], ref[index], bound, name=f"{name} elementwise")


def _ignored(loss: Loss, dtype: torch.dtype) -> Iterable[Reading]:
    x, weight, target = _data(dtype, 96, 32, 129)
    _, grad, _ = _with_gradients(loss, x, weight, target)
    rows = grad[target == IGNORED]
    yield exact(rows, torch.zeros_like(rows), name="dx of ignored rows")
