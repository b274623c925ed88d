"""The speed of kernels on normal data, each figure by its own bound. In: one device. Out: figures."""

from collections.abc import Callable
from typing import Any

import pytest

from workloads import arch, measured, performance


@pytest.fixture
def measure(on_device: Any, record_metric: Any) -> Callable[..., None]:
    """Run one measurement on the device, and judge each of its figures by its own bound."""

    def run(function: Callable[..., Any], metric: str, unit: str, **arguments: object) -> None:
        figures = on_device(function, timeout_s=300, **arguments)
        assert figures, f"{metric}: nothing was measured"
        for figure in figures:
            record_metric(metric, figure["value"], unit=unit, gate=True, **kept_of(figure))

    return run


def kept_of(figure: dict[str, Any]) -> dict[str, Any]:
    """Repeats and conditions of a figure."""
    return {"repeats": figure["repeats"], "conditions": figure["conditions"]}


@pytest.mark.tier("standard")
@pytest.mark.gpus(1, perf=True)
@pytest.mark.parametrize("dtype", measured.GEMM_DTYPES)
def test_gemm_speed(dtype: str, on_device: Any, measure: Callable[..., None], record_metric: Any) -> None:
    """Matrix products on normal data reach the speed of this device model."""
    if dtype not in on_device(performance.dtypes):
        pytest.skip(f"the architecture has no matrix units for {dtype}")
    measure(performance.gemm, "gemm_tflops", "TFLOP/s", dtype=dtype)
    # Recorded without a bound: the power cap, the cooling and the chip decide it, as for any long job.
    for figure in on_device(performance.gemm_sustained, timeout_s=300, dtype=dtype):
        record_metric("gemm_sustained_tflops", figure["value"], unit="TFLOP/s", **kept_of(figure))


@pytest.mark.tier("standard")
@pytest.mark.gpus(1, perf=True)
def test_copy_speed(measure: Callable[..., None]) -> None:
    """A copy inside the device's memory reaches the bandwidth of this device model."""
    measure(performance.copy, "copy_gb_per_s", "GB/s")


@pytest.mark.tier("standard")
@pytest.mark.gpus(1, perf=True)
@pytest.mark.parametrize("backend", measured.ATTENTION_BACKENDS)
def test_attention_speed(backend: str, on_device: Any, measure: Callable[..., None]) -> None:
    """Attention, forward and backward, reaches the speed of this device model in every fast backend."""
    if backend != "default" and backend not in on_device(arch.attention_backends):
        pytest.skip(f"this architecture has no {backend} attention")
    measure(performance.attention_forward, "attention_forward_tflops", "TFLOP/s", backend=backend)
    measure(performance.attention_backward, "attention_backward_tflops", "TFLOP/s", backend=backend)
