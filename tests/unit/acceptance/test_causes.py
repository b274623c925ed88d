"""Whoever reads a figure that failed is told where to look first."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

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
