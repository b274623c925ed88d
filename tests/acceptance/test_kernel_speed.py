"""The speed of kernels on normal data, by a bound or beside another kernel. In: one device. Out: metrics."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from harness import skips, thresholds
from harness.calls import OnDevice, Passes, RecordMetric
from harness.readings import needs_backend, only_with
from harness.session import AcceptanceSession
from workloads import (
    arch,
    attention_default,
    convolution_halves,
    flash_package,
    generated_speed,
    kernel_speed,
    relative_speed,
    speed_conditions,
)

OF_A_GUESS = 0.5  # of the least share, where it was not measured: a kernel that is four times slower is found
LEAST_OF_DEFAULT = 0.5  # FlashAttention 4 beside torch's attention (1.1 on an H200)


@pytest.fixture
def measure(on_device: OnDevice, record_metric: RecordMetric) -> Callable[..., None]:
    """Run one workload on the device, and judge each of its measurements by its own bound."""

    def run(function: Callable[..., Any], metric: str, unit: str, **arguments: str) -> None:
        figures = on_device(function, timeout_s=300, env=None, **arguments)
        assert figures, f"{metric}: nothing was measured"
        for figure in figures:
            record_metric(metric, figure["value"], unit=unit, gate=True, **kept_of(figure))

    return run


@pytest.fixture
def beside(
    on_device: OnDevice, acceptance: AcceptanceSession, record_metric: RecordMetric
) -> Callable[..., None]:
    """Run one workload on the device, and judge each rate beside another one of the same run.
    The least shares are those of models whose copies were measured; another one may have half of them. On a
    CPU, which has other users, shares are recorded only.
    """
    entries = thresholds.load(thresholds.path_of(acceptance.vendor, acceptance.model))
    known = any(entry.kind == "measured" for entry in entries if entry.metric == "copy_gb_per_s")
    allowed = 1.0 if known else OF_A_GUESS

    def run(function: Callable[..., Any], **arguments: Any) -> None:
        figures = on_device(function, timeout_s=300, env=None, **arguments)
        assert figures, "nothing was measured"
        slow = []
        for figure in figures:
            name, of, value = (figure[key] for key in ("kernel", "beside", "value"))
            least = allowed * figure["least"]
            told = {"kernel": name, "beside": of}
            record_metric(
                "share_of_speed", value, unit=f"of {of}", repeats=figure["repeats"], conditions=told
            )
            if not value >= least:
                slow.append(f"{name}: {value:.3f} of the speed of {of}, expected at least {least:g}")
        assert acceptance.vendor == "cpu" or not slow, "\n".join(slow)

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
    only_with(
        dtype in on_device(kernel_speed.dtypes), dtype, f"this architecture has no matrix units for {dtype}"
    )
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
    if backend != "default":
        needs_backend(backend, on_device(arch.attention_backends))
    measure(kernel_speed.attention_forward, "attention_forward_tflops", "TFLOP/s", backend=backend)
    measure(kernel_speed.attention_backward, "attention_backward_tflops", "TFLOP/s", backend=backend)


@pytest.mark.tier("standard")
@pytest.mark.gpus(1, perf=True)
def test_flash_attention_4_speed(on_device: OnDevice, record_metric: RecordMetric) -> None:
    """FlashAttention 4, forward and backward, reaches the speed of this device model, where one is known.
    Elsewhere too it reaches half of the speed of torch's own attention.
    """
    if not on_device(flash_package.is_v4):
        skips.without_package("flash-attn-4", "FlashAttention 4 is not part of this stack")
    slow = []
    for name, package, usual in (
        ("forward", kernel_speed.package_forward, kernel_speed.attention_forward),
        ("backward", kernel_speed.package_backward, kernel_speed.attention_backward),
    ):
        (of_torch,) = on_device(usual, timeout_s=300, backend=attention_default.DEFAULT)
        (figure,) = on_device(package, timeout_s=300)
        more = {**kept_of(figure), "gate": True, "bound_needed": False}
        record_metric(f"attention_{name}_tflops", figure["value"], unit="TFLOP/s", **more)
        least = LEAST_OF_DEFAULT * of_torch["value"]
        if not figure["value"] >= least:
            reached = f"{name}: {figure['value']:.4g} TFLOP/s"
            slow.append(f"{reached}, expected at least {least:.4g}, half of torch's attention")
    assert not slow, "\n".join(slow)


@pytest.mark.tier("standard")
@pytest.mark.gpus(1, perf=True)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_convolution_halves(dtype: str, acceptance: AcceptanceSession, passes: Passes) -> None:
    """Convolution in half precision is faster than in float32, and takes no more memory."""
    only_with(acceptance.vendor != "cpu", "gpu", "a CPU has no matrix units for half precision")
    passes(convolution_halves.check, dtype=dtype, timeout_s=300)


@pytest.mark.tier("standard")
@pytest.mark.gpus(1, perf=True)
@pytest.mark.parametrize("dtype", relative_speed.GRADIENTS)
def test_gradient_product_speed(dtype: str, beside: Callable[..., None]) -> None:
    """Products in the layouts of gradients (NN, TN) are about as fast as in the layout of forward."""
    beside(relative_speed.products, dtype=dtype)


@pytest.mark.tier("standard")
@pytest.mark.gpus(1, perf=True)
def test_float32_speed(device_row: Mapping[str, Any], beside: Callable[..., None]) -> None:
    """A product in float32 reaches as much of its peak as one in bfloat16 does, or half of that."""
    beside(relative_speed.float32_beside_bf16, peaks=device_row["peak_tflops"])


@pytest.mark.tier("standard")
@pytest.mark.gpus(1, perf=True)
def test_memory_bound_speed(beside: Callable[..., None]) -> None:
    """Norms, softmax, losses, AdamW and embeddings reach their share of the speed of a copy."""
    beside(relative_speed.memory_bound)


@pytest.mark.tier("standard")
@pytest.mark.gpus(1, perf=True)
def test_graph_speed(acceptance: AcceptanceSession, beside: Callable[..., None]) -> None:
    """A captured graph of many small kernels is faster than the same kernels launched one by one."""
    only_with(acceptance.vendor != "cpu", "gpu", "a CPU has no graphs")
    beside(relative_speed.graph_launches)


@pytest.mark.tier("soak")
@pytest.mark.gpus(1, perf=True)
def test_generated_speed(
    acceptance: AcceptanceSession,
    on_device: OnDevice,
    record_metric: RecordMetric,
    pytestconfig: pytest.Config,
) -> None:
    """Drawn products, convolutions, attention and row operators take no longer than larger work does."""
    only_with(acceptance.vendor != "cpu", "gpu", "a processor has other users")
    seed = pytestconfig.getoption("case_seed")
    found = on_device(generated_speed.check, seed=seed, timeout_s=300)
    record_metric("generated_seed", seed, unit="seed")
    record_metric("generated_pieces", found["pieces"], unit="pieces of work")
    for figure in found["figures"]:
        told = {"kind": figure["kind"], "beside": figure["beside"]}
        record_metric("generated_times", figure["times"], unit="of larger work", conditions=told)
    assert found["pieces"] >= found["refused"] / generated_speed.MOST_REFUSED, f"refused: {found['refused']}"
    assert not found["slow"], "\n".join(found["slow"])
