# ruff: noqa: PLR0917 - a kernel launch is positional
"""The Triton kernels of the fused layer: each reads memory once.

Autograd's formulas read it two or three times.

In and out: as the functions of the same name in ops.py, which are also their reference in tests. On a GPU at
its power cap the energy of a step decides its speed, and moving a byte costs more than an operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from fused.ops import IGNORED as NO_LABEL

if TYPE_CHECKING:
    from torch import Tensor


# ---- The largest absolute value, for FP8 scales ----------------------------------------------------------

# As integers, bits without their sign compare like floats, NaN on top; Triton's maximum of floats drops NaN.
MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _size(x):
    """Return the bits of |x| (float32) as integers that compare like |x|, with NaN above all."""
    return x.to(tl.int32, bitcast=True) & MAGNITUDE


@triton.jit
def _raise_to(amax, sizes):
    """Raise the float32 at `amax` to the largest of `sizes`."""
    tl.atomic_max(amax.to(tl.pointer_type(tl.int32), bitcast=True), tl.max(sizes, 0))


# ---- The residual sum and the norm in one pass, and the backward of both ---------------------------------


@triton.jit
def _add_norm(
    x, y, w, s, h, rstd, amax, eps, D: tl.constexpr, B: tl.constexpr, ADD: tl.constexpr, AMAX: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, B)
    m = i < D
    v = tl.load(x + row * D + i, mask=m, other=0.0).to(tl.float32)
    if ADD:
        v = (
            (v + tl.load(y + row * D + i, mask=m, other=0.0).to(tl.float32))
            .to(s.dtype.element_ty)
            .to(tl.float32)
        )
        tl.store(s + row * D + i, v.to(s.dtype.element_ty), mask=m)
    r = 1.0 / tl.sqrt(tl.sum(v * v, 0) / D + eps)
    tl.store(rstd + row, r)
    out = (v * r * tl.load(w + i, mask=m, other=0.0).to(tl.float32)).to(h.dtype.element_ty)
    tl.store(h + row * D + i, out, mask=m)
    if AMAX:
        _raise_to(amax, _size(out.to(tl.float32)))


def add_norm(
    x: Tensor, y: Tensor | None, w: Tensor, eps: float, amax: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The sum x + y, its RMS norm times w, and 1/rms of each row."""
    rows, D = x.shape
    s, h = (x if y is None else torch.empty_like(x)), torch.empty_like(x)
    rstd = torch.empty(rows, device=x.device, dtype=torch.float32)
    B = triton.next_power_of_2(D)
    _add_norm[(rows,)](
        x, y if y is not None else x, w, s, h, rstd, amax if amax is not None else rstd, eps,
        D=D, B=B, ADD=y is not None, AMAX=amax is not None, num_warps=8,
    )  # fmt: skip
    return s, h, rstd


@triton.jit
def _norm_apply(s, rstd, w, h, D: tl.constexpr, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, B)
    m = i < D
    v = tl.load(s + row * D + i, mask=m, other=0.0).to(tl.float32) * tl.load(rstd + row)
    tl.store(
        h + row * D + i, (v * tl.load(w + i, mask=m, other=0.0).to(tl.float32)).to(h.dtype.element_ty), mask=m
    )


def norm_apply(s: Tensor, rstd: Tensor, w: Tensor) -> Tensor:
    """The norm computed again from what forward kept: the sum and 1/rms."""
    h = torch.empty_like(s)
    _norm_apply[(s.shape[0],)](s, rstd, w, h, D=s.shape[1], B=triton.next_power_of_2(s.shape[1]), num_warps=8)
    return h


