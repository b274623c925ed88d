"""The faults that kernel mutants plant. In: the real function and its arguments. Out: what it returns
instead.

float64 is not changed, because the references use it.
"""

from collections.abc import Callable
from typing import Any

import torch

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
        grad = grad.clone()
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


def restless() -> Mutate:
    """Every third call differs by one bit."""
    calls = iter(range(10**9))

    def mutant(original: Mutate, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = original(*args, **kwargs)
        if next(calls) % 3 == 2:
            flip_bit(out)
        return out

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
