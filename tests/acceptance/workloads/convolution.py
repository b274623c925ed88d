"""Convolution in one, two and three dimensions, forward and backward, against float64 on the CPU.

In: a dtype. Out: the report of `cases.run`.
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from workloads import arch, cases, device, operands
from workloads.gates import Reading, elementwise, exact


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Channels, kernel and extent of a convolution, equal in every dimension."""

    dims: int = 2
    inner: int
    outer: int
    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1
    size: int

    @property
    def options(self) -> dict[str, int]:
        """What the function takes beside the tensors."""
        names = ("stride", "padding", "dilation", "groups")
        return {name: getattr(self, name) for name in names}


PROBLEMS = {
    "1x1": Problem(inner=16, outer=24, kernel=1, size=9),
    "3x3 stride 2": Problem(inner=8, outer=12, kernel=3, stride=2, padding=1, size=17),
    "grouped": Problem(inner=12, outer=24, kernel=3, padding=1, groups=4, size=11),
    "depthwise": Problem(inner=16, outer=16, kernel=5, padding=2, groups=16, size=13),
    "1d of 7": Problem(dims=1, inner=16, outer=24, kernel=7, padding=3, size=127),
    "1d dilated": Problem(dims=1, inner=8, outer=16, kernel=3, padding=4, dilation=4, size=65),
    "1d depthwise": Problem(dims=1, inner=32, outer=32, kernel=4, padding=3, groups=32, size=64),
    "3d 1x1x1": Problem(dims=3, inner=16, outer=8, kernel=1, size=5),
    "3d of 3": Problem(dims=3, inner=16, outer=24, kernel=3, padding=1, size=7),
    "3d of 3 stride 2": Problem(dims=3, inner=8, outer=16, kernel=3, stride=2, padding=1, size=9),
    "3d patches": Problem(dims=3, inner=3, outer=32, kernel=2, stride=2, size=8),
}
# PyTorch has a layout with the channels last for two and three dimensions.
LAYOUTS = {
    1: {"channels first": torch.contiguous_format},
    2: {"channels first": torch.contiguous_format, "channels last": torch.channels_last},
    3: {"channels first": torch.contiguous_format, "channels last": torch.channels_last_3d},
}
REPEATS = {"cuda": 10, "cpu": 2}


def lacks(dtype: str) -> dict[str, str] | None:
    """The feature that this dtype needs and that is absent; None if it must work."""
    supported = device().type == "cuda" or dtype == "fp32"
    if supported or getattr(torch.ops.mkldnn, f"_is_mkldnn_{dtype}_supported")():
        return None
    reason = f"this CPU has no instructions for {dtype}, and PyTorch's plain convolution sums in {dtype}"
    return {"feature": dtype, "reason": reason}


def check(dtype: str) -> dict[str, Any]:
    """Every memory layout of every problem, and the same bits at every repeat."""
    return cases.run(_cases(operands.DTYPES[dtype]))


def _cases(dtype: torch.dtype) -> Iterator[cases.Case]:
    for name, problem in PROBLEMS.items():
        for words, layout in LAYOUTS[problem.dims].items():
            yield f"{name} {words}", functools.partial(_against_float64, problem, dtype, layout)
            yield f"{name} {words} repeated", functools.partial(_repeated, problem, dtype, layout)


def tensors(problem: Problem, dtype: torch.dtype, layout: torch.memory_format) -> tuple[torch.Tensor, ...]:
    """Input and weight as leaves, in that layout."""
    extent = (problem.size,) * problem.dims
    x = operands.normal(3, problem.inner, *extent, dtype=dtype, seed=1)
    weight = (problem.outer, problem.inner // problem.groups, *(problem.kernel,) * problem.dims)
    w = operands.normal(*weight, dtype=dtype, seed=2)
    return tuple(tensor.to(memory_format=layout).requires_grad_() for tensor in (x, w))


def step(
    problem: Problem, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Output, both gradients, and the output's gradient that was used."""
    out = getattr(F, f"conv{problem.dims}d")(x, w, **problem.options)
    g = operands.normal(*out.shape, dtype=x.dtype, seed=3) if g is None else g
    return (out.detach(), *torch.autograd.grad(out, (x, w), g), g)


def _against_float64(problem: Problem, dtype: torch.dtype, layout: torch.memory_format) -> Iterable[Reading]:
    x, w = tensors(problem, dtype, layout)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        *got, g = step(problem, x, w)
    # The same with absolute values is the size of every sum of products, to which its rounding error is
    # relative.
    ref = _plain(problem, x, w, g)
    sizes = _plain(problem, x.abs(), w.abs(), g.abs())
    flushed = _flushed(problem, dtype, x, w, g)
    for number, name in enumerate(("out", "dx", "dw")):
        # Winograd and FFT transforms lose a few bits more than a plain sum of products.
        unit = 2.0**-20 if dtype == torch.float32 else 2.0**-14
        if number:  # both operands of a gradient's products may be rounded to bf16
            unit += 2 * arch.backward_roundoff(dtype)
        yield elementwise(got[number], ref[number], unit * sizes[number] + flushed[number], name=name)


def _flushed(problem: Problem, dtype: torch.dtype, *tensors_and_gradient: torch.Tensor) -> list[Any]:
    """What each sum loses where the subnormal numbers of an operand count as zero."""
    if dtype == torch.float32 or not arch.flushes_subnormals():
        return [0.0] * 3
    whole = [tensor.detach().abs() for tensor in tensors_and_gradient]
    least = torch.finfo(dtype).tiny
    small = [torch.where(tensor < least, tensor, 0.0) for tensor in whole]
    parts = [_plain(problem, *(small[i] if i == j else whole[i] for i in range(3))) for j in range(3)]
    return [sum(part[number] for part in parts) + least for number in range(3)]


def _plain(problem: Problem, *tensors_and_gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x, w, g = (tensor.detach().cpu().double() for tensor in tensors_and_gradient)
    return step(problem, x.requires_grad_(), w.requires_grad_(), g)[:3]


def _repeated(problem: Problem, dtype: torch.dtype, layout: torch.memory_format) -> Iterable[Reading]:
    """With deterministic algorithms requested, every call gives the same bits."""
    x, w = tensors(problem, dtype, layout)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        *first, g = step(problem, x, w)
        for number in range(1, REPEATS[device().type]):
            for name, got, expected in zip(("out", "dx", "dw"), step(problem, x, w, g), first, strict=False):
                yield exact(got, expected, name=f"{name} of call {number}")
