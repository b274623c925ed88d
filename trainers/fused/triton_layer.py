# ruff: noqa: PLR0917 - a kernel launch is positional
"""Triton kernels between the fused layer's products: rotary positions, SwiGLU and the loss, each with its
backward.

In and out: as the functions of the same name in ops.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def _rope(x, cos, sin, S, row_stride, HALF: tl.constexpr, HEADS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, HALF)[None]
    c = tl.load(cos + (row % S) * HALF + i)
    s = tl.load(sin + (row % S) * HALF + i)
    place = x + row * row_stride + (tl.program_id(1) * HEADS + head) * 2 * HALF + i
    a = tl.load(place).to(tl.float32)
    b = tl.load(place + HALF).to(tl.float32)
    tl.store(place, (a * c - b * s).to(x.dtype.element_ty))
    tl.store(place + HALF, (b * c + a * s).to(x.dtype.element_ty))


def rope_(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> None:
    """Turn the first `heads` heads (queries and keys) of every row [.., heads, head_dim] in place."""
    rows, width = qkv.shape
    group = 8 if heads % 8 == 0 else 1 << ((heads & -heads).bit_length() - 1)
    S, HALF = cos.shape
    _rope[(rows, heads // group)](qkv, cos, sin, S, width, HALF=HALF, HEADS=group, num_warps=4)


@triton.jit
def _rope_backward(
    dq, dk, dv, cos, sin, out, S, Q: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, P: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, P)[:, None]
    i = tl.arange(0, HALF)[None]
    c = tl.load(cos + (row % S) * HALF + i)
    s = -tl.load(sin + (row % S) * HALF + i)
    at = head * 2 * HALF + i
    base = out + row * (Q + 2 * KV) * 2 * HALF
    m = (head < Q) & (i < HALF)
    a = tl.load(dq + row * Q * 2 * HALF + at, mask=m, other=0.0).to(tl.float32)
    b = tl.load(dq + row * Q * 2 * HALF + at + HALF, mask=m, other=0.0).to(tl.float32)
    tl.store(base + at, (a * c - b * s).to(out.dtype.element_ty), mask=m)
    tl.store(base + at + HALF, (b * c + a * s).to(out.dtype.element_ty), mask=m)
    m = (head < KV) & (i < HALF)
    a = tl.load(dk + row * KV * 2 * HALF + at, mask=m, other=0.0).to(tl.float32)
    b = tl.load(dk + row * KV * 2 * HALF + at + HALF, mask=m, other=0.0).to(tl.float32)
    base += Q * 2 * HALF
    tl.store(base + at, (a * c - b * s).to(out.dtype.element_ty), mask=m)
    tl.store(base + at + HALF, (b * c + a * s).to(out.dtype.element_ty), mask=m)
    base += KV * 2 * HALF
    tl.store(base + at, tl.load(dv + row * KV * 2 * HALF + at, mask=m, other=0.0), mask=m)
    tl.store(base + at + HALF, tl.load(dv + row * KV * 2 * HALF + at + HALF, mask=m, other=0.0), mask=m)


def rope_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn gradients [rows, heads, head_dim] back, and put queries, keys and values side by side."""
    rows, heads, dim = dq.shape
    kv = dk.shape[1]
    out = torch.empty(rows, (heads + 2 * kv) * dim, device=dq.device, dtype=dq.dtype)
    _rope_backward[(rows,)](
        dq, dk, dv, cos, sin, out, cos.shape[0],
        Q=heads, KV=kv, HALF=dim // 2, P=triton.next_power_of_2(heads), num_warps=8,
    )  # fmt: skip
    return out


