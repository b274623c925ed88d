"""The trainers' own Triton kernels in this image, judged by the same gates as other kernels.

In: nothing; the kernels are in trainers/fused/triton_ops.py beside tests/. Out: the report of
`cases.run`.
"""

import functools
import importlib.util
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from workloads import cases, device, norms, operands, trainers
from workloads.gates import Reading, elementwise, frobenius, unit_roundoff
from workloads.reference import float64

WIDTHS = (96, 1500, 4096)


def available() -> bool:
    """Whether the kernels can run: Triton compiles for GPUs only."""
    return importlib.util.find_spec("triton") is not None and device().type == "cuda"


def check() -> dict[str, Any]:
    """Norm, activation and loss, at powers of two and other widths."""
    return cases.run(_cases(trainers.module("fused.triton_ops")))


def _cases(kernels: ModuleType) -> Iterator[cases.Case]:
    for width in WIDTHS:
        yield f"add_norm {width} wide", functools.partial(_add_norm, kernels, width)
        yield f"swiglu {width} wide", functools.partial(_swiglu, kernels, width)
        yield f"cross_entropy_ over {width}", functools.partial(_cross_entropy, kernels, width)


def _add_norm(kernels: ModuleType, width: int) -> Iterable[Reading]:
    x, w = (operands.normal(*shape, dtype=torch.bfloat16, seed=1) for shape in ((37, width), (width,)))
    _, got, *_ = kernels.add_norm(x, None, w, norms.EPS)
    value, weight = float64(x, w)
    ref = norms.plain("rms_norm", value, weight)
    eager = norms.eager("rms_norm", x, w)
    yield frobenius(got, ref, eager, factor=2.0)
    yield elementwise(got, ref, unit_roundoff(x.dtype) * ref.abs())


def _swiglu(kernels: ModuleType, width: int) -> Iterable[Reading]:
    both = operands.normal(37, 2 * width, dtype=torch.bfloat16, seed=2, scale=3.0)
    (wide,) = float64(both)
    gate, up = wide.chunk(2, -1)
    ref = F.silu(gate) * up
    yield elementwise(kernels.swiglu(both), ref, unit_roundoff(both.dtype) * ref.abs() + 1e-6)


def _cross_entropy(kernels: ModuleType, width: int) -> Iterable[Reading]:
    logits = operands.normal(37, width, dtype=torch.bfloat16, seed=3, scale=4.0)
    labels = torch.randint(width, (37,), generator=operands.generator(4), device=device())
    (wide,) = float64(logits)
    target = labels.to(wide.device)
    p = wide.softmax(-1)
    loss = kernels.cross_entropy_(logits, labels, 1.0)
    yield elementwise(loss.flatten(), F.cross_entropy(wide, target, reduction="none"), 1e-4, name="loss")
    gradient = p - F.one_hot(target, width)
    yield elementwise(logits, gradient, unit_roundoff(logits.dtype) * p + 1e-6, name="dlogits")
