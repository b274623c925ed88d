"""What a run measures: step times, memory, versions.

Out: JSON-ready facts with the unit in each name.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from world import World

WINDOW_S = 60.0
TRACKED = (
    "NCCL_", "RCCL_", "TORCH_", "PYTORCH_", "HIP_", "HSA_", "ROCBLAS_", "CUDA_", "GPU_", "OMP_", "MIOPEN_",
)  # fmt: skip


class Clock:
    """Durations of steps, by device events on a GPU and by wall time on a CPU.

    With device events the host does not wait for the GPU.
    """

    def __init__(self, world: World) -> None:
        self.gpu = world.gpu
        self.marks: list[Any] = []

    def mark(self) -> None:
        """The boundary between two steps."""
        if self.gpu:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Durations between neighbouring marks; waits for the device."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        if self.gpu:
            torch.cuda.synchronize()
            return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
        return [end - begin for begin, end in pairs]


def spread(values: list[float]) -> dict[str, float]:
    """Median, 5th and 95th percentile (nearest rank)."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "median": statistics.median(ordered),
        "p5": ordered[round(0.05 * last)],
        "p95": ordered[round(0.95 * last)],
    }


def digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over names and float32 bytes; they come in the order of names."""
    result = hashlib.sha256()
    for name, value in weights:
        result.update(name.encode())
        result.update(value.contiguous().view(-1).numpy())
    return result.hexdigest()


def memory(world: World) -> dict[str, float | int] | None:
    """Peaks of the caching allocator, and how often it ran out, freed its cache and tried again."""
    if not world.gpu:
        return None
    stats = torch.cuda.memory_stats(world.device)
    return {
        "allocated_gib": torch.cuda.max_memory_allocated(world.device) / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved(world.device) / 2**30,
        "alloc_retries": stats["num_alloc_retries"],
    }


def software() -> dict[str, str | None]:
    """Versions of the software that ran."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": str(torch.backends.cudnn.version()) if torch.backends.cudnn.is_available() else None,
    }


def environment() -> dict[str, str]:
    """Environment variables that change how a job runs, or how fast."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(TRACKED)}


def cost(tokens_per_s: float, price_per_hour: float) -> dict[str, float]:
    """Dollars for 1e6 and for 1e12 tokens, from the rate of one GPU and its price an hour."""
    per_token = price_per_hour / 3600 / tokens_per_s
    return {"dollars_per_1m_tokens": per_token * 1e6, "dollars_per_1t_tokens": per_token * 1e12}


def speed(step_s: list[float], units_per_step: float, gpus: int, unit: str) -> dict[str, Any]:
    """Tokens (or images) per second and GPU.

    One rate comes from the median step, others from its percentiles, and one from the whole time.
    """
    times = spread(step_s)
    share = units_per_step / gpus
    return {
        "step_s": times,
        f"{unit}_per_s_per_gpu": share / times["median"],
        f"{unit}_per_s_per_gpu_p5": share / times["p95"],
        f"{unit}_per_s_per_gpu_p95": share / times["p5"],
        f"{unit}_per_s_per_gpu_wall": share * len(step_s) / sum(step_s),
        f"{unit}_per_s_per_gpu_by_minute": by_minute(step_s, share),
        "timed_steps": len(step_s),
    }


def by_minute(step_s: list[float], share: float) -> list[float]:
    """The rate in each minute of the timed steps, without the last minute if it is not whole.

    It shows a chip that slows down as it heats up.
    """
    ends = list(itertools.accumulate(step_s))
    minutes: dict[int, list[float]] = {}
    for seconds, end in zip(step_s, ends, strict=True):
        minutes.setdefault(int(end // WINDOW_S), []).append(seconds)
    whole = int(ends[-1] // WINDOW_S)
    return [share * len(times) / sum(times) for minute, times in minutes.items() if minute < whole]
