"""Whoever reads a figure that failed is told where to look first."""

import json
import sys
from pathlib import Path

import pytest
import yaml

ACCEPTANCE = Path(__file__).parents[3] / "tests" / "acceptance"
METRICS = sorted(
    {
        entry["metric"]
        for path in (ACCEPTANCE / "thresholds").rglob("*.json")
        for entry in json.loads(path.read_text())["thresholds"]
    }
)


@pytest.mark.parametrize("metric", METRICS)
def test_every_figure_that_a_threshold_gates_has_likely_causes(
    metric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_a_collective_that_cannot_share_memory_names_the_known_issue(
    words: str, monkeypatch: pytest.MonkeyPatch, *, named: bool
) -> None:
    monkeypatch.setattr(sys, "path", [str(ACCEPTANCE), *sys.path])
    from harness import overdue, processes

    with pytest.raises(pytest.fail.Exception) as failed, overdue.failing():
        raise processes.WorkloadError(words)
    assert ("look at: " in str(failed.value)) is named
    issues = yaml.safe_load((ACCEPTANCE.parents[1] / "images/known-issues.yaml").read_text())["issues"]
    (issue,) = [one["issue"] for one in issues if one["id"] == "K-hip-ipc-device-plugin"]
    assert (issue in str(failed.value)) is named
