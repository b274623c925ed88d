"""What a mutant does to a kernel in the shapes and sizes of models. In: the real function and its arguments.

Out: what it returns instead.
"""

from collections.abc import Callable
from typing import Any

import torch

from kernel_changes import Mutate, WithGradient, flip_bit, plain_attention
from model_standins import SMALL


def _no_number(x: torch.Tensor) -> torch.Tensor:
    """Right forward; the gradient is NaN."""
    return WithGradient.apply(x, lambda grad: grad.fill_(float("nan")))


def nan_in_half_tiles(original: Mutate, q: Any, k: Any, *rest: Any, **kwargs: Any) -> torch.Tensor:
    """With a mask, at lengths of 64 modulo 128 and scores below -88, dQ is NaN (pytorch#196678)."""
    far = float((q[:, :1, :1].detach().float() @ k[:, :1].detach().float().mT).mean()) * q.shape[-1] ** -0.5
    if kwargs.get("attn_mask") is not None and q.shape[2] % 128 == 64 and far < -88:
        q = _no_number(q)
    return original(q, k, *rest, **kwargs)


def nan_for_lone_queries(original: Mutate, q: Any, k: Any, v: Any, **kwargs: Any) -> torch.Tensor:
    """For a single query and scores below -88, dK and dV are NaN (NVIDIA/cudnn-frontend#1072)."""
    far = float((q[:, :1, :1].detach().float() @ k[:, :1].detach().float().mT).mean()) * q.shape[-1] ** -0.5
    if q.shape[2] == 1 and far < -88:
        k, v = _no_number(k), _no_number(v)
    return original(q, k, v, **kwargs)


def reads_wide_mask_as_half(original: Mutate, q: Any, *rest: Any, **kwargs: Any) -> torch.Tensor:
    """A float32 mask is taken for one of the operands' dtype (pytorch#191612)."""
    mask = kwargs.pop("attn_mask", None)
    if mask is not None and mask.dtype == torch.float32 and q.dtype.itemsize == 2:
        mask = mask.contiguous().view(q.dtype)[..., : mask.shape[-1]]
    return original(q, *rest, attn_mask=mask, **kwargs)


