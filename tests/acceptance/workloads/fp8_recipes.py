"""8-bit products as training recipes call them: a scale for each tensor, or for each row. In: nothing.

Out: the report of `cases.run`. Operands and scales lie between guards, of NaN and of large values: what a
kernel reads beyond its operands shows in the result. The rows of the first operand are not padded.
"""

import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch

from workloads import arch, attention_refusals, cases, device, operands
from workloads.fp8 import ACCUMULATOR, FACTOR, product, used_format
from workloads.gates import Reading, elementwise, exact, frobenius
from workloads.reference import float64

Scaling = Literal["tensor", "rows"]
Scaled = tuple[torch.Tensor, torch.Tensor]

SHAPES = ((1, 128, 256), (17, 48, 1024), (129, 512, 512), (1000, 1040, 4096), (8191, 256, 2048))
CPU_SHAPES = SHAPES[:3]
GUARD = 1024  # elements, so that what follows stays aligned
LARGE = 1e30


def lacks() -> dict[str, str] | None:
    """The feature or package that scaled products need and that is absent; None if they must work."""
    name = arch.name()
    if arch.fp8() is None:
        return {"feature": "fp8", "reason": f"{name} has no 8-bit floating point product"}
    if name == "sm_89":
        return {"feature": "fp8", "reason": "PyTorch has products with a scale for each row from sm_90 on"}
    if name.startswith("gfx") and attention_refusals.release() < (2, 7):
        reason = (
            f"torch {torch.__version__} has a scale for each row on NVIDIA GPUs only: on AMD it came with 2.7"
        )
        return {"package": "torch>=2.7", "reason": reason}
    return None


def check() -> dict[str, Any]:
    """Every shape with both kinds of scales, as the forward pass and as the backward passes accumulate."""
    return cases.run(_cases())


def _cases() -> Iterator[cases.Case]:
    scalings: tuple[Scaling, ...] = ("tensor", "rows")
    for scaling in scalings:
        for shape in SHAPES if device().type == "cuda" else CPU_SHAPES:
            yield f"{scaling} {shape}", functools.partial(_product, *shape, scaling=scaling)
        yield f"{scaling} exact integers", functools.partial(_integers, scaling)


def _between(values: torch.Tensor, guard: float) -> torch.Tensor:
    """The same values in a larger buffer that holds `guard` on both sides."""
    count = values.numel()
    whole = torch.full((count + 2 * GUARD,), guard, dtype=torch.float32, device=device()).to(values.dtype)
    return whole[GUARD : GUARD + count].view(values.shape).copy_(values)


def _scaled(rows: int, columns: int, seed: int, scaling: Scaling) -> Scaled:
    """A matrix whose largest value, of all or of each row, is the format's, and the inverse scale."""
    dtype = used_format()
    wide = operands.normal(rows, columns, dtype=torch.float32, seed=seed)
    wide *= 2.0 ** (torch.arange(rows, device=device()) % 7 - 3)[:, None]  # rows of different sizes
    most = wide.abs().amax(1, keepdim=True) if scaling == "rows" else wide.abs().amax()
    scale = torch.finfo(dtype).max / most
    return (wide * scale).to(dtype), scale.reciprocal()


def _multiplied(a: Scaled, b: Scaled, guard: float, *, fast: bool = False) -> torch.Tensor:
    code = guard if math.isnan(guard) else torch.finfo(a[0].dtype).max
    x, y = _between(a[0], code), _between(b[0], code)
    scale_y = _between(b[1], guard)
    return product(x, y, _between(a[1], guard), scale_y.t() if scale_y.ndim else scale_y, fast=fast)


def _product(m: int, n: int, k: int, *, scaling: Scaling) -> Iterable[Reading]:
    a, b = _scaled(m, k, 6, scaling), _scaled(n, k, 7, scaling)
    x, y = float64(a[0].float() * a[1], b[0].float() * b[1])
    ref = x @ y.mT
    eager = ((a[0].float() @ b[0].float().t()) * a[1] * (b[1].t() if b[1].ndim else b[1])).bfloat16()
    out = _multiplied(a, b, float("nan"))
    yield frobenius(out, ref, eager, factor=FACTOR)
    yield elementwise(out, ref, ACCUMULATOR * x.norm(dim=1)[:, None] * y.norm(dim=1))
    yield exact(_multiplied(a, b, LARGE), out, name="between large values")


def _integers(scaling: Scaling) -> Iterable[Reading]:
    """Powers of two as scales, and sums that both ways of accumulation hold exactly."""
    dtype = used_format()
    a, b = (operands.integers(rows, 1024, dtype=torch.float32, seed=rows, density=0.2) for rows in (65, 96))
    scales = []
    for rows in (a, b):
        powers = 2.0 ** (torch.arange(len(rows), device=device()) % 5 - 2)
        scales.append(powers[:, None] if scaling == "rows" else torch.tensor(0.5, device=device()))
    expected = (a.double() @ b.double().t()) * scales[0] * (scales[1].t() if scales[1].ndim else scales[1])
    for fast in (False, True):
        for guard in (float("nan"), LARGE):
            pairs = ((a.to(dtype), scales[0]), (b.to(dtype), scales[1]))
            got = _multiplied(*pairs, guard, fast=fast)
            yield exact(got, expected, name=f"{'fast' if fast else 'full'} accumulation, guard {guard:g}")
