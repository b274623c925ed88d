"""Margins of numeric checks: recorded by a healthy run, and a margin that is no number never passes."""

# ruff: noqa: E501 - a table of faults reads in rows

import pytest

from planting import Fault

SMALL = {"workloads.embedding:ROWS": "(1, 1000)"}  # a table of every row is no part of these faults
FAULTS = (
    Fault("a margin that is no number", "test_kernels.py::test_embedding", says="not a number", patches={**SMALL, "workloads.margins:of": "lambda *a: float('nan')"}),
    Fault("a case that passes beyond its gate", "test_kernels.py::test_embedding", says="margin: got 3, bound 1", patches={**SMALL, "workloads.margins:of": "lambda *a: 3.0"}),
    Fault(
        "a result that is no number",
        "test_kernels.py::test_fp32_is_ieee_by_default",
        says="numeric_worst_margin is nan",
        tier="smoke",
        patches={"torch:mm": "lambda *a, **k: original(*a, **k) * nan"},
    ),
    Fault(
        "a collective whose margin is no number",
        "test_collectives.py::test_broadcast_values",
        says="numeric_worst_margin is nan",
        tier="smoke",
        patches={"workloads.margins:of": "lambda *a: float('nan')"},
    ),
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_caught(fault, plant):
    plant(fault)


@pytest.mark.slow  # the suites in the image run them too
@pytest.mark.parametrize(
    "check",
    [
        "test_kernels.py::test_embedding",
        "test_kernels.py::test_no_silent_corruption",
        "test_attention.py::test_packed_members",
        "test_collectives.py::test_broadcast_values",
        "test_devices_memory.py::test_memory_holds_patterns",
    ],
)
def test_a_healthy_check_records_a_margin_within_its_gates(check, plant):
    tier = "smoke" if check.startswith("test_collectives") else "standard"
    few = ("-k", "not torch and not package")
    result = plant(Fault("nothing", check, outcome="passed", tier=tier, arguments=few))
    for one in result["checks"]:
        metrics = {metric["name"]: metric for metric in one["metrics"]}
        margin, count = metrics["numeric_worst_margin"], metrics["numeric_cases"]
        assert 0 <= margin["value"] <= 1, one["id"]
        assert count["value"] >= 1, one["id"]
        assert {margin["verdict"], count["verdict"]} == {"recorded"}
