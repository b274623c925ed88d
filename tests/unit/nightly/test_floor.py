"""Figures far below their certificate fail a night after one repeat; earlier nights only warn."""

import json
from pathlib import Path
from typing import Any

import pytest

import result_files
import small_checkout as checkouts
from nights import Nights
from small_checkout import CHECKS
from stackcheck.matrix import resolve
from stackcheck.nightly import summary
from stackcheck.vendors import amd

pytestmark = pytest.mark.usefixtures("no_disk_flushes")

REAL_AMD = {name: getattr(amd, name) for name in ("devices", "driver", "present")}
SPEED = CHECKS[2]


def bounds(_root: Path, question: Any) -> str:
    """The answer of the suites' own program: a wide bound for each figure."""
    bound = {"unit": "TFLOP/s", "direction": "min", "bound": 500.0, "class": "derived"}
    count = len(question["figures"])
    return json.dumps({"reached": [True] * count, "bounds": [bound] * count, "missing": [], "unmeasured": []})


@pytest.fixture
def nights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nights:
    """Nights in which the suites measure `speeds`, one value a run."""
    made = Nights(tmp_path, checkouts.make_checkout(tmp_path, monkeypatch), monkeypatch, REAL_AMD)
    made.speeds = []
    usual = made._answer

    def answer(told: dict[str, Any]) -> str:
        document = json.loads(usual(told))
        value = made.speeds.pop(0) if made.speeds else 700.0
        figure = result_files.metric("gemm_tflops", value, unit="TFLOP/s", repeats=[value], bound=500.0)
        next(check for check in document["checks"] if check["id"] == SPEED)["metrics"] = [figure]
        return json.dumps(document)

    monkeypatch.setattr(made, "_answer", answer)
    monkeypatch.setattr("stackcheck.suite.bounds.ask_suites", bounds)
    return made


def test_a_loss_of_ten_percent_is_repeated_once_and_then_revokes(nights: Nights) -> None:
    node = nights.node("one", first_id=1)
    (stack,) = resolve.load_stacks(node.root, ("rocm7.1.0-torch2.10.0-*",))
    nights.publish(node, stack, "A1")
    (item,) = nights.play(node, force=True).items
    assert item.figures[0].value == 700.0
    nights.speeds = [620.0, 690.0]  # once low, then not
    plan = nights.play(node, force=True)
    assert [run.slow for run in plan.items[0].runs] == [(SPEED,), (), ()]
    assert plan.items[0].ended.action == "renew"
    assert plan.items[0].ended.flaky
    for _ in range(6):
        assert nights.play(node, force=True).items[0].ended.action == "renew"
    nights.speeds = [650.0]  # inside bound and floor, below the chip's own nights
    plan = nights.play(node, force=True)
    assert plan.items[0].ended.action == "renew"
    assert summary.exit_code(plan) == 0
    assert "7.1% worse than its own nights (700)" in summary.line(plan)
    nights.speeds = [700.0]
    nights.play(node, force=True)
    nights.speeds = [615.0, 616.0]
    plan = nights.play(node, force=True)
    assert plan.items[0].ended.action == "revoke"
    assert summary.exit_code(plan) == 6
    assert f"far below its certificate: gemm_tflops of {SPEED}: 616 TFLOP/s, 12.0% worse" in summary.line(
        plan
    )
