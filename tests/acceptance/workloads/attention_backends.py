"""Which attention kernel really runs. In: a backend. Out: cases, and the names of the kernels that ran.

A fallback gives right values and is silent: on one published machine it is 1.9 times slower forward and 4.6
times backward.
"""

import functools
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from workloads import attention, cases, device, synchronize
from workloads.gates import Reading

OPERATORS = {
    "math": r"aten::_scaled_dot_product_attention_math",
    "flash": r"aten::_scaled_dot_product_flash_attention",
    "efficient": r"aten::_scaled_dot_product_efficient_attention",
    "cudnn": r"aten::_scaled_dot_product_cudnn_attention",
}
# Names of device kernels: CUTLASS and PyTorch's own flash on NVIDIA, AOTriton and CK on AMD.
KERNELS = {
    "math": r"gemm|nvjet|Cijk|cutlass|softmax",
    "flash": r"flash_fwd|flash::|attn_fwd|FmhaFwd",
    "efficient": r"fmha_cutlassF|attn_fwd|FmhaFwd",
    "cudnn": r"cudnn.*(sdpa|attention|flash|fprop)",
}
SHAPE = attention.Shape(b=1, hq=4, hkv=4, sq=256, sk=256, d=64, causal=True)
# What the trainers ask for: the fallback to plain operations often happens for grouped heads only.
TRAINERS = attention.Shape(b=1, hq=32, hkv=8, sq=2048, sk=2048, d=128, causal=True)


def check(dtype: str, backend: str) -> dict[str, Any]:
    """The backend accepts the problem, and its operator and kernels ran, forward and backward."""
    return cases.run([(f"{backend} {dtype} is what ran", functools.partial(_ran, dtype, backend))])


def chosen(dtype: str) -> list[dict[str, Any]]:
    """The backend that PyTorch chooses when none is named, and its kernels: a small shape, the trainers'."""
    large = TRAINERS if device().type == "cuda" else replace(TRAINERS, sq=128, sk=128)
    return [taken(dtype, shape) for shape in (SHAPE, large)]


def taken(dtype: str, shape: attention.Shape) -> dict[str, Any]:
    """The backend that PyTorch takes for a shape, and its kernels; "" if no known backend ran."""
    events = names(dtype, "default", shape)
    found = [backend for backend, pattern in OPERATORS.items() if _matching(events["operators"], pattern)]
    return {"shape": str(shape), "backend": found[-1] if found else "", **events}


def names(dtype: str, backend: str, shape: attention.Shape = SHAPE) -> dict[str, list[str]]:
    """{"operators", "kernels"} that the profiler saw in one forward and backward."""
    leaves, g = attention.leaves_of(shape, dtype)
    gpu = [ProfilerActivity.CUDA] if device().type == "cuda" else []
    with attention.forced(backend):
        attention.attend(leaves[0], leaves[1], leaves[2], causal=True).backward(g)
        with profile(activities=[ProfilerActivity.CPU, *gpu]) as seen:
            attention.attend(leaves[0], leaves[1], leaves[2], causal=True).backward(g)
            synchronize()
    events = seen.events()
    on_device = [e.name for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    return {"operators": sorted({e.name for e in events} - set(on_device)), "kernels": sorted(set(on_device))}


def _ran(dtype: str, backend: str) -> Iterable[Reading]:
    seen = names(dtype, backend)
    operators = _matching(seen["operators"], OPERATORS[backend])
    saw = [name for name in seen["operators"] if "attention" in name]
    yield Reading("operators missing", float(not operators), 0.0, f"saw {saw}")
    others = [b for b in OPERATORS if b != backend and _matching(seen["operators"], OPERATORS[b])]
    yield Reading("other backends that ran", float(len(others)), 0.0, ", ".join(others))
    if device().type == "cuda":
        kernels = _matching(seen["kernels"], KERNELS[backend])
        yield Reading("device kernels missing", float(not kernels), 0.0, f"saw {seen['kernels']}")


def _matching(seen: list[str], pattern: str) -> list[str]:
    return [name for name in seen if re.search(pattern, name, re.IGNORECASE)]
