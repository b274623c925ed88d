"""Matrix multiplication: `mm`, `linear`, `addmm` and `bmm` against float64, forward and backward.

In: a dtype by name and a tier. Out: the report of `cases.run`.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from workloads import arch, cases, operands
from workloads.gates import Reading, elementwise, exact, frobenius, relative_error, unit_roundoff
from workloads.reference import float64, precision

EDGES = (1, 7, 17, 127, 129, 1000, 4097)
SMOKE_SHAPES = ((127, 129, 1000), (1, 17, 129), (129, 1, 7), (17, 127, 1), (7, 129, 4097), (64, 64, 512))
# Kernels read operands in tiles, of which the last one of a sum has rows and columns of what lies beside it.
SUMS = (3, 31, 33, 40, 100, 257, *EDGES)
LAYOUTS = ("NN", "NT", "TN", "TT")
EVERY_LAYOUT = (127, 1000, 513)
# Tall and narrow, short and wide, and a product of few elements that are long sums.
FLAT = ((100_003, 3, 257), (3, 100_003, 257), (5, 7, 100_003))
SMOKE_FLAT = ((4099, 3, 65), (3, 4099, 65), (5, 7, 10_007))
# Rounding of the accumulated products: accumulators are fp32; TF32 cuts the operands to 11 bits.
ACCUMULATOR = {"fp32": 2**-24, "tf32": 2**-11, "bf16": 2**-24, "fp16": 2**-24}
FORWARD, BACKWARD = 2.0, 3.0
SHORT_SUM = 16
IEEE = 1e-6  # TF32 reads 3e-4


def check(dtype: str, tier: str) -> dict[str, Any]:
    """Every case for one dtype; from `standard` on, all triples of the edge sizes."""
    with precision(dtype):
        return cases.run(_cases(dtype, tier))


def default_precision() -> dict[str, Any]:
    """A float32 product with PyTorch's default settings."""
    return cases.run([("fp32 by default", _default_precision)])


def _default_precision() -> Iterable[Reading]:
    a, b = (operands.normal(512, 512, dtype=torch.float32, seed=seed) for seed in (1, 2))
    x, y = float64(a, b)
    yield Reading("relative error", relative_error(torch.mm(a, b), x @ y), IEEE)


def rows(dtype: str) -> dict[str, Any]:
    """Products beside whose rows others hold NaN and infinity."""
    with precision(dtype):
        return cases.run(
            (f"{name} K {k}", functools.partial(_alone, call, layout, k, dtype=dtype))
            for k in SUMS
            for name, (call, layout) in ALONE.items()
        )


def _alone(call: Callable[..., torch.Tensor], layout: str, k: int, *, dtype: str) -> Iterable[Reading]:
    """A product's rows and columns have only what they are of: two thirds of them hold no number."""
    kind = operands.DTYPES[dtype]
    a = operand(97, k, transposed=layout[0] == "T", dtype=kind, seed=k)
    b = operand(k, 70, transposed=layout[1] == "T", dtype=kind, seed=k + 1)
    for whole, ends in ((a, ("nan", "inf")), (b.t(), ("-inf", "nan"))):
        for place, value in enumerate(ends):
            whole[place::3] = float(value)
    yield from judge(call(a, b)[2::3, 2::3], a[2::3], b[:, 2::3], dtype=dtype)


# name: (a product of [m, k] and [k, n], how both are stored)
ALONE: Mapping[str, tuple[Callable[..., torch.Tensor], str]] = {
    # Planted faults replace torch.mm.
    **{f"mm {layout}": (lambda a, b: torch.mm(a, b), layout) for layout in LAYOUTS},  # noqa: PLW0108
    "linear": (lambda a, b: F.linear(a, b.t()), "NT"),
    "addmm": (lambda a, b: torch.addmm(b.new_zeros(b.shape[1]), a, b), "NN"),
    "bmm": (lambda a, b: torch.bmm(a.expand(3, *a.shape), b.expand(3, *b.shape))[1], "NN"),
    "bmm of batches": (lambda a, b: torch.bmm(torch.stack((a, a)), torch.stack((b, b)))[1], "NN"),
}


