# ruff: noqa: PLR0917 - the signatures are the kernels'
"""The steps of the fused layer in plain torch: their definition, and the reference for the kernels.

In: rows [tokens, width]. Out: as each function says. They run on a CPU; on a GPU the function of the same
name in triton_ops.py runs instead (`pick`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

IGNORED = -100  # as a label: the token is not learnt; transformers' own


def pick(name: str, device: torch.device) -> Callable[..., Any]:
    """The kernel of this name on a GPU, the plain function elsewhere."""
    if device.type == "cuda":
        from fused import triton_ops

        found: Callable[..., Any] = getattr(triton_ops, name)
    else:
        found = globals()[name]
    return found


def add_norm(
    x: Tensor, y: Tensor | None, w: Tensor, eps: float, amax: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The sum x + y, its RMS norm times w, and 1/rms of each row."""
    s = x if y is None else x + y
    rstd = torch.rsqrt(s.float().square().mean(-1) + eps)
    h = norm_apply(s, rstd, w)
    if amax is not None:
        amax.copy_(h.float().abs().amax())
    return s, h, rstd


def norm_apply(s: Tensor, rstd: Tensor, w: Tensor) -> Tensor:
    """The norm computed again from what forward kept: the sum and 1/rms."""
    return (s.float() * rstd[:, None] * w.float()).to(s.dtype)


def norm_backward(dh: Tensor, s: Tensor, rstd: Tensor, w: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of the normed sum plus the residual's, and the gradient of w in float32."""
    n, g = s.float() * rstd[:, None], dh.float()
    dw = (g * n).sum(0)
    g = g * w.float()
    ds = (g - n * (g * n).mean(-1, keepdim=True)) * rstd[:, None] + residual.float()
    return ds.to(s.dtype), dw


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    repeat = x.shape[0] // cos.shape[0]
    c, s = cos.repeat(repeat, 1)[:, None], sin.repeat(repeat, 1)[:, None]
    return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)


def rope_(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> None:
    """Turn the first `heads` heads (queries and keys) of every row [.., heads, head_dim] in place."""
    part = qkv.view(qkv.shape[0], -1, 2 * cos.shape[1])[:, :heads]
    part.copy_(_turn(part, cos, sin))


def rope_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn gradients [rows, heads, head_dim] back, and put queries, keys and values side by side."""
    return torch.cat((_turn(dq, cos, -sin), _turn(dk, cos, -sin), dv), 1).flatten(1)


def swiglu(gu: Tensor, amax: Tensor | None = None) -> Tensor:
    """silu(gate)·up of rows that hold gate and up side by side."""
    gate, up = gu.float().chunk(2, -1)
    a = F.silu(gate) * up
    if amax is not None:
        amax.copy_(a.abs().amax())
    return a.to(gu.dtype)


def swiglu_backward_(da: Tensor, gu: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Overwrite gu with its gradient.

    Returns it, and the activation computed again for the weights' gradient.
    """
    gate, up = gu.float().chunk(2, -1)
    a, d, sig = swiglu(gu), da.float(), gate.sigmoid()
    dgu = torch.cat((d * up * (sig + gate * sig * (1 - sig)), d * gate * sig), -1)
    if amax is not None:
        amax.copy_(dgu.abs().amax())
    return gu.copy_(dgu), a


def cross_entropy_(logits: Tensor, labels: Tensor, scale: float) -> Tensor:
    """Cross entropy of each row in float32. The logits are overwritten by `scale` times their gradient.

    Both are zero in a row whose label is IGNORED.
    """
    exact = logits.float()
    losses = F.cross_entropy(exact, labels, reduction="none", ignore_index=IGNORED)
    counts = labels != IGNORED
    hot = F.one_hot(labels.where(counts, 0), logits.shape[1])
    logits.copy_((exact.softmax(-1) - hot) * scale * counts[:, None])
    return losses


def join(high: Tensor, low: Tensor) -> Tensor:
    """The float32 value that `split` took apart: the bfloat16 `high` plus the int16 rounding error `low`."""
    return ((high.view(torch.int16).int() << 16) + low.int()).view(torch.float32)


def split(exact: Tensor, high: Tensor, low: Tensor) -> None:
    """Write the nearest bfloat16 to `high` and the rounding error to `low`. No bit is lost.

    Forward needs the bfloat16 weight anyway; with 16 more bits it is the float32 master weight, so both take
    4 bytes instead of 6.
    """
    bits = exact.view(torch.int32)
    top = (bits + 0x8000) >> 16
    high.view(torch.int16).copy_(top)
    low.copy_(bits - (top << 16))


def adamw_(
    high: Tensor,
    low: Tensor | None,
    m: Tensor,
    v: Tensor,
    g: Tensor,
    scale: Tensor,
    *,
    lr: float,
    step: int,
    decay: float = 0.0,
) -> None:
    """One AdamW step (betas .9, .95, eps 1e-8) on flat tensors with gradients scale·g.

    `decay`: weights lose lr·decay of themselves first, apart from the gradient (arXiv 1711.05101).

    `high` and `low` are the halves of float32 weights, or `high` alone is the weights.
    """
    grad = g.float() * scale
    mean, var = m.float() * 0.9 + grad * 0.1, v.float() * 0.95 + grad * grad * 0.05
    m.copy_(mean)
    v.copy_(var)
    move = lr * (mean / (1 - 0.9**step)) / ((var / (1 - 0.95**step)).sqrt() + 1e-8)
    keep = 1 - lr * decay
    if low is None:
        high.mul_(keep).sub_(move)
    else:
        split(join(high, low) * keep - move, high, low)


def amax(x: Tensor) -> Tensor:
    """The largest absolute value, a float32 scalar."""
    return x.float().abs().amax()


def cast(x: Tensor, top: Tensor, dtype: torch.dtype, *, row: bool, col: bool) -> tuple[Tensor | None, ...]:
    """FP8 copies of x, row-major (`row`) and transposed (`col`), and the scale that turns them back.

    `top` is the largest absolute value of x; it becomes the largest number that the FP8 type has.
    """
    limit, largest = torch.finfo(dtype).max, top.clamp(min=1e-12)
    value = (x.float() * (limit / largest)).clamp(-limit, limit).to(dtype)
    return value if row else None, value.t().contiguous() if col else None, largest / limit
