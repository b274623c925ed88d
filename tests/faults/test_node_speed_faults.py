"""The speed of a node with four planted H200s: one slow device is named, a healthy node passes."""

# ruff: noqa: E501 - a table of faults reads in rows
import json

import pytest

from planting import Fault

pytest.importorskip("torch", reason="the suites need torch")

from workloads import speed_outliers

TOGETHER = "test_node_speed.py::test_every_device_at_once"
GEMM = {"dtype": "bf16", "m": 8192, "n": 8192, "k": 8192, "layout": "NT"}
COPY = {"bytes": 4 << 30, "kind": "device"}


def together(
    name: str, says: str = "", outcome: str = "failed", *, another: bool = False, **speeds: list[float]
) -> Fault:
    """The result of four ranks; H200.json demands 756.4 TFLOP/s and 4,050 GB/s of each."""
    rates = {"gemm": [790.0] * 4, "copy": [4260.0] * 4} | speeds
    ranks = [
        {
            "gemm_tflops": {"value": product, "repeats": [product] * 5, "conditions": GEMM},
            "copy_gb_per_s": {"value": copy, "repeats": [copy] * 5, "conditions": COPY},
        }
        for product, copy in zip(rates["gemm"], rates["copy"], strict=True)
    ]
    patches = {"harness.launch:launch": f"lambda *a, **k: json.loads({json.dumps({'ranks': ranks})!r})"}
    return Fault(name, TOGETHER, outcome, says, vendor="nvidia", nvml={}, patches=patches, another=another)


FAULTS = (
    together("one device multiplies slowly", "device 2 reaches 600 TFLOP/s < 756.4", gemm=[790.0, 790.0, 600.0, 790.0]),
    together("one device copies slowly", "device 3 reaches 4000 GB/s < 4050", copy=[4260.0, 4260.0, 4260.0, 4000.0]),
    together("one device lags behind its node", "device 1 reaches 800.0 TFLOP/s, the median of its node is 900.0", gemm=[900.0, 800.0, 900.0, 900.0]),
    together("one device was not measured", "3 devices", another=True, gemm=[790.0] * 3, copy=[4260.0] * 3),
    Fault("a clock that stands still beside others", TOGETHER, says="not a number", patches={"workloads.timing:repeats": "lambda *a, **k: [float('nan')] * 5"}, another=True),
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_of_a_node_is_caught(fault, plant):
    plant(fault)


def test_healthy_node_passes(plant):
    plant(together("nothing", outcome="passed"))


@pytest.mark.healthy
def test_ranks_of_a_cpu_are_measured_together(plant):
    result = plant(Fault("nothing", TOGETHER, outcome="passed"))
    metrics = result["checks"][0]["metrics"]
    assert {(metric["name"], metric["conditions"]["device"]) for metric in metrics} == {
        (f"together_{name}", rank) for name in ("gemm_tflops", "copy_gb_per_s") for rank in range(2)
    }


@pytest.mark.catches(TOGETHER)
@pytest.mark.parametrize(
    "rates", [{0: 1.0, 1: 0.8}, {0: float("nan"), 1: 1.0}, {0: 1.0, 1: 1.0, 2: 0.89}], ids=str
)
def test_a_device_behind_the_others_is_named(rates):
    assert speed_outliers.slow_devices(rates, 0.9, "GB/s")
    assert not speed_outliers.slow_devices(dict.fromkeys(rates, 1.0), 0.9, "GB/s")