def _cases(dtype: str, tier: str) -> Iterator[cases.Case]:
    shapes = tuple(itertools.product(EDGES, repeat=3)) if cases.thorough(tier) else SMOKE_SHAPES
    for index, (m, n, k) in enumerate(shapes):
        layout = LAYOUTS[index % 4]
        yield f"mm {layout} {m}x{n}x{k}", functools.partial(_mm, m, n, k, layout=layout, dtype=dtype)
    for layout in LAYOUTS:
        for m, n, k in (EVERY_LAYOUT, *(FLAT if cases.thorough(tier) else SMOKE_FLAT)):
            yield f"mm {layout} {m}x{n}x{k}", functools.partial(_mm, m, n, k, layout=layout, dtype=dtype)
    yield "mm exact integers 192x136x4096", functools.partial(_integers, dtype)
    yield "mm with outliers 96x128x640", functools.partial(_outliers, dtype)
    yield "mm wide leading dimension, odd offset", functools.partial(_strided, dtype)
    yield "bmm stride 0", functools.partial(_broadcast, dtype)
    yield "linear backward 65x127x193", functools.partial(_linear, dtype)
    yield "addmm beta 0 ignores NaN", functools.partial(_addmm, dtype)
    yield "NaN and Inf propagate", functools.partial(_nonfinite, dtype)


def slack(a: torch.Tensor, b: torch.Tensor, dtype: str) -> torch.Tensor:
    """v steps(K) ||a_i|| ||b_j||:
    the error that a sum of K products may have in any order (float64 operands).
    """
    depth = a.shape[-1]
    if dtype == "tf32":  # the operands themselves are rounded: errors are independent per product
        return 8 * ACCUMULATOR[dtype] * ((a * a) @ (b * b)).sqrt()
    norms = a.norm(dim=-1, keepdim=True) * b.norm(dim=-2, keepdim=True)
    return ACCUMULATOR[dtype] * steps(depth) * norms


