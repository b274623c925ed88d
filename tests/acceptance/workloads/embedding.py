"""Embedding: the forward is a copy, bit for bit; the backward is a sum, against float64.

In: a dtype. Out: the report of `cases.run`.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from workloads import cases, device, operands
from workloads.gates import Reading, elementwise, exact, unit_roundoff
from workloads.reference import float64

ROWS = (1, 1000, 128_256)


def check(dtype: str) -> dict[str, Any]:
    """Few and many rows, repeated indices, a padding row."""
    return cases.run(_cases(operands.DTYPES[dtype]))


def _cases(dtype: torch.dtype) -> Iterator[cases.Case]:
    for rows in ROWS:
        yield f"{rows} rows", functools.partial(_embedding, rows, dtype)
    yield "one index 200 times sums exactly", functools.partial(_repeated, dtype)


def _embedding(rows: int, dtype: torch.dtype) -> Iterable[Reading]:
    weight = operands.normal(rows, 40, dtype=dtype, seed=rows).requires_grad_()
    index = torch.randint(rows, (3, 77), generator=operands.generator(4), device=device())
    index[0, 0], index[-1, -1] = rows - 1, 0
    out = F.embedding(index, weight, padding_idx=0)
    yield exact(out.detach(), weight.detach()[index], name="forward")
    g = operands.normal(3, 77, 40, dtype=dtype, seed=5)
    (grad,) = torch.autograd.grad(out, weight, g)
    value, dy = float64(weight, g)
    places = index.to(dy.device).flatten()
    sums = torch.zeros_like(value).index_add_(0, places, dy.flatten(0, 1))
    sizes = torch.zeros_like(value).index_add_(0, places, dy.flatten(0, 1).abs())
    sums[0] = sizes[0] = 0.0  # the padding row learns nothing
    yield elementwise(grad, sums, 8 * unit_roundoff(dtype) * sizes, name="gradient")


def _repeated(dtype: torch.dtype) -> Iterable[Reading]:
    weight = torch.zeros(9, 16, dtype=dtype, device=device()).requires_grad_()
    index = torch.full((200,), 4, device=device())
    F.embedding(index, weight).sum().backward()
    expected = torch.zeros(9, 16, device=device())
    expected[4] = 200
    yield exact(operands.gradient(weight, "the gradient"), expected)
