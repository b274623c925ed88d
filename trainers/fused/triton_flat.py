# ruff: noqa: PLR0917 - a kernel launch is positional
"""Triton kernels over whole tensors, of any shape: AdamW, the largest value, the cast to FP8.

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
def _adamw(high, low, m, v, g, scale, lr, b1, b2, eps, c1, c2, n, SPLIT: tl.constexpr, B: tl.constexpr):
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
        bits = (bits.to(tl.float32, bitcast=True) - move).to(tl.int32, bitcast=True)
        top = (bits + 0x8000) >> 16
        tl.store(high + i, top.to(tl.int16), mask=k)
        tl.store(low + i, (bits - (top << 16)).to(tl.int16), mask=k)
    else:
        tl.store(high + i, tl.load(high + i, mask=k, other=0.0) - move, mask=k)


def adamw_(
    high: Tensor, low: Tensor | None, m: Tensor, v: Tensor, g: Tensor, scale: Tensor, *, lr: float, step: int
) -> None:
    """One AdamW step (betas .9, .95, no decay) on flat tensors; see ops.adamw_."""
    n, B = g.numel(), 2048
    split = low is not None
    _adamw[(triton.cdiv(n, B),)](
        high.view(torch.int16) if split else high, low if split else high, m, v, g, scale,
        lr, 0.9, 0.95, 1e-8, 1 - 0.9**step, 1 - 0.95**step, n, SPLIT=split, B=B, num_warps=8,
    )  # fmt: skip


@triton.jit
def _amax(x, out, n, P: tl.constexpr, PER: tl.constexpr, B: tl.constexpr):
    best = tl.zeros([B], tl.float32)
    for turn in range(PER):
        i = (tl.program_id(0).to(tl.int64) + turn * P) * B + tl.arange(0, B)
        best = tl.maximum(best, tl.abs(tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)))
    tl.atomic_max(out, tl.max(best, 0))


def amax(x: Tensor) -> Tensor:
    """The largest absolute value, a float32 scalar."""
    out = torch.zeros((), device=x.device)
    blocks = triton.cdiv(x.numel(), 4096)
    programs = min(1056, blocks)
    _amax[(programs,)](x, out, x.numel(), P=programs, PER=triton.cdiv(blocks, programs), B=4096, num_warps=8)
    return out


@triton.jit
def _cast(
    x,
    top,
    row,
    col,
    inverse,
    M,
    N,
    LIMIT: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    a = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)[:, None]
    b = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)[None]
    largest = tl.maximum(tl.load(top), 1e-12)
    k = (a < M) & (b < N)
    v = tl.load(x + a * N + b, mask=k, other=0.0).to(tl.float32) * (LIMIT / largest)
    v = tl.minimum(tl.maximum(v, -LIMIT), LIMIT)
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
