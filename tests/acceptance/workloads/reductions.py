"""Softmax, sums, extremes and prefix sums, against float64 or exactly.

In: a dtype. Out: the report of `cases.run`.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from workloads import cases, device, operands
from workloads.gates import Reading, elementwise, exact, frobenius, unit_roundoff
from workloads.reference import float64

LENGTHS = (1, 31, 1025, 50_257)
FLOAT32_COUNTS_TO = 2**24


def check(dtype: str, tier: str) -> dict[str, Any]:
    """Odd lengths, strided dimensions, all-equal and masked rows; integers exactly."""
    return cases.run(_cases(operands.DTYPES[dtype], tier))


def _cases(dtype: torch.dtype, tier: str) -> Iterator[cases.Case]:
    for length in LENGTHS:
        yield f"softmax over {length}", functools.partial(_softmax, length, dtype)
        yield f"softmax over {length} strided", functools.partial(_softmax, length, dtype, strided=True)
        yield f"integer sum over {length}", functools.partial(_integer_sum, length, dtype)
    yield "softmax of equal and masked rows", functools.partial(_special_rows, dtype)
    yield "argmax takes the first of equals, and NaN", functools.partial(_argmax, dtype)
    yield "cumulative sum of integers", functools.partial(_cumulative, dtype)
    if tier != "smoke":
        yield "sum beyond 2^24 ones", _long_sum


def _softmax(length: int, dtype: torch.dtype, *, strided: bool = False) -> Iterable[Reading]:
    x = operands.normal(7, length, dtype=dtype, seed=length, scale=4.0)
    if strided:
        x = x.t().contiguous().t()
    g = operands.normal(7, length, dtype=dtype, seed=1)
    leaf = x.detach().requires_grad_()
    out = leaf.softmax(-1)
    (grad,) = torch.autograd.grad(out, leaf, g)
    wide, dy = float64(x, g)
    p = wide.softmax(-1)
    ref = p * (dy - (p * dy).sum(-1, keepdim=True))
    # float32 inside: the exponent's argument (up to 32 here), the exponential, the sum of `length` terms
    inner = 2.0**-24 * (48 + length**0.5)
    size = p * (dy.abs() + (p * dy).abs().sum(-1, keepdim=True))
    yield elementwise(out.detach(), p, inner * p, name="out")
    yield elementwise(grad, ref, 2 * (unit_roundoff(dtype) + inner) * size, name="gradient")
    yield frobenius(out.detach(), p, x.float().softmax(-1).to(dtype), factor=2.0)


def _integer_sum(length: int, dtype: torch.dtype) -> Iterable[Reading]:
    x = operands.integers(5, length, dtype=dtype, seed=length, density=0.1)
    yield exact(x.sum(-1), x.double().sum(-1))
    yield exact(x.t().contiguous().sum(0), x.double().sum(-1), name="over rows")
    yield exact(x.amax(-1), x.double().amax(-1), name="maximum")


def _special_rows(dtype: torch.dtype) -> Iterable[Reading]:
    x = torch.full((3, 256), 1e4, dtype=dtype, device=device())
    x[1, 128:] = float("-inf")
    x[2] = float("-inf")
    out = x.softmax(-1)
    yield exact(out[0], torch.full((256,), 2.0**-8, device=device()), name="equal")
    yield exact(out[1, :128], torch.full((128,), 2.0**-7, device=device()), name="kept half")
    yield exact(out[1, 128:], torch.zeros(128, device=device()), name="masked half")
    yield Reading("numbers in a row with nothing left", float((~out[2].isnan()).sum()), 0.0)


def _argmax(dtype: torch.dtype) -> Iterable[Reading]:
    x = torch.zeros(4, 1000, dtype=dtype, device=device())
    x[0, 999] = x[1, 17] = 1
    x[2, 500] = float("nan")
    yield exact(x.argmax(-1)[:3], torch.tensor([999, 17, 500], device=device()))


def _cumulative(dtype: torch.dtype) -> Iterable[Reading]:
    x = torch.ones(3, 251, dtype=dtype, device=device())
    yield exact(x.cumsum(-1), torch.arange(1, 252, device=device()).expand(3, 251))


def _long_sum() -> Iterable[Reading]:
    """A sum with a single float32 running total would stop at 2^24."""
    ones = torch.ones(4 * FLOAT32_COUNTS_TO, device=device())
    yield exact(ones.sum(), torch.tensor(float(4 * FLOAT32_COUNTS_TO)))
    yield exact((ones > 0).sum(), torch.tensor(4 * FLOAT32_COUNTS_TO), name="count")
