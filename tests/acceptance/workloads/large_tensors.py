"""Tensors with more than 2^31 elements: if a 32-bit index wraps, values silently land in the wrong place.

In: nothing; needs about 40 GiB of free device memory. Out: the report of `cases.run`.
"""

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F

from workloads import cases, device, operands
from workloads.gates import Reading, exact

NEEDED_BYTES = 40 << 30
LIMIT = 2**31  # the range of 32 bits with a sign
BEYOND = 4099
PIECE = 1 << 26
TAIL = 1 << 16
WIDTH = 64
VOCABULARY = 128_256


def lacks() -> dict[str, Any] | None:
    """The feature or memory that the check needs and that is absent; None if it must run."""
    if device().type == "cpu":
        return {"feature": "gpu", "reason": "the sizes would take a CPU hours"}
    present = torch.cuda.mem_get_info()[0]
    needed_gib, present_gib = NEEDED_BYTES / 2**30, present / 2**30
    return None if present >= NEEDED_BYTES else {"memory_gib": needed_gib, "present_gib": present_gib}


def check(limit: int = LIMIT) -> dict[str, Any]:
    """Copy, addition, softmax rows, a sum and a product, each with more elements than the limit."""
    functions = {"copy and add": _elementwise, "product": _product, "softmax rows": _rows, "sum": _sum}
    return cases.run((name, functools.partial(function, limit)) for name, function in functions.items())


def pattern(start: int, count: int) -> torch.Tensor:
    """A value for each address: its index mod 251."""
    return (torch.arange(start, start + count, device=device()) % 251).to(torch.bfloat16)


def _elementwise(limit: int) -> Iterable[Reading]:
    count = limit + BEYOND
    x = torch.empty(count, dtype=torch.bfloat16, device=device())
    for start in range(0, count, PIECE):
        piece = x[start : start + PIECE]
        piece.copy_(pattern(start, len(piece)))
    y = torch.add(x.clone(), x)
    wrong = 0
    for start in range(0, count, PIECE):
        piece = y[start : start + PIECE]
        wrong += int((piece != 2 * pattern(start, len(piece))).sum())
    yield Reading("wrong elements", float(wrong), 0.0)


def _product(limit: int) -> Iterable[Reading]:
    """A square output: its first, middle and last rows against the same rows computed alone."""
    rows = math.isqrt(limit) + 59
    a = operands.integers(rows, WIDTH, dtype=torch.bfloat16, seed=1, density=0.5)
    b = operands.integers(WIDTH, rows, dtype=torch.bfloat16, seed=2, density=0.5)
    out = torch.mm(a, b)
    for start in (0, rows // 2, rows - WIDTH):
        part = slice(start, start + WIDTH)
        yield exact(out[part], a[part].double() @ b.double(), name=f"rows from {start}")


def _rows(limit: int) -> Iterable[Reading]:
    """A batch of logits of the size that B x T x V reaches."""
    vocabulary = min(VOCABULARY, limit // 8)
    rows = limit // vocabulary + 3
    x = torch.zeros(rows, vocabulary, dtype=torch.bfloat16, device=device())
    target = torch.arange(rows, device=device()) * 7919 % vocabulary
    x[torch.arange(rows, device=device()), target] = 1024.0
    loss = F.cross_entropy(x, target, reduction="none")
    yield exact(loss, torch.zeros_like(loss), name="loss")
    yield exact(x.argmax(-1)[-TAIL:], target[-TAIL:], name="argmax")


def _sum(limit: int) -> Iterable[Reading]:
    ones = torch.ones(limit + BEYOND, dtype=torch.int8, device=device())
    yield exact(ones.sum(), torch.tensor(limit + BEYOND))
    yield exact((ones == 1).sum(), torch.tensor(limit + BEYOND), name="count")
