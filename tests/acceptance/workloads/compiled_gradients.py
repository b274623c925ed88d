"""Gradients that torch.compile has lost or written elsewhere, against eager mode and float64.

In: nothing. Out: the report of `cases.run`. `norms` has LayerNorms in a chain whose scales and shifts are
slices of one table (pytorch/pytorch#193061); `functions` has autograd functions of one's own whose result is
a sum in place (pytorch/pytorch#180642).
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F

from workloads import cases, device, operands, trainers
from workloads.compiled_models import BACKEND
from workloads.gates import Reading, beside_eager, elementwise

FACTOR = 3.0
WIDTH, ROWS = {"cuda": 1024, "cpu": 64}, {"cuda": (8, 4096), "cpu": (2, 48)}
PARTS = ("shift 1", "scale 1", "shift 2", "scale 2")
CHUNKS, VOCABULARY = 4, 515
Step = Callable[..., torch.Tensor]


def norms() -> dict[str, Any]:
    """A table of weights for every member of a batch, and one made from a condition for a single member."""
    width, (batch, tokens) = WIDTH[device().type], ROWS[device().type]
    table, condition = (1, len(PARTS), width), (1, len(PARTS) * width)
    return cases.run(
        [
            ("a table for the whole batch", functools.partial(_norms, _chained, batch, table)),
            ("a condition of one member", functools.partial(_norms, _conditioned, 1, condition)),
            ("tokens of one member", functools.partial(_norms, _chained, 1, table, 2 * tokens)),
        ]
    )


def functions() -> dict[str, Any]:
    """Sums in place inside a function's forward, and of the results of several calls."""
    return cases.run(
        [
            ("a sum in place inside the function", functools.partial(_function, _inside)),
            ("results summed in place", functools.partial(_function, _outside)),
            ("the trainers' loss in chunks", _chunked_loss),
        ]
    )


def _compiled(step: Step) -> Step:
    torch._dynamo.reset()
    fast: Step = torch.compile(step, backend=BACKEND[device().type], dynamic=False)
    return fast


def _modulated(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


def _chained(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    shift1, scale1, shift2, scale2 = table.chunk(len(PARTS), dim=1)
    return _modulated(_modulated(x, shift1, scale1), shift2, scale2)


def _conditioned(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    shift1, scale1, shift2, scale2 = table[:, None].chunk(len(PARTS), dim=-1)
    return _modulated(_modulated(x, shift1, scale1), shift2, scale2)


def _norms(step: Step, batch: int, shape: tuple[int, ...], tokens: int = 0) -> Iterable[Reading]:
    """Two steps with other data: a gradient that is not written shows the one of the step before."""
    fast, rows = _compiled(step), tokens or ROWS[device().type][1]
    for number in (1, 2):
        x = operands.normal(batch, rows, WIDTH[device().type], dtype=torch.float32, seed=number)
        table = operands.normal(*shape, dtype=torch.float32, seed=10 + number, scale=0.5)
        got, eager = _gradients(fast, x, table), _gradients(step, x, table)
        ref = _gradients(step, x.double(), table.double())
        terms = batch * rows
        yield from beside_eager(got[0], ref[0], eager[0], factor=FACTOR, name=f"step {number} dx")
        parts = (one.flatten().chunk(len(PARTS)) for one in (got[1], ref[1], eager[1]))
        for name, one, expected, plain in zip(PARTS, *parts, strict=True):
            words = f"step {number} d {name}"
            yield from beside_eager(one, expected, plain, factor=FACTOR, terms=terms, name=words)


def _gradients(step: Step, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The gradients of all tensors, each of the size of its own."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = step(*leaves)
    g = operands.normal(*out.shape, dtype=torch.float32, seed=5).to(out.dtype)
    grads: tuple[torch.Tensor, ...] = torch.autograd.grad(out, leaves, g)
    return grads


class _Total(torch.autograd.Function):  # type: ignore[misc]  # lint runs without torch
    """The sum of x * weight, added up in place piece by piece."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(x.shape[1])
        for rows, factors in zip(x.chunk(CHUNKS), weight.chunk(CHUNKS), strict=True):
            total += (rows * factors).sum(0)
        context.save_for_backward(x, weight)
        return total

    @staticmethod
    def backward(context: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = context.saved_tensors
        return weight * grad, x * grad


def _inside(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = _Total.apply(x, weight)
    return total


def _outside(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    total = x.new_zeros(x.shape[1])
    for rows, factors in zip(x.chunk(2), weight.chunk(2), strict=True):
        total += _Total.apply(rows, factors)
    return total


def _function(step: Step) -> Iterable[Reading]:
    x, weight = (operands.normal(256, 96, dtype=torch.float32, seed=seed) for seed in (1, 2))
    got = _gradients(_compiled(step), x, weight)
    ref = _gradients(lambda a, b: (a * b).sum(0), x.double(), weight.double())
    for name, one, expected in zip(("dx", "d weight"), got, ref, strict=True):
        yield elementwise(one, expected, 2.0**-23 * expected.abs(), name=name)


def _chunked_loss() -> Iterable[Reading]:
    """The loss head of the trainers, whose gradient is made in the forward pass, chunk by chunk."""
    layers = trainers.module("models.layers")
    rows = operands.normal(128, 64, dtype=torch.float32, seed=3)
    weight = operands.normal(VOCABULARY, 64, dtype=torch.float32, seed=4, scale=0.1)
    labels = torch.randint(VOCABULARY, (128,), generator=operands.generator(5), device=device())

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = layers.chunked_loss(x, w, labels, CHUNKS)
        return value

    got, eager = _gradients(_compiled(loss), rows, weight), _gradients(loss, rows, weight)
    ref = _gradients(lambda x, w: F.cross_entropy(x @ w.t(), labels), rows.double(), weight.double())
    for name, one, expected, plain in zip(("dx", "d weight"), got, ref, eager, strict=True):
        yield from beside_eager(one, expected, plain, factor=FACTOR, terms=len(rows), name=name)
