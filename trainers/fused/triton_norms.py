# ruff: noqa: PLR0917 - a kernel launch is positional
"""Triton kernels of the fused layer's norms: the residual sum and the norm in one pass, and its backward.

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
        tl.atomic_max(amax, tl.max(tl.abs(out.to(tl.float32)), 0))


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
