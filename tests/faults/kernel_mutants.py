"""Every kernel mutant in one process with torch. In: nothing. Out: a JSON line {"mutant": {"failing": cases,
"check": the check that has to catch it}}.

A mutant patches a function of torch from outside; `healthy` entries run unpatched. float64 is left alone,
as a reference would be computed by other code. Run with tests/acceptance on the import path.
"""

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from workloads import (
    attention,
    attention_backends,
    compiled,
    convolution,
    elementwise,
    fp8,
    gemm,
    grouped,
    lookups,
    losses,
    norms,
    optimizers,
    reductions,
    repeatability,
)

Check = Callable[[], dict[str, Any]]


def default_is_fused() -> dict[str, Any]:
    """As test_attention_default_is_fused judges it."""
    chosen = attention_backends.chosen("bf16")["backend"]
    return {"cases": [{"failures": [chosen] if chosen in {"", "math"} else []}]}


def screened() -> dict[str, Any]:
    """As test_no_silent_corruption judges it."""
    return {"cases": [{"failures": repeatability.screen(0.05)["differences"]}]}


CHECKS: dict[str, Check] = {
    "gemm": functools.partial(gemm.check, "bf16", "smoke"),
    "gemm fp32": functools.partial(gemm.check, "fp32", "smoke"),
    "gemm default": gemm.default_precision,
    "attention": functools.partial(attention.check, "bf16", "smoke"),
    "attention backend": functools.partial(attention_backends.check, "bf16", "flash"),
    "rms_norm": functools.partial(norms.check, "rms_norm", "bf16", "smoke"),
    "layer_norm": functools.partial(norms.check, "layer_norm", "fp32", "smoke"),
    "cross_entropy": functools.partial(losses.check, "fp32", "smoke"),
    "activations": functools.partial(elementwise.check, "bf16"),
    "activations fp32": functools.partial(elementwise.check, "fp32"),
    "reductions": functools.partial(reductions.check, "fp32", "smoke"),
    "embedding": functools.partial(lookups.check, "fp32"),
    "convolution": functools.partial(convolution.check, "fp32"),
    "adamw": optimizers.check,
    "fp8": functools.partial(fp8.check, "smoke"),
    "determinism": functools.partial(repeatability.deterministic, "bf16", 4),
    "screen": screened,
    "attention default": default_is_fused,
    "grouped": grouped.check,
    "compiled": functools.partial(compiled.check, "fp32"),
    "graph": functools.partial(repeatability.graph_replay, "bf16"),
}
# What each of them is in the suite: `stackcheck prove` names it.
PROVES = {
    "gemm": "test_gemm",
    "gemm fp32": "test_gemm",
    "gemm default": "test_fp32_is_ieee_by_default",
    "attention": "test_attention",
    "attention backend": "test_attention_backend",
    "rms_norm": "test_rms_norm",
    "layer_norm": "test_layer_norm",
    "cross_entropy": "test_cross_entropy",
    "activations": "test_activations_and_rope",
    "activations fp32": "test_activations_and_rope",
    "reductions": "test_softmax_and_reductions",
    "embedding": "test_embedding",
    "convolution": "test_convolution",
    "adamw": "test_adamw",
    "fp8": "test_fp8_gemm",
    "determinism": "test_determinism",
    "screen": "test_no_silent_corruption",
    "attention default": "test_attention_default_is_fused",
    "grouped": "test_grouped_gemm",
    "compiled": "test_compiled_block",
    "graph": "test_graph_replay",
}
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


class _Halved(torch.autograd.Function):
    """Right forward; in the backward the last rows of the gradient are lost."""

    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        grad[..., -1:, :] = 0
        return grad


def bad_backward(position: int) -> Mutate:
    """The gradient of one argument loses its last row."""

    def mutant(original: Mutate, *args: Any, **kwargs: Any) -> torch.Tensor:
        changed = list(args)
        if changed[position].dtype != torch.float64:
            changed[position] = _Halved.apply(changed[position])
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