def flushed(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | float:
    """What sums of products (float64 operands) lose where an architecture takes subnormals for zero."""
    if dtype == torch.float32 or not arch.flushes_subnormals():
        return 0.0
    x, y, least = a.abs(), b.abs(), torch.finfo(dtype).tiny
    small, tiny = torch.where(x < least, x, 0.0), torch.where(y < least, y, 0.0)
    return small @ y + x @ tiny + least


def steps(depth: int) -> float:
    """How many roundings add up in a sum: the root of their number in long sums, all of them in short ones.

    Among the millions of short sums of one product, some have all roundings in the same direction.
    """
    return max(float(depth**0.5), float(min(depth, SHORT_SUM)))


def split_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The yardstick: a plain product summed in two halves in float32, rounded once to the operands' dtype."""
    half = max(1, a.shape[-1] // 2)
    x, y = (
        (cut_to_tf32(a), cut_to_tf32(b)) if torch.backends.cuda.matmul.allow_tf32 else (a.float(), b.float())
    )
    total = torch.matmul(x[..., :half], y[..., :half, :]) + torch.matmul(x[..., half:], y[..., half:, :])
    return total.to(a.dtype)


def cut_to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """float32 rounded to TF32's ten explicit bits."""
    return ((tensor.float().contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def judge(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    dtype: str,
    factor: float = FORWARD,
    operand_error: float = 0.0,
    name: str = "",
) -> tuple[Reading, ...]:
    """Gates (a) and (b) of `out` = a @ b. The architecture may round each operand by `operand_error`."""
    x, y = float64(a, b)
    ref = x @ y
    allowance = slack(x, y, dtype) + flushed(x, y, a.dtype)
    if operand_error:
        allowance = allowance + 2 * operand_error * (x.abs() @ y.abs())
        a, b = a.bfloat16().to(a.dtype), b.bfloat16().to(b.dtype)  # so does the yardstick
    if dtype == "tf32":  # hardware may truncate the operands, while the yardstick rounds them
        factor *= 2
    return (
        frobenius(out, ref, split_sum(a, b), factor=factor, terms=a.shape[-1], name=f"{name}frobenius"),
        elementwise(out, ref, allowance, name=f"{name}elementwise"),
    )


def operand(rows: int, columns: int, *, transposed: bool, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A normal matrix, stored by columns when transposed."""
    if transposed:
        return operands.normal(columns, rows, dtype=dtype, seed=seed).t()
    return operands.normal(rows, columns, dtype=dtype, seed=seed)


def _mm(m: int, n: int, k: int, *, layout: str, dtype: str) -> Iterable[Reading]:
    kind = operands.DTYPES[dtype]
    a = operand(m, k, transposed=layout[0] == "T", dtype=kind, seed=m * 7 + k)
    b = operand(k, n, transposed=layout[1] == "T", dtype=kind, seed=n * 11 + k)
    out, whole = operands.guarded(m, n, dtype=kind)
    torch.mm(a, b, out=out)
    yield from judge(out, a, b, dtype=dtype)
    yield Reading("guard band", operands.guards_touched(out, whole), 0)


def _integers(dtype: str) -> Iterable[Reading]:
    kind = operands.DTYPES[dtype]
    a = operands.integers(192, 4096, dtype=kind, seed=1, density=0.15)
    b = operands.integers(4096, 136, dtype=kind, seed=2, density=0.5)
    x, y = float64(a, b)
    yield exact(torch.mm(a, b), x @ y)


def _outliers(dtype: str) -> Iterable[Reading]:
    kind = operands.DTYPES[dtype]
    size = 1e4 if kind != torch.float16 else 64.0  # larger products leave fp16's range
    a = operands.outliers(96, 640, dtype=kind, seed=3, size=size)
    b = operands.normal(640, 128, dtype=kind, seed=4)
    yield from judge(torch.mm(a, b), a, b, dtype=dtype)


def _strided(dtype: str) -> Iterable[Reading]:
    kind = operands.DTYPES[dtype]
    flat = operands.normal(1 + 65 * 300, dtype=kind, seed=5)[1:]  # begins one element past an aligned address
    a = flat.view(65, 300)[:, :129]
    b = operands.normal(129, 200, dtype=kind, seed=6)[:, 3:70]
    yield from judge(torch.mm(a, b), a, b, dtype=dtype)


def _broadcast(dtype: str) -> Iterable[Reading]:
    kind = operands.DTYPES[dtype]
    a = operands.normal(5, 33, 65, dtype=kind, seed=7)
    b = operands.normal(65, 31, dtype=kind, seed=8).expand(5, 65, 31)
    yield from judge(torch.bmm(a, b), a, b, dtype=dtype)


def _linear(dtype: str) -> Iterable[Reading]:
    kind = operands.DTYPES[dtype]
    x = operands.normal(65, 193, dtype=kind, seed=9).requires_grad_()
    w = operands.normal(127, 193, dtype=kind, seed=10).requires_grad_()
    bias = operands.normal(127, dtype=kind, seed=11).requires_grad_()
    g = operands.normal(65, 127, dtype=kind, seed=12)
    out = F.linear(x, w, bias)
    out.backward(g)
    left, right = (
        torch.cat((x, torch.ones_like(x[:, :1])), 1).detach(),
        torch.cat((w, bias[:, None]), 1).detach(),
    )
    yield from judge(out.detach(), left, right.t(), dtype=dtype, name="forward ")
    backward: dict[str, Any] = {"factor": BACKWARD, "operand_error": arch.backward_roundoff(kind)}
    yield from judge(x.grad, g, w.detach(), dtype=dtype, name="dx ", **backward)
    yield from judge(w.grad, g.t(), x.detach(), dtype=dtype, name="dw ", **backward)
    (ref,) = float64(g)
    allowed = unit_roundoff(torch.float32) * len(ref) * ref.norm(dim=0)
    yield elementwise(bias.grad, ref.sum(0), allowed, name="dbias")


def _addmm(dtype: str) -> Iterable[Reading]:
    kind = operands.DTYPES[dtype]
    a = operands.normal(33, 129, dtype=kind, seed=13)
    b = operands.normal(129, 47, dtype=kind, seed=14)
    ignored = operands.with_nan(torch.empty(33, 47, dtype=kind, device=a.device))
    yield from judge(torch.addmm(ignored, a, b, beta=0), a, b, dtype=dtype)


def _nonfinite(dtype: str) -> Iterable[Reading]:
    kind = operands.DTYPES[dtype]
    a = operands.integers(16, 64, dtype=kind, seed=15, density=0.5)
    b = torch.ones(64, 16, dtype=kind, device=a.device)
    a[3, 5], a[7, 9] = float("nan"), float("inf")
    x, y = float64(a, b)
    yield elementwise(torch.mm(a, b), x @ y, slack=1e-6, name="non-finite")
