"""The flash_attn package, if the image has it, forward and backward against float64.

In: a dtype and a tier. Out: the report of `cases.run`.
"""

import functools
import importlib.util
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from workloads import attention, cases
from workloads.attention import Shape
from workloads.gates import Reading, exact

# The package aligns a causal mask at the bottom right; with equal lengths that equals PyTorch's.
SHAPES = (
    Shape(b=1, hq=2, hkv=2, sq=113, sk=203),
    Shape(sq=129, sk=129, d=128, causal=True),
    Shape(hq=4, hkv=1, sq=127, sk=127, d=32, causal=True, peaked=True),
)
MORE_SHAPES = (
    *(Shape(sq=256, sk=256, d=d, causal=True) for d in (40, 64, 96, 192, 256)),
    Shape(b=1, hq=8, hkv=2, sq=2048, sk=2048, d=128, causal=True, peaked=True),
)
REPEATS = 50


def available() -> bool:
    """Whether the package is installed."""
    return importlib.util.find_spec("flash_attn") is not None


def uses_triton() -> bool:
    """Whether the package computes by its Triton kernels for ROCm, which take `deterministic` and
    `window_size` and ignore both (flash_attn/flash_attn_triton_amd). The host knows by the declaration which
    stacks do, so no other image can hide a fault behind it.
    """
    return os.environ.get("FLASH_ATTENTION_TRITON_AMD_ENABLE", "").upper() == "TRUE"


def check(dtype: str, tier: str) -> dict[str, Any]:
    """Every shape, and the same bits every time with deterministic=True."""
    return cases.run(_cases(dtype, SHAPES + MORE_SHAPES if cases.thorough(tier) else SHAPES))


def _cases(dtype: str, shapes: Iterable[Shape]) -> Iterator[cases.Case]:
    for shape in shapes:
        yield str(shape), functools.partial(_against_float64, shape, dtype)
    if not uses_triton():
        yield f"deterministic over {REPEATS} runs", functools.partial(_deterministic, dtype)


def attend(leaves: list[torch.Tensor], *, causal: bool, deterministic: bool = False) -> torch.Tensor:
    """Attention with (B, H, S, D) in and out; the package itself uses (B, S, H, D)."""
    from flash_attn import flash_attn_func

    q, k, v = (leaf.transpose(1, 2) for leaf in leaves)
    out: torch.Tensor = flash_attn_func(q, k, v, causal=causal, deterministic=deterministic)
    return out.transpose(1, 2)


def _against_float64(shape: Shape, dtype: str) -> Iterable[Reading]:
    *qkv, g = attention.inputs(shape, dtype)
    leaves = [tensor.requires_grad_() for tensor in qkv]
    out = attend(leaves, causal=shape.causal)
    out.backward(g)
    yield from attention.judge(out.detach(), leaves, g, causal=shape.causal)


def _deterministic(dtype: str) -> Iterable[Reading]:
    *qkv, g = attention.inputs(Shape(b=4, sq=512, sk=512, causal=True), dtype)
    leaves = [tensor.requires_grad_() for tensor in qkv]
    first = _results(leaves, g)
    for number in range(1, REPEATS):
        for name, got, expected in zip(("out", "dq", "dk", "dv"), _results(leaves, g), first, strict=True):
            yield exact(got, expected, name=f"{name} of run {number}")


def _results(leaves: list[torch.Tensor], g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = attend(leaves, causal=True, deterministic=True)
    return (out.detach(), *torch.autograd.grad(out, leaves, g))
