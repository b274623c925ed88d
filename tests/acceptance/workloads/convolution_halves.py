"""Whether convolution in half precision is clearly faster than in float32, and no larger. In: bf16 or fp16.
Out: the report of `cases.run`.

A library without a kernel for a format unfolds the input or falls back to plain loops: right, slow and large.
"""

import functools
import statistics
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from workloads import cases, convolution, device, operands, timing
from workloads.gates import Reading

# Convolutions of a speech model, an image model and a video model, with 3 members in the batch.
PROBLEMS = {
    "1d": convolution.Problem(dims=1, inner=512, outer=512, kernel=3, padding=1, size=16_384),
    "2d": convolution.Problem(dims=2, inner=320, outer=320, kernel=3, padding=1, size=64),
    "3d": convolution.Problem(dims=3, inner=128, outer=128, kernel=3, padding=1, size=48),
}
# float32 is IEEE here, so halves have twice its speed or more on every device, and 2.4 times on H100s and
# H200s; a kernel of float32 behind casts takes more than all of it.
SLOWER = 0.8
# Halves need half of the memory; a library may copy their tensors to another layout, which unfolding exceeds.
LARGER = 1.5


def check(dtype: str) -> dict[str, Any]:
    """Forward and backward of every problem in every layout: time and peak memory beside float32's."""
    return cases.run(_cases(operands.DTYPES[dtype]))


def _cases(dtype: torch.dtype) -> Iterator[cases.Case]:
    for name, problem in PROBLEMS.items():
        for words, layout in convolution.LAYOUTS[problem.dims].items():
            yield f"{name} {words}", functools.partial(_against_float32, problem, layout, dtype)


def _against_float32(
    problem: convolution.Problem, layout: torch.memory_format, dtype: torch.dtype
) -> Iterable[Reading]:
    half, single = _cost(problem, layout, dtype), _cost(problem, layout, torch.float32)
    for name, got, other, factor in zip(
        ("seconds", "peak bytes"), half, single, (SLOWER, LARGER), strict=True
    ):
        yield Reading(name, got, factor * other, f"float32 needs {other:.4g}")


@functools.cache  # both halves are compared with the same float32
def _cost(
    problem: convolution.Problem, layout: torch.memory_format, dtype: torch.dtype
) -> tuple[float, float]:
    """Median seconds of a forward and backward, and the bytes at its peak, operands included."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        x, w = convolution.tensors(problem, dtype, layout)
        g = convolution.step(problem, x, w)[-1]  # also makes the library choose its algorithms
        run = functools.partial(convolution.step, problem, x, w, g)
        seconds = statistics.median(timing.repeats(run, count=3, calls=5))
        return seconds, _peak(run)


def _peak(run: Any) -> float:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device())
    run()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated(device()))
