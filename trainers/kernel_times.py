"""Which kernels a step's time goes to.

In: a call of one step. Out: milliseconds by kind, and the longest kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from collections.abc import Callable

# A kernel belongs to the first kind that has a word of its name. Words are from CUDA's, ROCm's and our
# kernels.
KINDS = {
    "communication": ("nccl", "rccl"),
    "attention": ("sdpa", "fmha", "flash", "attn", "cudnn_generated"),
    "gemm": ("gemm", "nvjet", "cutlass", "xmma", "cijk", "splitk"),
    "optimizer": ("adam", "multi_tensor"),
    "cast": ("_cast", "_amax", "float8"),
    "copy": ("memcpy", "memset", "copy", "cat", "fill"),
}


def measure(step: Callable[[], object]) -> dict[str, Any]:
    """Run the step twice, the second time under the profiler."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    events = [
        (e.key, e.count, e.device_time_total / 1e3) for e in trace.key_averages() if e.device_time_total > 0
    ]
    kinds: dict[str, float] = {}
    for name, _, time_ms in events:
        kinds[kind(name)] = kinds.get(kind(name), 0.0) + time_ms
    longest = sorted(events, key=lambda event: -event[2])[:40]
    return {
        "kernel_ms": dict(sorted(kinds.items(), key=lambda item: -item[1])),
        "longest": [
            {"kernel": name[:120], "calls": calls, "ms": round(ms, 3)} for name, calls, ms in longest
        ],
    }


def kind(name: str) -> str:
    """The kind of a kernel by its name."""
    lower = name.lower()
    return next(
        (kind for kind, words in KINDS.items() if any(word in lower for word in words)), "elementwise"
    )
