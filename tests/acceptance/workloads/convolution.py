"""Convolution, forward and backward, against float64 on the CPU.

In: a dtype. Out: the report of `cases.run`.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from workloads import cases, operands
from workloads.gates import Reading, elementwise

# name: input channels, output channels, kernel, stride, padding, groups, height and width
PROBLEMS = {
    "1x1": (16, 24, 1, 1, 0, 1, 9),
    "3x3 stride 2": (8, 12, 3, 2, 1, 1, 17),
    "grouped": (12, 24, 3, 1, 1, 4, 11),
    "depthwise": (16, 16, 5, 1, 2, 16, 13),
}


def check(dtype: str) -> dict[str, Any]:
    """Both memory layouts of every problem."""
    kind = operands.DTYPES[dtype]
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return cases.run(_cases(kind))


def _cases(dtype: torch.dtype) -> Iterator[cases.Case]:
    for name, problem in PROBLEMS.items():
        for layout in (torch.contiguous_format, torch.channels_last):
            words = "channels last" if layout == torch.channels_last else "channels first"
            yield f"{name} {words}", functools.partial(_against_float64, problem, dtype, layout)


def _against_float64(
    problem: tuple[int, ...], dtype: torch.dtype, layout: torch.memory_format
) -> Iterable[Reading]:
    inner, outer, kernel, stride, padding, groups, size = problem
    options = {"stride": stride, "padding": padding, "groups": groups}
    x = operands.normal(3, inner, size, size, dtype=dtype, seed=1).to(memory_format=layout).requires_grad_()
    w = operands.normal(outer, inner // groups, kernel, kernel, dtype=dtype, seed=2).requires_grad_()
    out = F.conv2d(x, w, **options)
    g = operands.normal(*out.shape, dtype=dtype, seed=3)
    got = (out.detach(), *torch.autograd.grad(out, (x, w), g))
    # The same with absolute values is the size of every sum of products, to which its rounding error is
    # relative.
    ref = _plain(x, w, g, options)
    sizes = _plain(x.abs(), w.abs(), g.abs(), options)
    for name, value, expected, bound in zip(("out", "dx", "dw"), got, ref, sizes, strict=True):
        # Winograd and FFT transforms lose a few bits more than a plain sum of products.
        unit = 2.0**-20 if dtype == torch.float32 else 2.0**-14
        yield elementwise(value, expected, unit * bound, name=name)


def _plain(
    x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, options: dict[str, int]
) -> tuple[torch.Tensor, ...]:
    leaves = [tensor.detach().cpu().double().requires_grad_() for tensor in (x, w)]
    out = F.conv2d(leaves[0], leaves[1], **options)
    return (out.detach(), *torch.autograd.grad(out, leaves, g.detach().cpu().double()))
