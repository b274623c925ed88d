"""The faults that kernel mutants plant. In: the real function and its arguments. Out: what it returns
instead.

float64 is not changed, because the references use it.
"""

from collections.abc import Callable
from typing import Any

import torch

from kernel_standins import SMALL
from workloads import gemm

Mutate = Callable[..., torch.Tensor]


def after(change: Callable[[torch.Tensor], None]) -> Mutate:
    """Change the result in place, unless it is float64."""

    def mutant(original: Mutate, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = original(*args, **kwargs)
        if out.dtype == torch.float64 or not out.numel():
            return out
        if not out.requires_grad:
            change(out)
            return out
        changed = out.detach().clone()
        change(changed)
        return out + (changed - out).detach()  # keeps the graph, which an in-place change would break

    return mutant


def flip_bit(out: torch.Tensor) -> None:
    """The top mantissa bit of one element."""
    flat = out.view(-1) if out.is_contiguous() else out.reshape(-1)
    width = {2: (torch.int16, 1 << 6), 4: (torch.int32, 1 << 22)}[out.element_size()]
    flat.view(width[0])[flat.numel() // 2] ^= width[1]


def zero_tile(out: torch.Tensor) -> None:
    out[..., -16:, -16:] = 0


def put_nan(out: torch.Tensor) -> None:
    out.view(-1)[-1] = float("nan")


def negate_one(out: torch.Tensor) -> None:
    out[..., 0, 0] *= -1


def short_product(original: Mutate, a: torch.Tensor, b: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """The last 16 products of each sum are missing."""
    keep = a.shape[-1] - 16 if a.shape[-1] > 16 and a.dtype != torch.float64 else a.shape[-1]
    return original(a[..., :keep], b[..., :keep, :], **kwargs)


def beside_rows(original: Mutate, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Each row reads the one after it as well, times zero."""
    *first, a, b = args
    out = original(*args, **kwargs)
    if a.dtype == torch.float64:
        return out
    return out + 0 * original(*first, a.roll(-1, -2), b, **kwargs)


def beside_rows_of_weights(original: Mutate, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each column of a linear layer's result reads the next row of the weights as well, times zero."""
    return original(x, weight) + 0 * original(x, weight.roll(-1, 0))


def write_beyond(original: Mutate, *args: Any, **kwargs: Any) -> torch.Tensor:
    """One element past the end of the output is overwritten."""
    out = original(*args, **kwargs)
    if "out" in kwargs:
        torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel()).zero_()
    return out


def tf32_product(original: Mutate, a: torch.Tensor, b: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    if a.dtype == torch.float32:
        a, b = gemm.cut_to_tf32(a), gemm.cut_to_tf32(b)
    return original(a, b, **kwargs)


def with_keys(change: Callable[..., tuple[torch.Tensor, ...]]) -> Mutate:
    """Attention on changed q, k, v."""
    return lambda original, q, k, v, **kwargs: original(*change(q, k, v), **kwargs)


def lost_keys(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return q, k[:, :, :-8], v[:, :, :-8]


def swapped_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return q.flip(1), k, v


def shifted_mask(
    original: Mutate, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any
) -> torch.Tensor:
    """The diagonal one place too far: each query sees the next key."""
    if not kwargs.pop("is_causal", False):
        return original(q, k, v, **kwargs)
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(1)
    return original(q, k, v, attn_mask=seen, **kwargs)


def wrong_scale(original: Mutate, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return original(q, *args, scale=(q.shape[-1] + 1) ** -0.5, **kwargs)


class WithGradient(torch.autograd.Function):
    """Right forward; in the backward `change` writes into the gradient."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, change: Callable[[torch.Tensor], object]) -> torch.Tensor:
        context.change = change
        return x.clone()

    @staticmethod
    def backward(context: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        context.change(grad)
        return grad, None


def bad_backward(position: int) -> Mutate:
    """The gradient of one argument loses its last row."""

    def mutant(original: Mutate, *args: Any, **kwargs: Any) -> torch.Tensor:
        changed = list(args)
        if changed[position].dtype != torch.float64:
            changed[position] = WithGradient.apply(changed[position], lambda grad: grad[..., -1:, :].zero_())
        return original(*changed, **kwargs)

    return mutant


def next_target(original: Mutate, x: torch.Tensor, target: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    shifted = torch.where(target >= 0, (target + 1) % x.shape[-1], target)
    return original(x, shifted, **kwargs)


def counts_ignored(original: Mutate, x: torch.Tensor, target: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """The mean is over all rows, ignored ones too."""
    if kwargs.get("reduction") != "mean":
        return original(x, target, **kwargs)
    return original(x, target, **{**kwargs, "reduction": "sum"}) / target.numel()


def other_eps(original: Mutate, *args: Any, **kwargs: Any) -> torch.Tensor:
    return original(*args, **{**kwargs, "eps": 1e-3})


def no_padding(original: Mutate, index: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    kwargs.pop("padding_idx", None)
    return original(index, weight, **kwargs)


def no_decay(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    original(*args, **{**kwargs, "weight_decay": 0.0})


def plain_attention(original: Mutate, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A silent fallback: right values from another backend."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return original(*args, **kwargs)


def restless(every: int) -> Mutate:
    """One call in so many, those for a reference aside, differs by one bit."""
    flipped, calls = after(flip_bit), iter(range(10**9))

    def mutant(original: Mutate, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = original(*args, **kwargs)
        if out.dtype == torch.float64 or next(calls) % every < every - 1:
            return out
        return flipped(lambda: out)

    return mutant


def breaks_graph(original: Mutate, *args: Any, **kwargs: Any) -> torch.Tensor:
    torch._dynamo.graph_break()
    return original(*args, **kwargs)


def truncated_fp8(dtype: torch.dtype) -> Mutate:
    """A cast to this format of 8 bits that cuts instead of rounding."""
    lost = 0x1FFFFF if "e5m2" in str(dtype) else 0xFFFFF  # the mantissa of float32 that it has no room for

    def mutant(original: Mutate, self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if dtype in args and self.dtype == torch.float32:
            self = (self.contiguous().view(torch.int32) & ~lost).view(torch.float32)
        return original(self, *args, **kwargs)

    return mutant


def wraps(limit: int) -> Callable[[torch.Tensor], None]:
    """Places from `limit` on are written over the beginning, as an index of too few bits does."""

    def change(out: torch.Tensor) -> None:
        flat = out.view(-1)
        beyond = flat[limit:].clone()
        flat[: len(beyond)], flat[limit:] = beyond, 0

    return change


def short_sum(original: Mutate, self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A sum of bytes that forgets its last term."""
    return original(self[:-1] if self.dtype == torch.int8 else self, *args, **kwargs)


def ignores_mask(original: Mutate, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The diagonal alone, whatever mask was asked for."""
    seen = kwargs.pop("attn_mask", None)
    return original(*args, **kwargs, is_causal=seen is not None)


def wider_mask(original: Mutate, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Each query sees one key more, before the first that it should see."""
    seen = kwargs.pop("attn_mask")
    return original(*args, **kwargs, attn_mask=seen | seen.roll(-1, 1).tril())


def unscaled_dropout(original: Mutate, *args: Any, dropout_p: float) -> torch.Tensor:
    return original(*args, dropout_p=dropout_p) * (1 - dropout_p)


def half_the_dropout(original: Mutate, *args: Any, dropout_p: float) -> torch.Tensor:
    return original(*args, dropout_p=dropout_p / 2)


def one_mask(original: Mutate, *args: Any, dropout_p: float) -> torch.Tensor:
    """All heads lose the same."""
    out = original(*args, dropout_p=dropout_p)
    return out[:, :1].expand_as(out).contiguous()


def one_mask_for_every_other_of_sixteen(original: Mutate, *args: Any, dropout_p: float) -> torch.Tensor:
    """Neighbours differ, and eight queries are alike."""
    out = original(*args, dropout_p=dropout_p)
    sixteens = out.unflatten(-2, (-1, 8, 2))
    return sixteens[..., :1, :, :].expand_as(sixteens).flatten(-4, -2)


def same_every_call(original: Mutate, *args: Any, dropout_p: float) -> torch.Tensor:
    torch.manual_seed(1)
    return original(*args, dropout_p=dropout_p)


def forgets_a_chunk(
    original: Mutate, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, **kwargs: Any
) -> torch.Tensor:
    kept = target.clone()
    kept[-32:] = kwargs["ignore_index"]
    return original(x, weight, kept, **kwargs)


def shifted_diagonal(original: Mutate, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The flash_attn package with its diagonal at the other corner."""
    q, k, v = args
    keys = k[:, :-1], v[:, :-1]
    return original(q, *keys, **kwargs) if kwargs.get("causal") else original(q, k, v, **kwargs)


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


def gradient(change: Callable[[torch.Tensor], None]) -> Mutate:
    """Change the gradient of the first argument."""
    return lambda original, x, *rest, **kwargs: original(WithGradient.apply(x, change), *rest, **kwargs)


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
