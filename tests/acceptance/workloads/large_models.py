"""Operations of a training step with more elements than 31 or 32 bits can count, against exact integers.

In: an operation and a limit. Out: the report of `cases.run`. `lacks` says which device has too little free
memory for a size, so that no size ends for want of memory.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from workloads import cases, device, operands
from workloads.gates import Reading, exact

LIMITS: Mapping[str, int] = {"2^31": 1 << 31, "2^32": 1 << 32}
PIECE = 1 << 26
DEPTH, NARROW = 1024, 16
VOCABULARY, HOT = 128_256, 1024.0
WIDTH = 4096
CHANNELS, SIDE = 64, 1024
LAYOUTS = ("NN", "NT", "TN", "TT")
MARGIN_BYTES = 2 << 30  # contexts, workspaces, and the pieces in which results are compared


@dataclass(frozen=True)
class Operation:
    """The cases of an operation, which take a limit, and the bytes of memory for each element of it."""

    cases: tuple[tuple[str, Callable[[int], Iterable[Reading]]], ...]
    bytes: float


def lacks(operation: str, limit: int) -> dict[str, Any] | None:
    """The feature or memory that this size needs and that is absent; None if it must run."""
    if device().type == "cpu":
        return {"feature": "gpu", "reason": "the sizes would take a CPU hours"}
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    needed = int(OPERATIONS[operation].bytes * limit) + MARGIN_BYTES
    return None if free >= needed else {"memory_gib": needed / 2**30, "present_gib": free / 2**30}


def check(operation: str, limit: int) -> dict[str, Any]:
    """The operation with more elements than the limit."""
    found = OPERATIONS[operation].cases
    return cases.run((name, functools.partial(function, limit)) for name, function in found)


def _pieces(rows: int, width: int) -> Iterator[slice]:
    step = max(1, PIECE // width)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _filled(rows: int, width: int) -> torch.Tensor:
    """Sparse -1, 0 and 1, made in pieces, because random numbers are float32 first."""
    out = torch.empty(rows, width, dtype=torch.bfloat16, device=device())
    for number, part in enumerate(_pieces(rows, width)):
        shape = out[part].shape
        out[part] = operands.integers(*shape, dtype=torch.bfloat16, seed=number, density=0.2)
    return out


def _product(limit: int, *, layout: str, tall: bool) -> Iterable[Reading]:
    """Beyond the limit are the elements of one operand; every piece is compared with its own product."""
    rows = limit // DEPTH + 3
    small = operands.integers(NARROW, DEPTH, dtype=torch.bfloat16, seed=1, density=0.2)
    a, b = (rows, small.shape[0]) if tall else (small.shape[0], rows)
    left = _stored(a, small, transposed=layout[0] == "T")
    right = _stored(b, small, transposed=layout[1] == "N").t()
    out = torch.mm(left, right)
    if not tall:
        out, left = out.t(), right.t()
    for part in _pieces(rows, DEPTH):
        piece = left[part].contiguous()
        yield exact(out[part].contiguous(), torch.mm(piece, small.t()), name=f"rows from {part.start}")


def _stored(rows: int, small: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    """(rows, DEPTH): the small operand, or a large one; stored by columns when transposed."""
    if rows == small.shape[0]:
        return small.t().contiguous().t() if transposed else small
    return _filled(DEPTH, rows).t() if transposed else _filled(rows, DEPTH)


def _logits(limit: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits that are 0 but for one of 1024 in each row, its place, and another place."""
    vocabulary = min(VOCABULARY, limit // 8)
    rows = limit // vocabulary + 3
    x = torch.zeros(rows, vocabulary, dtype=torch.bfloat16, device=device())
    index = torch.arange(rows, device=device())
    hot = index * 7919 % vocabulary
    x[index, hot] = HOT
    return x, hot, (hot + 1 + index % 5) % vocabulary


def _softmax(limit: int) -> Iterable[Reading]:
    """All of the probability is where the large logit is."""
    x, hot, _ = _logits(limit)
    out = x.softmax(-1)
    for part in _pieces(*x.shape):
        expected = torch.zeros_like(out[part]).scatter_(1, hot[part, None], 1.0)
        yield exact(out[part], expected, name=f"rows from {part.start}")


def _loss(limit: int) -> Iterable[Reading]:
    """The loss is 1024 in each row; its gradient is 1 at the large logit and -1 at the target."""
    x, hot, target = _logits(limit)
    loss = F.cross_entropy(x.requires_grad_(), target, reduction="none")
    (grad,) = torch.autograd.grad(loss, x, torch.ones_like(loss))
    yield exact(loss.detach(), torch.full_like(loss, HOT), name="loss")
    for part in _pieces(*x.shape):
        expected = torch.zeros_like(grad[part]).scatter_(1, hot[part, None], 1.0)
        expected.scatter_(1, target[part, None], -1.0)
        yield exact(grad[part], expected, name=f"gradient of rows from {part.start}")


def _table(limit: int) -> Iterable[Reading]:
    """Rows from everywhere in the table, and the gradient, which counts how often each row was used."""
    rows = limit // WIDTH + 3
    table = torch.empty(rows, WIDTH, dtype=torch.bfloat16, device=device())
    for part in _pieces(rows, WIDTH):
        table[part] = _numbered(part.start, part.stop)
    index = torch.tensor([0, rows // 2, rows - 1, rows - 1], device=device())
    out = F.embedding(index, table.requires_grad_())
    expected = torch.cat([_numbered(int(row), int(row) + 1) for row in index])
    yield exact(out.detach(), expected, name="rows")
    (grad,) = torch.autograd.grad(out, table, torch.ones_like(out))
    counts = torch.bincount(index, minlength=rows).to(grad.dtype)
    for part in _pieces(rows, WIDTH):
        yield exact(grad[part], counts[part, None].expand_as(grad[part]), name=f"gradient from {part.start}")


def _output(limit: int) -> Iterable[Reading]:
    table = _numbered(0, 251)
    index = torch.arange(limit // WIDTH + 3, device=device()) * 7 % len(table)
    out = F.embedding(index, table)
    for part in _pieces(*out.shape):
        yield exact(out[part], table.index_select(0, index[part]), name=f"rows from {part.start}")


def _numbered(start: int, stop: int) -> torch.Tensor:
    """Rows of which each element is its address in the whole table, modulo 251."""
    address = torch.arange(start * WIDTH, stop * WIDTH, device=device())
    return (address % 251).to(torch.bfloat16).view(-1, WIDTH)


def _convolution(limit: int) -> Iterable[Reading]:
    """Output and input gradient, each as large as the input; per image they are a plain product."""
    side = min(SIDE, math.isqrt(limit) // 32)
    images = limit // (CHANNELS * side * side) + 1
    x = _filled(images * side * side, CHANNELS).view(images, side, side, CHANNELS).permute(0, 3, 1, 2)
    w = operands.integers(CHANNELS, CHANNELS, dtype=torch.bfloat16, seed=1, density=0.3)
    weight = w.view(CHANNELS, CHANNELS, 1, 1).contiguous(memory_format=torch.channels_last)
    out = F.conv2d(x.requires_grad_(), weight)
    (grad,) = torch.autograd.grad(out, x, x.detach())
    for image in range(images):
        pixels = _pixels(x.detach(), image)
        for name, got, right in (("out", out.detach(), w.t()), ("dx", grad, w)):
            yield exact(_pixels(got, image), torch.mm(pixels, right), name=f"{name} of image {image}")


def _pixels(images: torch.Tensor, image: int) -> torch.Tensor:
    """(pixels, channels) of one image."""
    return images[image].permute(1, 2, 0).reshape(-1, CHANNELS)


_PRODUCTS = tuple(
    (f"{kind} product {layout}", functools.partial(_product, layout=layout, tall=kind == "tall"))
    for layout in LAYOUTS
    for kind in ("tall", "wide")
)
# Operands, results and gradients at their peak, with what the operation itself needs beside them.
OPERATIONS: Mapping[str, Operation] = {
    "product": Operation(_PRODUCTS, 2.2),
    "softmax": Operation((("softmax", _softmax),), 4.2),
    "cross_entropy": Operation((("cross entropy", _loss),), 10.2),
    "embedding": Operation((("large table", _table), ("large output", _output)), 6.2),
    # Some libraries copy both tensors to their own layout.
    "convolution": Operation((("1x1 convolution, channels last", _convolution),), 10.2),
}