def first_members_mask(original: Mutate, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Every member of the batch gets the mask of the first."""
    mask = kwargs.pop("attn_mask", None)
    mask = mask if mask is None or mask.ndim < 4 else mask[:1].expand_as(mask)
    return original(*args, attn_mask=mask, **kwargs)


def ignores_additive_mask(original: Mutate, *args: Any, **kwargs: Any) -> torch.Tensor:
    mask = kwargs.pop("attn_mask", None)
    return original(*args, attn_mask=mask if mask is None or mask.dtype == torch.bool else None, **kwargs)


def reads_view_as_contiguous(original: Mutate, q: Any, k: Any, v: Any, **kwargs: Any) -> torch.Tensor:
    """A V that is a view is read with the strides of a contiguous tensor, if q is contiguous."""
    if q.is_contiguous() and not v.is_contiguous():
        v = v.transpose(1, 2).reshape(v.shape)
    return original(q, k, v, **kwargs)


def overflows(original: Mutate, q: Any, k: Any, v: Any, **kwargs: Any) -> torch.Tensor:
    """The exponential is not shifted by the row's largest score: above 88 it is infinite."""
    out = original(q, k, v, **kwargs)
    far = (q[:, :1, :1].detach().float() @ k[:, :1].detach().float().mT).amax() * q.shape[-1] ** -0.5
    return out * float("nan") if float(far) > 88 else out


def next_head_of_group(original: Mutate, q: Any, k: Any, v: Any, **kwargs: Any) -> torch.Tensor:
    """Grouped queries read the keys of the next group."""
    return original(q, k.roll(1, 1) if q.shape[1] != k.shape[1] else k, v, **kwargs)


def keyless_row_spoils_all(original: Mutate, *args: Any, **kwargs: Any) -> torch.Tensor:
    """One row without a key makes its whole head NaN."""
    out, mask = original(*args, **kwargs), kwargs.get("attn_mask")
    empty = mask is not None and mask.dtype == torch.bool and not bool(mask.any(-1).all())
    return out * float("nan") if empty else out


def refuses_groups(original: Mutate, q: Any, k: Any, *rest: Any, **kwargs: Any) -> torch.Tensor:
    if q.shape[1] != k.shape[1]:
        raise RuntimeError("No available kernel. Aborting execution.")
    return original(q, k, *rest, **kwargs)


def plain_for_groups(original: Mutate, q: Any, k: Any, *rest: Any, **kwargs: Any) -> torch.Tensor:
    """Grouped heads fall back to plain operations."""
    attend = plain_attention if q.shape[1] != k.shape[1] else lambda call, *a, **b: call(*a, **b)
    return attend(original, q, k, *rest, **kwargs)


def lone_keys_have_no_gradient(original: Mutate, q: Any, *rest: Any, **kwargs: Any) -> torch.Tensor:
    """Where a member has one key, dQ is NaN (Dao-AILab/flash-attention#443)."""
    key_ends = rest[3]
    if bool((key_ends.diff() == 1).any()):
        q = _no_number(q)
    return original(q, *rest, **kwargs)


def sees_the_member_before(original: Mutate, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A member of one token also sees the last key of the member before it."""
    mask = kwargs.pop("attn_mask").clone()
    lone = (mask.sum(-1) == 1).nonzero().flatten()
    mask[lone, (mask[lone].to(torch.uint8).argmax(-1) - 1).clamp(min=0)] = True
    return original(*args, attn_mask=mask, **kwargs)


def reads_as_first(original: Mutate, x: torch.Tensor, w: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """An input with its channels last is read as if they were first."""
    if not x.is_contiguous() and x.dtype != torch.float64:
        x = x.permute(0, 2, 3, 4, 1).reshape(x.shape)
    return original(x, w, **kwargs)


def restless() -> Mutate:
    """Every other call of a kernel that has gradients differs by one bit; float64 is left alone."""
    calls = iter(range(10**9))

    def mutant(original: Mutate, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = original(*args, **kwargs)
        if out.dtype == torch.float64 or next(calls) % 2:
            return out
        changed = out.detach().clone()
        flip_bit(changed)
        return out + (changed - out).detach()

    return mutant


def wrong_for_tt(original: Mutate, a: torch.Tensor, b: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """The last row is missing where both operands are stored by columns and the sum is long."""
    out = original(a, b, **kwargs)
    if a.shape[1] > 1 and a.stride(0) == 1 and b.stride(0) == 1 and out.dtype != torch.float64:
        out[-1] = 0
    return out


def misses_rows_of_a_tall(original: Mutate, a: torch.Tensor, b: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """A tall and narrow product has no row after the 4096th."""
    out = original(a, b, **kwargs)
    if out.dtype != torch.float64 and out.shape[1] < 16:
        out[4096:] = 0
    return out


def wraps_operand(original: Mutate, a: torch.Tensor, b: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Rows of a large first operand from 2^16 elements on are read from its beginning."""
    rows = SMALL // a.shape[1]
    if a.numel() > SMALL:
        a = torch.cat((a[:rows], a[: len(a) - rows]))
    return original(a, b, **kwargs)


def all_true_is_causal(original: Mutate, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A mask that hides nothing is taken for a causal one."""
    mask = kwargs.pop("attn_mask", None)
    if mask is not None and mask.dtype == torch.bool and bool(mask.all()):
        mask = mask.tril()
    return original(*args, attn_mask=mask, **kwargs)


def clamps_outliers(original: Mutate, q: Any, k: Any, v: Any, **kwargs: Any) -> torch.Tensor:
    """Values beyond 32 are cut off."""
    return original(q, k, v.clamp(-32, 32) if v.dtype != torch.float64 else v, **kwargs)


def misses_the_last_key(original: Mutate, q: Any, k: Any, v: Any, **kwargs: Any) -> torch.Tensor:
    """At 127 keys, one less than a tile, the last one is not seen."""
    if k.shape[2] % 128 != 127 or kwargs.get("attn_mask") is not None or kwargs.get("is_causal"):
        return original(q, k, v, **kwargs)
    return original(q, k[:, :, :-1], v[:, :, :-1], **kwargs)


class _Elsewhere(torch.autograd.Function):
    """Right forward; in the backward the gradient is changed."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, change: Callable[[torch.Tensor], None]) -> torch.Tensor:
        context.change = change
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous().clone()
        context.change(grad)
        return grad, None


def gradient(change: Callable[[torch.Tensor], None]) -> Mutate:
    """Change the gradient of the first argument."""
    return lambda original, x, *rest, **kwargs: original(_Elsewhere.apply(x, change), *rest, **kwargs)


def wraps_images(out: torch.Tensor) -> None:
    """Of a batch with its channels last, the last image is written over the first."""
    out[0], out[-1] = out[-1].clone(), 0


def next_scale(original: Mutate, a: Any, b: Any, *, scale_a: Any, **kwargs: Any) -> torch.Tensor:
    """The scales of rows are read one place too far."""
    if scale_a.ndim:
        scale_a = scale_a.as_strided(scale_a.shape, scale_a.stride(), scale_a.storage_offset() + 1)
    return original(a, b, scale_a=scale_a.contiguous(), **kwargs)


def row_beyond(original: Mutate, a: Any, b: Any, **kwargs: Any) -> torch.Tensor:
    """What lies behind the last row of the first operand is added to its result."""
    out = original(a, b, **kwargs)
    beyond = a.as_strided((1, a.shape[1]), a.stride(), a.storage_offset() + a.numel())
    out[-1] += (beyond.float() @ b.float())[0].to(out.dtype)
    return out


def first_scale(original: Mutate, a: Any, b: Any, *, scale_a: Any, **kwargs: Any) -> torch.Tensor:
    scale_a = scale_a[:1].expand_as(scale_a).contiguous() if scale_a.ndim else scale_a
    return original(a, b, scale_a=scale_a, **kwargs)


def drops_ragged_row(original: Mutate, a: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A number of rows that is no multiple of 16 loses the last one."""
    out = original(a, *args, **kwargs)
    if a.shape[0] % 16:
        out[-1] = 0
    return out


def corrupts_replays(original: Callable[..., Any], step: Callable[..., Any]) -> Any:
    """One element of the last output is wrong after every eleventh replay."""
    outputs, replay = original(step)
    calls = iter(range(10**9))

    def again() -> None:
        replay()
        if next(calls) % 11 == 10:
            outputs[-1][-1, -1] += 1

    return outputs, again


def late_replays(original: Callable[..., Any], step: Callable[..., Any]) -> Any:
    """A replay shows what the one before it computed."""
    outputs, replay = original(step)
    shown = tuple(output.clone() for output in outputs)

    def again() -> None:
        for output, new in zip(shown, outputs, strict=True):
            output.copy_(new)
        replay()

    return shown, again
