"""The speed of kernels on normal data, each by its own bound. In: one device. Out: metrics."""

from collections.abc import Callable
from typing import Any

import pytest

from harness import skips
from harness.calls import OnDevice, RecordMetric
from harness.session import AcceptanceSession
from workloads import (
    arch,
    attention_default,
    cases,
    convolution_halves,
    flash_package,
    kernel_speed,
    speed_conditions,
)


@pytest.fixture
def measure(on_device: OnDevice, record_metric: RecordMetric) -> Callable[..., None]:
    """Run one workload on the device, and judge each of its measurements by its own bound."""

    def run(function: Callable[..., Any], metric: str, unit: str, **arguments: str) -> None:
        figures = on_device(function, timeout_s=300, env=None, **arguments)
        assert figures, f"{metric}: nothing was measured"
        for figure in figures:
            record_metric(metric, figure["value"], unit=unit, gate=True, **kept_of(figure))

    return run


def kept_of(figure: dict[str, Any]) -> dict[str, Any]:
    """Repeats and conditions of a measurement."""
    return {"repeats": figure["repeats"], "conditions": figure["conditions"]}


@pytest.mark.tier("standard")
@pytest.mark.gpus(1, perf=True)
@pytest.mark.parametrize("dtype", speed_conditions.GEMM_DTYPES)
def test_gemm_speed(
    dtype: str, on_device: OnDevice, measure: Callable[..., None], record_metric: RecordMetric
) -> None:
    """Matrix products on normal data reach the speed of this device model."""
    if dtype not in on_device(kernel_speed.dtypes):
        skips.without_feature(dtype, f"this architecture has no matrix units for {dtype}")
    measure(kernel_speed.gemm, "gemm_tflops", "TFLOP/s", dtype=dtype)
    # Recorded without a bound: power cap, cooling and the single chip decide it, as for any long job.
    for figure in on_device(kernel_speed.gemm_sustained, timeout_s=300, dtype=dtype):
        record_metric("gemm_sustained_tflops", figure["value"], unit="TFLOP/s", **kept_of(figure))


@pytest.mark.tier("standard")
@pytest.mark.gpus(1, perf=True)
def test_copy_speed(measure: Callable[..., None]) -> None:
    """A copy inside the device's memory reaches the bandwidth of this device model."""
    measure(kernel_speed.copy, "copy_gb_per_s", "GB/s")


@pytest.mark.tier("standard")
@pytest.mark.gpus(1, perf=True)
@pytest.mark.parametrize("backend", [attention_default.DEFAULT, *speed_conditions.ATTENTION_BACKENDS])
def test_attention_speed(backend: str, on_device: OnDevice, measure: Callable[..., None]) -> None:
    """Attention, forward and backward, reaches the speed of this device model in every fast backend."""
    if backend != "default" and backend not in on_device(arch.attention_backends):
        skips.without_feature(f"attention: {backend}", f"this architecture has no {backend} attention")
    measure(kernel_speed.attention_forward, "attention_forward_tflops", "TFLOP/s", backend=backend)
    measure(kernel_speed.attention_backward, "attention_backward_tflops", "TFLOP/s", backend=backend)


@pytest.mark.tier("standard")
@pytest.mark.gpus(1, perf=True)
def test_flash_attention_4_speed(on_device: OnDevice, record_metric: RecordMetric) -> None:
    """FlashAttention 4, forward and backward, reaches the speed of this device model, where one is known."""
    if not on_device(flash_package.is_v4):
        skips.without_package("flash-attn-4", "FlashAttention 4 is not part of this stack")
    for name, function in (
        ("forward", kernel_speed.package_forward),
        ("backward", kernel_speed.package_backward),
    ):
        for figure in on_device(function, timeout_s=300):
            more = {**kept_of(figure), "gate": True, "bound_needed": False}
            record_metric(f"attention_{name}_tflops", figure["value"], unit="TFLOP/s", **more)


@pytest.mark.tier("standard")
@pytest.mark.gpus(1, perf=True)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_convolution_halves(
    dtype: str, acceptance: AcceptanceSession, on_device: OnDevice, record_metric: RecordMetric
) -> None:
    """Convolution in half precision takes neither more time nor more memory than in float32."""
    if acceptance.vendor == "cpu":
        skips.without_feature("gpu", "a CPU has no matrix units for half precision")
    cases.require(on_device(convolution_halves.check, dtype=dtype, timeout_s=300), record_metric)
