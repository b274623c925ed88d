"""Attention in float64: output, gradients, the error that each element may have, and an eager yardstick.

In: q, k, v and the output's gradient. Out: a `Reference`, or the yardstick's tensors.

As in the FlashAttention paper (arXiv 2205.14135, appendix B): P = softmax(scale q k^T), dV = P^T dO,
dP = dO V^T, delta = rowsum(dO O), dS = P (dP - delta), dQ = scale dS K, dK = scale dS^T Q.
"""

from dataclasses import dataclass

import torch

from workloads.gates import unit_roundoff
from workloads.reference import float64

# Rounding errors of P and dS are independent, so their sum over the keys grows as the root of the sum of
# squares. No error among 10^7 elements reaches eight times that, and a single lost key exceeds it.
SPREAD = 8.0
FLOAT32 = 2**-24
EXPONENTIAL = 8.0  # hardware exp2 is good to about two units in the last place of its float32 argument


@dataclass(frozen=True)
class Reference:
    """Float64 output and gradients (dq, dk, dv), and the error that each of the four may have."""

    out: torch.Tensor
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    slack: tuple[torch.Tensor, ...]


def mask(sq: int, sk: int, on: torch.device) -> torch.Tensor:
    """True where a query may see a key; `is_causal` aligns the diagonal at the top left."""
    return torch.ones(sq, sk, dtype=torch.bool, device=on).tril()


def probabilities(
    q: torch.Tensor, k: torch.Tensor, *, causal: bool, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) over the keys (equal heads); `seen` (Sq, Sk) replaces the diagonal."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        seen = mask(scores.shape[-2], scores.shape[-1], scores.device)
    if seen is not None:
        scores = scores.masked_fill(~seen.to(scores.device), float("-inf"))
    return scores.softmax(-1)


def compute(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    *,
    causal: bool,
    seen: torch.Tensor | None = None,
) -> Reference:
    """Output, gradients and their slack; q, g: (B, Hq, Sq, D), k, v: (B, Hkv, Sk, D)."""
    unit, groups, scale = unit_roundoff(q.dtype), q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    q, k, v, g = float64(q, k, v, g)
    k, v = (tensor.repeat_interleave(groups, dim=1) for tensor in (k, v))
    p = probabilities(q, k, causal=causal, seen=seen)
    out = p @ v
    ds = p * (g @ v.mT - (g * out).sum(-1, keepdim=True))
    grads = scale * (ds @ k), _fold(scale * (ds.mT @ q), groups), _fold(p.mT @ g, groups)

    # How the errors of P, dS and delta enter each result, as root sums of squares.
    # Of one P or dS: its rounding, and float32's in the score, the exponential, the sums.
    scores = q.norm(dim=-1, keepdim=True) * k.norm(dim=-1, keepdim=True).mT * q.shape[-1] ** -0.5
    rounding = unit + FLOAT32 * (EXPONENTIAL + k.shape[-2] ** 0.5 + scores)
    ddelta = unit * (g * out).norm(dim=-1, keepdim=True)
    dp = (p * rounding).square()
    # g v^T and delta are float32 sums over D: where they cancel (one key left), only their errors remain.
    summed = FLOAT32 * q.shape[-1] ** 0.5 * g.norm(dim=-1, keepdim=True) * v.norm(dim=-1, keepdim=True).mT
    dds = (ds * rounding).square() + p.square() * (ddelta.square() + summed.square())
    slack = (
        _rss(dp, v),
        scale * (_rss(dds, k) + ddelta * (p @ k).abs()),
        _fold(scale * _rss(dds.mT, q), groups),
        _fold(_rss(dp.mT, g), groups),
    )
    return Reference(out, grads, tuple(SPREAD * part for part in slack))


def _rss(squares: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return (squares @ values.square()).sqrt()


def _fold(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """Gradients of shared key/value heads are summed over the queries that share them."""
    return tensor.unflatten(1, (-1, groups)).sum(2)


def eager(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    *,
    causal: bool,
    seen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """The yardstick: plain operations in the operands' dtype. Returns (out, dq, dk, dv)."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
    groups = q.shape[1] // k.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in leaves[1:])
    out = probabilities(leaves[0], key, causal=causal, seen=seen) @ value
    out.backward(g)
    return (out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None))