@triton.jit
def _norm_backward(
    dh,
    s,
    rstd,
    w,
    residual,
    ds,
    dw,
    rows,
    P: tl.constexpr,
    PER: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, B)
    m = i < D
    weight = tl.load(w + i, mask=m, other=0.0).to(tl.float32)
    total = tl.zeros([B], tl.float32)
    for turn in range(PER):
        row = start + turn * P
        m = (i < D) & (row < rows)
        r = tl.load(rstd + row, mask=row < rows, other=0.0)
        g = tl.load(dh + row * D + i, mask=m, other=0.0).to(tl.float32)
        n = tl.load(s + row * D + i, mask=m, other=0.0).to(tl.float32) * r
        total += g * n
        g = g * weight
        out = (g - n * (tl.sum(g * n, 0) / D)) * r
        out += tl.load(residual + row * D + i, mask=m, other=0.0).to(tl.float32)
        tl.store(ds + row * D + i, out.to(ds.dtype.element_ty), mask=m)
    tl.store(dw + start * D + i, total, mask=i < D)


def norm_backward(dh: Tensor, s: Tensor, rstd: Tensor, w: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of the normed sum plus the residual's, and the gradient of w in float32."""
    rows, D = s.shape
    programs = min(rows, 528)  # four to each of Hopper's 132 multiprocessors
    ds, dw = torch.empty_like(s), torch.empty(programs, D, device=s.device, dtype=torch.float32)
    B = triton.next_power_of_2(D)
    per = triton.cdiv(rows, programs)
    _norm_backward[(programs,)](
        dh, s, rstd, w, residual, ds, dw, rows, P=programs, PER=per, D=D, B=B, num_warps=8
    )
    return ds, dw.sum(0)


# ---- Rotary positions, SwiGLU and the loss, each with its backward ---------------------------------------


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
        _raise_to(amax + row % 256, _size(out))


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
        _raise_to(amax + row % 256, tl.maximum(_size(dg), _size(du)))


def swiglu_backward_(da: Tensor, gu: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Overwrite gu with its gradient.

    Returns it, and the activation computed again for the weights' gradient.
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
def _cross_entropy(logits, labels, losses, scale, IGNORED: tl.constexpr, V: tl.constexpr, B: tl.constexpr):
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
    tl.store(losses + row, tl.where(label == IGNORED, 0.0, log_sum - hit))
    scale = tl.where(label == IGNORED, 0.0, scale)
    for begin in range(0, V, B):
        i = begin + tl.arange(0, B)
        x = tl.load(base + i, mask=i < V, other=-float("inf")).to(tl.float32)
        p = tl.exp(x - log_sum) - tl.where(i == label, 1.0, 0.0)
        tl.store(base + i, (p * scale).to(logits.dtype.element_ty), mask=i < V)


def cross_entropy_(logits: Tensor, labels: Tensor, scale: float) -> Tensor:
    """Cross entropy of each row in float32. The logits are overwritten by `scale` times their gradient."""
    losses = torch.empty(logits.shape[0], device=logits.device, dtype=torch.float32)
    sizes = {"V": logits.shape[1], "B": 4096, "num_warps": 8}
    _cross_entropy[(logits.shape[0],)](logits, labels, losses, scale, IGNORED=NO_LABEL, **sizes)
    return losses


# ---- Whole tensors of any shape: AdamW, the largest value, the cast to FP8 -------------------------------


@triton.jit
def _adamw(high, low, m, v, g, scale, lr, keep, b1, b2, eps, c1, c2, n, SPLIT: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    k = i < n
    grad = tl.load(g + i, mask=k, other=0.0).to(tl.float32) * tl.load(scale)
    mean = tl.load(m + i, mask=k, other=0.0).to(tl.float32) * b1 + grad * (1 - b1)
    var = tl.load(v + i, mask=k, other=0.0).to(tl.float32) * b2 + grad * grad * (1 - b2)
    tl.store(m + i, mean.to(m.dtype.element_ty), mask=k)
    tl.store(v + i, var.to(v.dtype.element_ty), mask=k)
    move = lr * (mean / c1) / (tl.sqrt(var / c2) + eps)
    if SPLIT:
        top = tl.load(high + i, mask=k, other=0).to(tl.int32)
        bits = (top << 16) + tl.load(low + i, mask=k, other=0).to(tl.int32)
        bits = (bits.to(tl.float32, bitcast=True) * keep - move).to(tl.int32, bitcast=True)
        top = (bits + 0x8000) >> 16
        tl.store(high + i, top.to(tl.int16), mask=k)
        tl.store(low + i, (bits - (top << 16)).to(tl.int16), mask=k)
    else:
        tl.store(high + i, tl.load(high + i, mask=k, other=0.0) * keep - move, mask=k)


def adamw_(
    high: Tensor, low: Tensor | None, m: Tensor, v: Tensor, g: Tensor, scale: Tensor,
    *, lr: float, step: int, decay: float = 0.0,
) -> None:  # fmt: skip
    """One AdamW step (betas .9, .95) on flat tensors; see ops.adamw_."""
    n, B = g.numel(), 2048
    split = low is not None
    _adamw[(triton.cdiv(n, B),)](
        high.view(torch.int16) if split else high, low if split else high, m, v, g, scale,
        lr, 1 - lr * decay, 0.9, 0.95, 1e-8, 1 - 0.9**step, 1 - 0.95**step, n, SPLIT=split, B=B, num_warps=8,
    )  # fmt: skip


@triton.jit
def _amax(x, out, n, P: tl.constexpr, PER: tl.constexpr, B: tl.constexpr):
    best = tl.zeros([B], tl.int32)
    for turn in range(PER):
        i = (tl.program_id(0).to(tl.int64) + turn * P) * B + tl.arange(0, B)
        best = tl.maximum(best, _size(tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)))
    _raise_to(out, best)


def amax(x: Tensor) -> Tensor:
    """The largest absolute value, a float32 scalar."""
    out = torch.zeros((), device=x.device)
    blocks = triton.cdiv(x.numel(), 4096)
    programs = min(1056, blocks)
    _amax[(programs,)](x, out, x.numel(), P=programs, PER=triton.cdiv(blocks, programs), B=4096, num_warps=8)
    return out


@triton.jit
def _cast(
    x, top, row, col, inverse, M, N, LIMIT: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    a = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)[:, None]
    b = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)[None]
    largest = tl.load(top)
    largest = tl.where(largest < 1e-12, 1e-12, largest)  # a comparison with NaN is false, so NaN stays
    k = (a < M) & (b < N)
    v = tl.load(x + a * N + b, mask=k, other=0.0).to(tl.float32) * (LIMIT / largest)
    v = tl.where(v > LIMIT, LIMIT, tl.where(v < -LIMIT, -LIMIT, v))
    if ROW:
        tl.store(row + a * N + b, v.to(row.dtype.element_ty), mask=k)
    if COL:
        t = tl.trans(v.to(col.dtype.element_ty))
        ta = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)[None]
        tb = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)[:, None]
        tl.store(col + tb * M + ta, t, mask=(ta < M) & (tb < N))
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(inverse, largest / LIMIT)


def cast(
    x: Tensor, top: Tensor, dtype: torch.dtype, *, row: bool, col: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """FP8 copies of x, row-major and transposed, and the scale that turns them back; see ops.cast."""
    M, N = x.shape
    inverse = torch.empty((), device=x.device)
    rows = torch.empty(M, N, device=x.device, dtype=dtype) if row else None
    cols = torch.empty(N, M, device=x.device, dtype=dtype) if col else None
    grid = (triton.cdiv(M, 128), triton.cdiv(N, 64))
    spare = rows if rows is not None else cols
    _cast[grid](
        x, top, rows if row else spare, cols if col else spare, inverse, M, N,
        LIMIT=torch.finfo(dtype).max, ROW=row, COL=col, BM=128, BN=64, num_warps=4,
    )  # fmt: skip
    return rows, cols, inverse