def truncated_fp8(original: Mutate, self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A cast to fp8 that cuts instead of rounding."""
    if torch.float8_e4m3fn in args and self.dtype == torch.float32:
        self = (self.contiguous().view(torch.int32) & ~0xFFFFF).view(torch.float32)
    return original(self, *args, **kwargs)


SDPA = (functional, "scaled_dot_product_attention")
# name: (check, (owner, attribute), what it becomes)
MUTANTS: dict[str, tuple[str, tuple[Any, str], Mutate]] = {
    "mm drops the last K tile": ("gemm", (torch, "mm"), short_product),
    "mm zeroes a tile": ("gemm", (torch, "mm"), after(zero_tile)),
    "mm flips one bit": ("gemm", (torch, "mm"), after(flip_bit)),
    "mm writes NaN": ("gemm", (torch, "mm"), after(put_nan)),
    "mm negates one element": ("gemm", (torch, "mm"), after(negate_one)),
    "mm writes past its output": ("gemm", (torch, "mm"), write_beyond),
    "mm cuts float32 to TF32": ("gemm fp32", (torch, "mm"), tf32_product),
    "mm is TF32 by default": ("gemm default", (torch, "mm"), tf32_product),
    "bmm drops the last K tile": ("gemm", (torch, "bmm"), short_product),
    "linear zeroes a tile": ("gemm", (functional, "linear"), after(zero_tile)),
    "linear loses a gradient row": ("gemm", (functional, "linear"), bad_backward(0)),
    "addmm flips one bit": ("gemm", (torch, "addmm"), after(flip_bit)),
    "attention loses 8 keys": ("attention", SDPA, with_keys(lost_keys)),
    "attention swaps heads": ("attention", SDPA, with_keys(swapped_heads)),
    "attention's mask is off by one": ("attention", SDPA, shifted_mask),
    "attention's scale is off": ("attention", SDPA, wrong_scale),
    "attention zeroes a tile": ("attention", SDPA, after(zero_tile)),
    "attention writes NaN": ("attention", SDPA, after(lambda out: out[..., -1, -1].fill_(float("nan")))),
    "attention loses a row of dq": ("attention", SDPA, bad_backward(0)),
    "attention loses a row of dk": ("attention", SDPA, bad_backward(1)),
    "attention loses a row of dv": ("attention", SDPA, bad_backward(2)),
    "attention falls back in silence": ("attention backend", SDPA, plain_attention),
    "rms_norm uses another epsilon": ("rms_norm", (functional, "rms_norm"), other_eps),
    "rms_norm flips one bit": ("rms_norm", (functional, "rms_norm"), after(flip_bit)),
    "rms_norm loses a row of dx": ("rms_norm", (functional, "rms_norm"), bad_backward(0)),
    "layer_norm uses another epsilon": ("layer_norm", (functional, "layer_norm"), other_eps),
    "layer_norm loses a row of dx": ("layer_norm", (functional, "layer_norm"), bad_backward(0)),
    "cross_entropy takes the next target": ("cross_entropy", (functional, "cross_entropy"), next_target),
    "cross_entropy counts ignored rows": ("cross_entropy", (functional, "cross_entropy"), counts_ignored),
    "cross_entropy loses a gradient row": ("cross_entropy", (functional, "cross_entropy"), bad_backward(0)),
    "silu zeroes a tile": ("activations", (functional, "silu"), after(lambda out: out[..., -4:].zero_())),
    "gelu is the other approximation": (
        "activations fp32",
        (functional, "gelu"),
        lambda original, x, **_: original(x, approximate="tanh" if x.dtype != torch.float64 else "none"),
    ),
    "softmax flips one bit": ("reductions", (torch.Tensor, "softmax"), after(flip_bit)),
    "cumsum drops the last term": (
        "reductions",
        (torch.Tensor, "cumsum"),
        after(lambda o: o[..., -1].sub_(1)),
    ),
    "embedding learns its padding row": ("embedding", (functional, "embedding"), no_padding),
    "embedding flips one bit": ("embedding", (functional, "embedding"), after(flip_bit)),
    "conv2d zeroes a tile": ("convolution", (functional, "conv2d"), after(zero_tile)),
    "AdamW forgets its decay": ("adamw", (torch.optim.AdamW, "__init__"), no_decay),
    "a cast to fp8 cuts": ("fp8", (torch.Tensor, "to"), truncated_fp8),
    "mm is corrupted now and then": ("screen", (torch, "mm"), restless()),
    "attention is plain by default": ("attention default", SDPA, plain_attention),
    "a group's result is corrupted": ("grouped", (torch, "_grouped_mm"), after(flip_bit)),
    "a graph breaks": ("compiled", (functional, "silu"), breaks_graph),
    "mm changes bits between calls": ("determinism", (torch, "mm"), restless()),
    "rms_norm changes bits between calls": ("graph", (functional, "rms_norm"), restless()),
}


@contextlib.contextmanager
def planted(target: tuple[Any, str], mutate: Mutate) -> Iterator[None]:
    """`owner.attribute` becomes `mutate(original, ...)`."""
    owner, attribute = target
    original = getattr(owner, attribute)
    setattr(owner, attribute, lambda *args, **kwargs: mutate(original, *args, **kwargs))
    try:
        yield
    finally:
        setattr(owner, attribute, original)


def failing(check: Check) -> int:
    """How many cases fail."""
    return sum(bool(case["failures"]) for case in check()["cases"])


def main() -> None:
    torch.set_num_threads(1)
    found = {f"healthy {name}": told(failing(check), name) for name, check in CHECKS.items()}
    for name, (check, target, mutate) in MUTANTS.items():
        with planted(target, mutate):
            found[name] = told(failing(CHECKS[check]), check)
    sys.stdout.write(json.dumps(found) + "\n")


def told(cases: int, check: str) -> dict[str, Any]:
    return {"failing": cases, "check": f"test_kernels.py::{PROVES[check]}"}


if __name__ == "__main__":
    main()
