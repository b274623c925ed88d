"""A reader of a figure that failed is told where to look; missing bounds alone are a cause of their own."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from stackcheck.suite.results import CheckResult

ACCEPTANCE = Path(__file__).parents[3] / "tests" / "acceptance"
GEMM = {"dtype": "bf16", "m": 16384, "n": 8192, "k": 4096, "layout": "NT"}  # H200.json has its bound
NO_BOUND = GEMM | {"m": 1}


@pytest.fixture(name="harness")
def suites_on_the_path(monkeypatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(ACCEPTANCE), *sys.path])
    from harness import check, records

    return SimpleNamespace(check=check, records=records)


def ended(harness: Any, figures: list[tuple[float, dict[str, Any]]], *, teardown: str = "passed") -> Any:
    """The record of a check with these figures, as the tool reads it from result.json."""
    check = harness.check.Check(vendor="nvidia", model="H200")
    for value, conditions in figures:
        check.record("gemm_tflops", value, unit="TFLOP/s", conditions=conditions, gate=True)
    outcome = "passed"
    try:
        check.conclude()
    except pytest.fail.Exception:
        outcome = "failed"
    record = harness.records.new_record("test_a.py::test_b")
    phases = [("setup", "passed"), ("call", outcome), ("teardown", teardown)]
    for when, phase_outcome in phases:
        report = pytest.TestReport(
            nodeid="test_a.py::test_b",
            location=("test_a.py", 1, "test_b"),
            keywords={},
            outcome=phase_outcome,  # type: ignore[arg-type]
            longrepr="why" if phase_outcome == "failed" else None,
            when=when,  # type: ignore[arg-type]
        )
        if when == "call":  # as the session does; any other phase that fails is an error
            setattr(report, harness.records.KIND, phase_outcome)
        if when == "teardown":
            item: Any = SimpleNamespace()
            measured = harness.records.measured(item, check)
            setattr(report, harness.records.RECORD, json.dumps(measured))
        harness.records.merge(record, report)
    return CheckResult.model_validate_json(json.dumps(record))


@pytest.mark.parametrize(
    ("figures", "teardown", "outcome", "cause"),
    [
        ([(800.0, GEMM)], "passed", "passed", None),
        ([(800.0, NO_BOUND)], "passed", "failed", "no_threshold"),
        ([(800.0, NO_BOUND)], "failed", "error", None),
        ([(800.0, NO_BOUND), (400.0, GEMM)], "passed", "failed", None),
        ([(800.0, NO_BOUND), (float("nan"), GEMM)], "passed", "failed", None),
        ([(400.0, GEMM)], "passed", "failed", "bound"),
        ([(float("nan"), GEMM)], "passed", "failed", None),
    ],
)
def test_only_missing_or_only_violated_bounds_are_a_cause(harness, figures, teardown, outcome, cause):
    found = ended(harness, figures, teardown=teardown)
    assert (found.outcome, found.cause) == (outcome, cause)


METRICS = sorted(
    {
        entry["metric"]
        for path in (ACCEPTANCE / "thresholds").rglob("*.json")
        for entry in json.loads(path.read_text())["thresholds"]
    }
)


@pytest.mark.parametrize("metric", METRICS)
def test_every_figure_that_a_threshold_gates_has_likely_causes(metric, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ACCEPTANCE), *sys.path])
    from harness import causes

    assert causes.likely(metric)
    assert causes.likely("no_such_figure") == ()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("ncclUnhandledCudaError: ...\nLast error:\nhipIpcGetMemHandle failed : invalid argument", True),
        ("ncclUnhandledCudaError: ...\nLast error:\nout of memory", False),
    ],
)
def test_a_collective_that_cannot_share_memory_names_the_known_issue(words, monkeypatch, *, named):
    monkeypatch.setattr(sys, "path", [str(ACCEPTANCE), *sys.path])
    from harness import overdue, processes

    with pytest.raises(pytest.fail.Exception) as failed, overdue.failing():
        raise processes.WorkloadError(words)
    assert ("look at: " in str(failed.value)) is named
    issues = yaml.safe_load((ACCEPTANCE.parents[1] / "images/known-issues.yaml").read_text())["issues"]
    (issue,) = [one["issue"] for one in issues if one["id"] == "K-hip-ipc-device-plugin"]
    assert (issue in str(failed.value)) is named
