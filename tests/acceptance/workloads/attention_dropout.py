"""Dropout inside attention: how much is dropped, where, and whether the backward drops the same.

In: a dtype. Out: the report of `cases.run`. With q = 0 every probability is 1 / Sk, and with the
unit matrix as values the output is the dropped probabilities themselves: everything is known exactly.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from workloads import cases, device, operands
from workloads.gates import Reading, elementwise, exact, unit_roundoff

BATCH, HEADS, QUERIES, KEYS = 2, 3, 256, 128
RATES = (0.1, 0.25, 0.5)
GRAIN = 1 / 255  # kernels compare one random byte with the rate
SIGMAS = 6.0
MOST_SHARING = 4.5  # queries to a mask, on average


def check(dtype: str) -> dict[str, Any]:
    """Every rate, the effect of seeds, and rate 0, which drops nothing."""
    return cases.run(_cases(operands.DTYPES[dtype]))


def _cases(dtype: torch.dtype) -> Iterator[cases.Case]:
    for rate in RATES:
        yield f"rate {rate}: shares", functools.partial(_shares, dtype, rate)
        yield f"rate {rate}: backward", functools.partial(_backward, dtype, rate)
    yield "seeds", functools.partial(_seeds, dtype)
    yield "rate 0 drops nothing", functools.partial(_nothing, dtype)


def _operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.zeros(BATCH, HEADS, QUERIES, KEYS, dtype=dtype, device=device())
    k = operands.normal(BATCH, HEADS, KEYS, KEYS, dtype=dtype, seed=1)
    v = torch.eye(KEYS, dtype=dtype, device=device()).expand(BATCH, HEADS, KEYS, KEYS).contiguous()
    return q, k, v


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rate: float, seed: int) -> torch.Tensor:
    """The function under test, as a model in training calls it."""
    torch.manual_seed(seed)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=rate)


def _shares(dtype: torch.dtype, rate: float) -> Iterable[Reading]:
    """The right share of every head, query and key is dropped, and what is kept is scaled up.

    cuDNN 9.19 on an H200 uses one mask for the queries 8n, 8n + 2, 8n + 4 and 8n + 6, and another for the odd
    ones. The shares of keys then vary twice as much as by chance. So a key is wrong if its share is off by
    half, and masks are wrong if more than those four queries share one.
    """
    out = attend(*_operands(dtype), rate, seed=3)
    lost = (out == 0).double()
    for name, over in (("all", (0, 1, 2, 3)), ("head", (2, 3)), ("query", (1, 3)), ("key", (1, 2))):
        share = lost.mean(over)
        count = lost.numel() / share.numel()
        by_chance = SIGMAS * (rate * (1 - rate) / count) ** 0.5 + GRAIN
        allowed = max(by_chance, rate / 2) if name == "key" else by_chance
        yield Reading(f"dropped share of each {name}", float((share - rate).abs().max()), allowed)
    kept = torch.full_like(out, 1 / KEYS / (1 - rate), dtype=torch.float64)
    scaled = torch.where(out == 0, 0.0, kept)
    yield elementwise(out, scaled, 2 * unit_roundoff(dtype) * kept + GRAIN * kept, name="kept values")
    heads = out.flatten(0, 1) == 0
    pairs = [(i, j) for i in range(len(heads)) for j in range(i)]
    same = max(float((heads[i] == heads[j]).double().mean()) for i, j in pairs)
    masks = lost.flatten(0, 2).unique(dim=0)
    sharing = lost[..., 0].numel() / len(masks)
    yield Reading("queries that share a mask", sharing, MOST_SHARING, "on average")
    alike = rate**2 + (1 - rate) ** 2
    yield Reading("two heads alike", same - alike, 0.05, "heads share one mask")
    neighbours = float((out[..., 1:, :].eq(0) == out[..., :-1, :].eq(0)).double().mean())
    yield Reading("two queries alike", neighbours - alike, 0.05, "queries share one mask")


def _backward(dtype: torch.dtype, rate: float) -> Iterable[Reading]:
    """dV = P^T g, with the P of the forward."""
    q, k, v = _operands(dtype)
    leaf = v.requires_grad_()
    out = attend(q, k, leaf, rate, seed=4)
    g = operands.normal(*out.shape, dtype=dtype, seed=5)
    (grad,) = torch.autograd.grad(out, leaf, g)
    p, dy = out.detach().double(), g.double()
    size = (p.mT.square() @ dy.square()).sqrt()
    yield elementwise(grad, p.mT @ dy, (8 * unit_roundoff(dtype) + 2 * GRAIN) * size, name="dv")


def _seeds(dtype: torch.dtype) -> Iterable[Reading]:
    tensors = _operands(dtype)
    first = attend(*tensors, 0.5, seed=6)
    yield exact(attend(*tensors, 0.5, seed=6), first, name="same seed")
    other = attend(*tensors, 0.5, seed=7)
    following = F.scaled_dot_product_attention(*tensors, dropout_p=0.5)
    for name, mask in (("another seed", other), ("the next call", following)):
        same = float((mask.eq(0) == first.eq(0)).double().mean())
        yield Reading(f"{name} drops the same", same - 0.5, 0.05)


def _nothing(dtype: torch.dtype) -> Iterable[Reading]:
    out = attend(*_operands(dtype), 0.0, seed=8)
    yield exact(out, torch.full_like(out, 1 / KEYS))
