"""The flash_attn package, if the image has it, forward and backward against float64.

In: a dtype and a tier. Out: the report of `cases.run`. FlashAttention 4 is `flash_attn.cute`, of the package
flash-attn-4: it returns the log-sum-exp too, takes packed sequences by name, and compiles its kernels when
they are first called. FlashAttention 2 is `flash_attn`.
"""

import functools
import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from workloads import attention, cases, device
from workloads.attention import Shape
from workloads.gates import Reading, exact

# The package aligns a causal mask at the bottom right; with equal lengths that equals PyTorch's.
SHAPES = (
    Shape(b=1, hq=2, hkv=2, sq=113, sk=203),
    Shape(sq=129, sk=129, d=128, causal=True),
    Shape(hq=4, hkv=1, sq=127, sk=127, d=32, causal=True, peaked=True),
)
MORE_SHAPES = (
    *(Shape(sq=256, sk=256, d=d, causal=True) for d in (64, 96, 192, 256)),
    Shape(b=1, hq=8, hkv=2, sq=2048, sk=2048, d=128, causal=True, peaked=True),
)
# Widths that kernels round up, to 16 or to 32; few models have them.
ROUNDED_SHAPES = tuple(Shape(sq=256, sk=256, d=d, causal=True) for d in (40, 72, 104))
REPEATS = 50
# Names of device kernels: of CUTLASS, CK and Triton for FlashAttention 2, of CuTe DSL for FlashAttention 4.
KERNELS = {False: r"flash_|Fmha|attn_(fwd|bwd)|bwd_kernel", True: r"flash_?attn_?cute"}


def available() -> bool:
    """Whether the package is installed."""
    return importlib.util.find_spec("flash_attn") is not None


def is_v4() -> bool:
    """Whether the package is FlashAttention 4: its `flash_attn` is a folder, without functions of its own."""
    try:
        import flash_attn
    except ImportError:
        return False
    return not hasattr(flash_attn, "flash_attn_func")


def rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, window: int | None = None, **more: Any
) -> torch.Tensor:
    """Attention with (B, S, H, D) in and out; with a window a query sees `window` keys before its own."""
    if window is not None:
        more["window_size"] = (window, 0)
    if not is_v4():
        from flash_attn import flash_attn_func

        return flash_attn_func(q, k, v, causal=causal, **more)
    from flash_attn.cute import flash_attn_func as flash_attn_4_func

    return _first(flash_attn_4_func(q, k, v, causal=causal, **more))


def packed_rows(
    tensors: Iterable[torch.Tensor],
    ends: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    *,
    causal: bool,
) -> torch.Tensor:
    """Attention of packed sequences, (T, H, D) in and out: where queries and keys end, and the longest."""
    q, k, v = tensors
    if not is_v4():
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(q, k, v, *ends, *longest, causal=causal)
    from flash_attn.cute import flash_attn_varlen_func as flash_attn_4_varlen_func

    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return _first(
        flash_attn_4_varlen_func(q, k, v, **dict(zip(names, (*ends, *longest), strict=True)), causal=causal)
    )


def _first(returned: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The output without the log-sum-exp, which releases return or not."""
    return returned[0] if isinstance(returned, tuple) else returned


def uses_triton() -> bool:
    """Whether the package computes by its Triton kernels for ROCm.
    These take `deterministic` and `window_size` and ignore both (flash_attn/flash_attn_triton_amd). The host
    knows by the declaration which stacks do, so no other image can hide a fault behind it.
    """
    return os.environ.get("FLASH_ATTENTION_TRITON_AMD_ENABLE", "").upper() == "TRUE"


def check(dtype: str, tier: str) -> dict[str, Any]:
    """Every shape, and the same bits every time with deterministic=True."""
    return cases.run(_cases(dtype, SHAPES + MORE_SHAPES if cases.thorough(tier) else SHAPES))


def check_rounded(dtype: str) -> dict[str, Any]:
    """Head dimensions that are no multiple of 32."""
    return cases.run((str(shape), _against_float64(shape, dtype)) for shape in ROUNDED_SHAPES)


def _cases(dtype: str, shapes: Iterable[Shape]) -> Iterator[cases.Case]:
    for shape in shapes:
        yield str(shape), _against_float64(shape, dtype)
    if device().type == "cuda":
        yield "its own kernels ran", functools.partial(_own_kernels, dtype)
    if not uses_triton():
        yield f"deterministic over {REPEATS} runs", functools.partial(_deterministic, dtype)


def attend(*leaves: torch.Tensor, causal: bool, deterministic: bool = False) -> torch.Tensor:
    """Attention with (B, H, S, D) in and out; the package itself uses (B, S, H, D)."""
    q, k, v = (leaf.transpose(1, 2) for leaf in leaves)
    return rows(q, k, v, causal=causal, deterministic=deterministic).transpose(1, 2)


def _own_kernels(dtype: str) -> Iterable[Reading]:
    """Forward and backward run kernels of the package, by their names."""
    leaves, _ = attention.leaves_of(Shape(b=1, sq=256, sk=256, causal=True), dtype)
    seen = kernels(lambda: _results(leaves, None))
    own = [name for name in seen if re.search(KERNELS[is_v4()], name, re.IGNORECASE)]
    yield Reading(
        "kernels of the package that are missing", float(max(0, 2 - len(own))), 0.0, str(seen)[:400]
    )


def kernels(call: Callable[[], object]) -> list[str]:
    """The device kernels of a second call, which compiles nothing."""
    call()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return sorted({e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA})


def _against_float64(shape: Shape, dtype: str) -> Callable[[], Iterable[Reading]]:
    call = functools.partial(attend, causal=shape.causal)
    return functools.partial(attention.against_float64, call, shape, dtype, causal=shape.causal)


def _deterministic(dtype: str) -> Iterable[Reading]:
    leaves, g = attention.leaves_of(Shape(b=4, sq=512, sk=512, causal=True), dtype)
    first = _results(leaves, g)
    for number in range(1, REPEATS):
        for name, got, expected in zip(("out", "dq", "dk", "dv"), _results(leaves, g), first, strict=True):
            yield exact(got, expected, name=f"{name} of run {number}")


def _results(leaves: list[torch.Tensor], g: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    out = attend(*leaves, causal=True, deterministic=True)
    return (out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out) if g is None else g))
