"""Speed of products, copies and attention on normal data. In: a dtype or backend. Out: figures.

A figure is `{"conditions": {}, "repeats": [], "value"}` in TFLOP/s (dense, 1e12) or GB/s (1e9 bytes, read
and written).
"""

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch

from workloads import (
    arch,
    attention,
    attention_backends,
    device,
    flash_package,
    fp8,
    operands,
    speed_conditions,
    timing,
)
from workloads.attention_default import DEFAULT, RESOLVED
from workloads.reference import precision

GEMM = {"cuda": speed_conditions.GEMM, "cpu": ((256, 256, 256),)}
COPY_BYTES = {"cuda": speed_conditions.COPY_BYTES, "cpu": 16 << 20}
_LONG = speed_conditions.ATTENTION_SEQUENCE
ATTENTION = {
    "cuda": attention.Shape(b=2, hq=32, hkv=8, sq=_LONG, sk=_LONG, d=128, causal=True),
    "cpu": attention.Shape(b=1, hq=2, hkv=1, sq=128, sk=128, d=64, causal=True),
}
Timed = Callable[[Callable[[], object]], list[float]]
PACKAGE = "flash-attn-4"  # the backend in the conditions
BACKWARD_OVER_FORWARD = 2.5  # five products instead of two (FlashAttention-2, arXiv 2307.08691, section 4.1)


def gemm(dtype: str) -> list[dict[str, Any]]:
    """TFLOP/s of `mm`, or of the scaled product for fp8."""
    with precision(dtype):
        return [_gemm(dtype, *shape) for shape in GEMM[device().type]]


def gemm_sustained(dtype: str) -> list[dict[str, Any]]:
    """TFLOP/s of the first shape after a second of load, when the power cap limits it."""
    with precision(dtype):
        return [_gemm(dtype, *GEMM[device().type][0], timed=timing.sustained)]


def _gemm(dtype: str, m: int, n: int, k: int, *, timed: Timed = timing.repeats) -> dict[str, Any]:
    call = _product(dtype, m, n, k)
    rates = [2 * m * n * k / seconds / 1e12 for seconds in timed(call)]
    return figure(rates, dtype=dtype, m=m, n=n, k=k, layout="NT")


def _product(dtype: str, m: int, n: int, k: int) -> Callable[[], object]:
    if dtype == "fp8":
        return fp8.timed_product(m, n, k)
    a = operands.normal(m, k, dtype=operands.DTYPES[dtype], seed=1)
    b = operands.normal(n, k, dtype=operands.DTYPES[dtype], seed=2)
    return functools.partial(torch.mm, a, b.t(), out=torch.empty(m, n, dtype=a.dtype, device=a.device))


def copy() -> list[dict[str, Any]]:
    """GB/s of a copy inside the device's memory, reads and writes counted."""
    return [_copy(timing.repeats)]


def _copy(timed: Timed) -> dict[str, Any]:
    size = COPY_BYTES[device().type]
    source = operands.normal(size // 2, dtype=torch.bfloat16, seed=3)
    target = torch.empty_like(source)
    rates = [2 * size / seconds / 1e9 for seconds in timed(lambda: target.copy_(source))]
    return figure(rates, bytes=size, kind="device")


def beside_others(meet: Callable[[], object]) -> dict[str, dict[str, Any]]:
    """The product of the first shape and the copy.
    The barrier `meet` starts each repeat on all devices at once.
    """
    timed = functools.partial(timing.repeats, meet=meet)
    with precision("bf16"):
        product = _gemm("bf16", *GEMM[device().type][0], timed=timed)
    return {"gemm_tflops": product, "copy_gb_per_s": _copy(timed)}


def attention_forward(backend: str) -> list[dict[str, Any]]:
    """TFLOP/s of causal attention, the masked half not counted."""
    with attention.forced(backend):
        return _forward(attention.attend, backend)


def attention_backward(backend: str) -> list[dict[str, Any]]:
    """TFLOP/s of the backward alone, counted as 2.5 times the forward's operations."""
    with attention.forced(backend):
        return _backward(attention.attend, backend)


def package_forward() -> list[dict[str, Any]]:
    """As `attention_forward`, by the flash_attn package."""
    return _forward(flash_package.attend, PACKAGE)


def package_backward() -> list[dict[str, Any]]:
    """As `attention_backward`, by the flash_attn package."""
    return _backward(flash_package.attend, PACKAGE)


def _forward(attend: Callable[..., torch.Tensor], backend: str) -> list[dict[str, Any]]:
    shape = ATTENTION[device().type]
    q, k, v, _ = attention.inputs(shape, "bf16")
    with torch.no_grad():
        seconds = timing.repeats(lambda: attend(q, k, v, causal=True))
    return [_attention(shape, backend, [_flops(shape) / s / 1e12 for s in seconds])]


def _backward(attend: Callable[..., torch.Tensor], backend: str) -> list[dict[str, Any]]:
    shape = ATTENTION[device().type]
    leaves, g = attention.leaves_of(shape, "bf16")
    out = attend(*leaves, causal=True)
    seconds = timing.repeats(functools.partial(torch.autograd.grad, out, leaves, g, retain_graph=True))
    flops = BACKWARD_OVER_FORWARD * _flops(shape)
    return [_attention(shape, backend, [flops / s / 1e12 for s in seconds])]


def _flops(shape: attention.Shape) -> float:
    return 4.0 * shape.b * shape.hq * shape.sq * shape.sk * shape.d / 2


def _attention(shape: attention.Shape, backend: str, rates: list[float]) -> dict[str, Any]:
    name = f"b{shape.b} h{shape.hq}/{shape.hkv} d{shape.d}"
    was = {RESOLVED: attention_backends.taken("bf16", shape)["backend"]} if backend == DEFAULT else {}
    return figure(rates, dtype="bf16", backend=backend, causal=True, sequence=shape.sq, shape=name, **was)


def figure(rates: list[float], **conditions: Any) -> dict[str, Any]:
    """A figure: repeats, their median, and the conditions of the measurement."""
    return {"conditions": conditions, "repeats": rates, "value": statistics.median(rates)}


def dtypes() -> list[str]:
    """The matrix formats that this architecture's matrix units support."""
    extra = (["tf32"] if arch.has_tf32() else []) + (["fp8"] if arch.fp8() else [])
    return ["bf16", "fp16", *extra]
