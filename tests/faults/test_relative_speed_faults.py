"""A kernel that is slow beside another one of the same run is named; equal rates pass.

The kernels run, and a clock is planted: on a processor no real one says anything about a GPU.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import pytest

from planting import Fault

SUITE = "test_kernel_speed.py::"


H100: Mapping[str, Any] = {}  # what the made-up host has by itself
UNMEASURED = {"capability": [8, 9], "name": "NVIDIA L40S", "pci_device_id": 0x26B910DE, "cores": 18176}


def clock(check: str, name: str, slow: str, share: float, *, passes: bool = False, gpu: Any = H100) -> Fault:
    """Every kernel at one rate, those whose name contains `slow` at a share of it."""
    rate = f"1e12 * (1.0 if {slow!r} not in name else float({str(share)!r}))"
    patches = {
        f"workloads.relative_speed:{function}": f"lambda name, call, *a, **k: (call(), [{rate}] * 3)[1]"
        for function in ("rates", "launches")
    }
    says = "" if passes else "not a number" if math.isnan(share) else "expected at least"
    outcome, nvml = "passed" if passes else "failed", {"devices": 1, **gpu}
    return Fault(name, SUITE + check, outcome, says, vendor="nvidia", nvml=nvml, patches=patches)


FAULTS = (
    clock("test_gradient_product_speed", "gradients of inputs at four fifths", "NN", 0.8),
    clock("test_gradient_product_speed", "a clock that stands still beside NT", "TN", float("nan")),
    clock("test_float32_speed", "float32 that falls back to float64", "fp32", 0.03),
    clock("test_memory_bound_speed", "an AdamW that is not fused", "adamw", 0.4),
    clock("test_graph_speed", "a graph that launches its kernels one by one", "graph", 1.0),
    *(
        dataclasses.replace(fault, another=True)
        for fault in (
            clock("test_gradient_product_speed", "gradients of weights at a third", "TN", 0.33),
            clock("test_memory_bound_speed", "a softmax in three kernels", "softmax", 0.1),
            clock("test_memory_bound_speed", "a norm whose backward is a loop", "layer_norm backward", 0.1),
            clock("test_memory_bound_speed", "a loss that is computed twice", "cross_entropy", 0.25),
            clock("test_memory_bound_speed", "an embedding looked up word by word", "embedding", 0.1),
            clock(
                "test_memory_bound_speed", "a norm, where nobody measured", "rms_norm", 0.2, gpu=UNMEASURED
            ),
            clock("test_graph_speed", "a graph, where nobody measured", "graph", 0.9, gpu=UNMEASURED),
        )
    ),
)
HEALTHY = (
    clock("test_gradient_product_speed", "nothing", "NN", 0.95, passes=True),
    clock("test_float32_speed", "nothing", "fp32", 0.06, passes=True),
    clock("test_memory_bound_speed", "nothing", "layer_norm", 0.8, passes=True),
    clock("test_graph_speed", "nothing", "graph", 4.0, passes=True),
    clock("test_memory_bound_speed", "a guess is too high", "rms_norm", 0.4, passes=True, gpu=UNMEASURED),
)


@pytest.mark.parametrize("fault", [*FAULTS, *HEALTHY], ids=str)
def test_kernel_beside_another(fault, plant):
    plant(fault)


@pytest.mark.healthy
def test_shares_of_a_processor_are_recorded(plant):
    result = plant(Fault("nothing", SUITE + "test_memory_bound_speed", outcome="passed"))
    kernels = {metric["conditions"]["kernel"] for metric in result["checks"][0]["metrics"]}
    assert {"layer_norm", "adamw", "cross_entropy backward"} <= kernels
