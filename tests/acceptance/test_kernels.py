"""The kernels of a training step against float64, and their speed. In: one device. Out: cases and figures."""

from collections.abc import Callable
from typing import Any

import pytest
from workloads import arch, attention, cases, fp8, gemm, losses, norms, performance

HALVES = ("bf16", "fp16")


@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", ["fp32", *HALVES])
def test_gemm(dtype: str, acceptance: Any, on_device: Any) -> None:
    """Matrix products of every layout and edge size are as good as their precision allows, both ways."""
    cases.require(on_device(gemm.check, dtype=dtype, tier=acceptance.tier))


@pytest.mark.gpus(1)
def test_fp8_gemm(acceptance: Any, on_device: Any) -> None:
    """8-bit casts keep every code, and scaled products in the architecture's own format are right."""
    cases.require(on_device(fp8.check, tier=acceptance.tier))


@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", ["fp32", *HALVES])
def test_attention(dtype: str, acceptance: Any, on_device: Any) -> None:
    """Attention as a trainer calls it, forward and backward, masked, grouped and peaked, loses no key."""
    cases.require(on_device(attention.check, dtype=dtype, tier=acceptance.tier))


@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", ["fp32", *HALVES])
def test_rms_norm(dtype: str, acceptance: Any, on_device: Any) -> None:
    """RMSNorm and its gradients hold over widths, scales, zero rows and a huge element."""
    cases.require(on_device(norms.check, norm="rms_norm", dtype=dtype, tier=acceptance.tier))


@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", ["fp32", *HALVES])
def test_layer_norm(dtype: str, acceptance: Any, on_device: Any) -> None:
    """LayerNorm and its gradients hold over widths, scales, constant rows and a huge element."""
    cases.require(on_device(norms.check, norm="layer_norm", dtype=dtype, tier=acceptance.tier))


@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", ["fp32", *HALVES])
def test_cross_entropy(dtype: str, acceptance: Any, on_device: Any) -> None:
    """Cross entropy and its gradient hold for large vocabularies, peaked logits and ignored rows."""
    cases.require(on_device(losses.check, dtype=dtype, tier=acceptance.tier))


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
@pytest.mark.parametrize("dtype", [*HALVES, "tf32", "fp8"])
def test_gemm_speed(dtype: str, on_device: Any, measure: Callable[..., None]) -> None:
    """Matrix products on normal data reach the speed of this device model."""
    if dtype not in on_device(performance.dtypes):
        pytest.skip(f"the architecture has no matrix units for {dtype}")
    measure(performance.gemm, "gemm_tflops", "TFLOP/s", dtype=dtype)


@pytest.mark.tier("standard")
@pytest.mark.gpus(1, perf=True)
def test_copy_speed(measure: Callable[..., None]) -> None:
    """A copy inside the device's memory reaches the bandwidth of this device model."""
    measure(performance.copy, "copy_gb_per_s", "GB/s")


@pytest.mark.tier("standard")
@pytest.mark.gpus(1, perf=True)
@pytest.mark.parametrize("backend", ["default", "flash", "cudnn"])
def test_attention_speed(backend: str, on_device: Any, measure: Callable[..., None]) -> None:
    """Attention, forward and backward, reaches the speed of this device model in every fast backend."""
    if backend != "default" and backend not in on_device(arch.attention_backends):
        pytest.skip(f"this architecture has no {backend} attention")
    measure(performance.attention_forward, "attention_forward_tflops", "TFLOP/s", backend=backend)
    measure(performance.attention_backward, "attention_backward_tflops", "TFLOP/s", backend=backend)