@triton.jit
def _swiglu(gu, a, amax, F, B: tl.constexpr, AMAX: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * B + tl.arange(0, B)
    m = i < F
    g = tl.load(gu + row * 2 * F + i, mask=m, other=0.0).to(tl.float32)
    u = tl.load(gu + row * 2 * F + F + i, mask=m, other=0.0).to(tl.float32)
    out = g * tl.sigmoid(g) * u
    tl.store(a + row * F + i, out.to(a.dtype.element_ty), mask=m)
    if AMAX:
        tl.atomic_max(amax + row % 256, tl.max(tl.abs(out), 0))


def swiglu(gu: Tensor, amax: Tensor | None = None) -> Tensor:
    """silu(gate)·up of rows that hold gate and up side by side."""
    rows, F = gu.shape[0], gu.shape[1] // 2
    a = torch.empty(rows, F, device=gu.device, dtype=gu.dtype)
    grid = (rows, triton.cdiv(F, 2048))
    some = torch.zeros(256, device=gu.device) if amax is not None else a
    _swiglu[grid](gu, a, some, F, B=2048, AMAX=amax is not None, num_warps=8)
    if amax is not None:
        torch.amax(some, 0, out=amax)
    return a


@triton.jit
def _swiglu_backward(da, gu, a, amax, F, B: tl.constexpr, AMAX: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * B + tl.arange(0, B)
    m = i < F
    g = tl.load(gu + row * 2 * F + i, mask=m, other=0.0).to(tl.float32)
    u = tl.load(gu + row * 2 * F + F + i, mask=m, other=0.0).to(tl.float32)
    d = tl.load(da + row * F + i, mask=m, other=0.0).to(tl.float32)
    sig = tl.sigmoid(g)
    silu = g * sig
    dg = d * u * (sig + silu * (1.0 - sig))
    du = d * silu
    tl.store(a + row * F + i, (silu * u).to(a.dtype.element_ty), mask=m)
    tl.store(gu + row * 2 * F + i, dg.to(gu.dtype.element_ty), mask=m)
    tl.store(gu + row * 2 * F + F + i, du.to(gu.dtype.element_ty), mask=m)
    if AMAX:
        tl.atomic_max(amax + row % 256, tl.max(tl.maximum(tl.abs(dg), tl.abs(du)), 0))


def swiglu_backward_(da: Tensor, gu: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Overwrite gu with its gradient. Returns it, and the activation computed again for the weights'
    gradient.
    """
    rows, F = da.shape
    a = torch.empty_like(da)
    some = torch.zeros(256, device=gu.device) if amax is not None else a
    _swiglu_backward[(rows, triton.cdiv(F, 2048))](
        da, gu, a, some, F, B=2048, AMAX=amax is not None, num_warps=8
    )
    if amax is not None:
        torch.amax(some, 0, out=amax)
    return gu, a


@triton.jit
def _cross_entropy(logits, labels, losses, scale, V: tl.constexpr, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    base = logits + row * V
    top = -float("inf")
    total = 0.0
    hit = 0.0
    for begin in range(0, V, B):
        i = begin + tl.arange(0, B)
        x = tl.load(base + i, mask=i < V, other=-float("inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new), 0)
        hit += tl.sum(tl.where(i == label, x, 0.0), 0)
        top = new
    log_sum = top + tl.log(total)
    tl.store(losses + row, log_sum - hit)
    for begin in range(0, V, B):
        i = begin + tl.arange(0, B)
        x = tl.load(base + i, mask=i < V, other=-float("inf")).to(tl.float32)
        p = tl.exp(x - log_sum) - tl.where(i == label, 1.0, 0.0)
        tl.store(base + i, (p * scale).to(logits.dtype.element_ty), mask=i < V)


def cross_entropy_(logits: Tensor, labels: Tensor, scale: float) -> Tensor:
    """Cross entropy of each row in float32. The logits are overwritten by `scale` times their gradient."""
    losses = torch.empty(logits.shape[0], device=logits.device, dtype=torch.float32)
    _cross_entropy[(logits.shape[0],)](logits, labels, losses, scale, V=logits.shape[1], B=4096, num_warps=8)
    return losses
