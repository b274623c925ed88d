"""8-bit floating point: casts, and the scaled product against its dequantised operands in float64.

In: a tier. Out: the report of `cases.run`. The format is the architecture's (OCP or fnuz).
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from workloads import arch, cases, device, operands
from workloads.gates import Reading, elementwise, exact, frobenius
from workloads.reference import float64

SHAPES = ((16, 16, 16), (1, 128, 256), (17, 48, 1024), (256, 512, 512))
MORE_SHAPES = ((1000, 1040, 4096), (4096, 4096, 4096), (129, 28_672, 4096))
# Hopper keeps about 14 bits of partial sums within a tensor core step, and adds every 128 products to
# float32.
ACCUMULATOR = 2.0**-13
FACTOR = 4.0


def check(tier: str) -> dict[str, Any]:
    """Casts bit for bit on every architecture, and products if the matrix units support the format."""
    return cases.run(_cases(tier))


def _cases(tier: str) -> Iterator[cases.Case]:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        yield f"all codes of {dtype} round-trip", functools.partial(_round_trip, dtype)
        yield f"casts to {dtype} agree with the format's definition", functools.partial(_nearest, dtype)
    if arch.fp8() is not None:
        for shape in SHAPES + MORE_SHAPES if cases.thorough(tier) else SHAPES:
            yield f"scaled product {shape}", functools.partial(_product, *shape)
        yield "scaled product of exact integers", _integers


def _round_trip(dtype: torch.dtype) -> Iterable[Reading]:
    codes = torch.arange(256, device=device()).to(torch.uint8).view(dtype)
    back = codes.float().to(dtype)
    known = ~codes.float().isnan()
    yield exact(back.view(torch.uint8)[known], codes.view(torch.uint8)[known])
    yield Reading("NaN codes lost", float((~back.float().isnan() & ~known).sum()), 0.0)


def _nearest(dtype: torch.dtype) -> Iterable[Reading]:
    """Casts round to the nearest code: no other code is nearer."""
    codes = torch.arange(256).to(torch.uint8).view(dtype).double()
    codes = codes[codes.isfinite()]
    x = operands.normal(4096, dtype=torch.float32, seed=5, scale=8.0)
    error = (x.to(dtype).double() - x.double()).abs().cpu()
    best = (x.double().cpu()[:, None] - codes).abs().amin(1)
    yield Reading("not the nearest code", float((~(error <= best)).sum()), 0.0)


def quantised(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A normal matrix, scaled so that its largest value is the format's largest, and the inverse scale."""
    dtype = used_format()
    wide = operands.normal(rows, columns, dtype=torch.float32, seed=seed)
    scale = torch.finfo(dtype).max / wide.abs().amax()
    return (wide * scale).to(dtype), scale.reciprocal().float()


def product(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, *, fast: bool = False
) -> torch.Tensor:
    """The function under test: rows of `a` times rows of `b`, as torchao's float8 training calls it."""
    return torch._scaled_mm(  # there is no public function
        a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def timed_product(m: int, n: int, k: int) -> Callable[[], object]:
    """The product with fast accumulation, as the forward pass of a training step uses it."""
    (a, scale_a), (b, scale_b) = quantised(m, k, seed=1), quantised(n, k, seed=2)
    return functools.partial(product, a, b, scale_a, scale_b, fast=True)


def used_format() -> torch.dtype:
    """The format of the matrix units. Raises `AssertionError` if they have none."""
    dtype = arch.fp8()
    if dtype is None:
        raise AssertionError(f"{arch.name()} has no 8-bit floating point product")
    return dtype


def _product(m: int, n: int, k: int) -> Iterable[Reading]:
    (a, scale_a), (b, scale_b) = quantised(m, k, seed=6), quantised(n, k, seed=7)
    x, y = float64(a.float() * scale_a, b.float() * scale_b)
    ref = x @ y.mT
    allowance = ACCUMULATOR * x.norm(dim=1)[:, None] * y.norm(dim=1)
    eager = ((a.float() @ b.float().t()) * scale_a * scale_b).bfloat16()
    out = product(a, b, scale_a, scale_b)
    yield frobenius(out, ref, eager, factor=FACTOR)
    yield elementwise(out, ref, allowance)


def _integers() -> Iterable[Reading]:
    dtype = used_format()
    one = torch.ones((), device=device())
    a = operands.integers(64, 1024, dtype=torch.float32, seed=8, density=0.15)
    b = operands.integers(96, 1024, dtype=torch.float32, seed=9, density=0.3)
    yield exact(product(a.to(dtype), b.to(dtype), one, one), a.double() @ b.double().t())
