"""One check as result.json keeps it. In: pytest's reports of its three phases. Out: one record.

What a check measured travels as text on its teardown report, so that it survives the way to the controller of
pytest-xdist.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from harness.check import Check, InvalidRun

RECORD = "stackcheck_record"
KIND = "stackcheck_kind"
RANK = {"passed": 0, "skipped": 1, "failed": 2, "invalid": 3, "error": 4}


def check_id(nodeid: str) -> str:
    """The id of a check, relative to tests/acceptance."""
    return nodeid.removeprefix("acceptance/")


def concluding(function: Callable[..., object], check: Check) -> Callable[..., None]:
    """A check that ends with what its own assertions did not say: an unfit machine, a violated bound."""

    @functools.wraps(function)
    def run(*args: object, **kwargs: object) -> None:
        try:
            function(*args, **kwargs)
        except (AssertionError, pytest.fail.Exception):
            if check.unfit:  # a wrong figure of an unfit machine is no failure of the image
                check.conclude()
            raise
        check.conclude()

    return run


def fail_at_once(item: pytest.Item, reason: str) -> bool:
    """Report a check as failed without running it."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for when, outcome in (("setup", "passed"), ("call", "failed"), ("teardown", "passed")):
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome=outcome,  # type: ignore[arg-type]
            longrepr=reason if outcome == "failed" else None,
            when=when,  # type: ignore[arg-type]
        )
        setattr(report, KIND, outcome)
        setattr(report, RECORD, json.dumps({"doc": _doc(item)}))
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def kind(report: pytest.TestReport, call: pytest.CallInfo[None]) -> str:
    """The outcome of a phase, in the words of result.json."""
    raised = call.excinfo.value if call.excinfo else None
    if isinstance(raised, InvalidRun):
        return "invalid"
    if report.failed and report.when != "call" and not isinstance(raised, pytest.fail.Exception):
        return "error"
    return str(report.outcome)


def _doc(item: pytest.Item) -> str | None:
    text = getattr(getattr(item, "function", None), "__doc__", None)
    return " ".join(text.split("\n\n")[0].split()) if text else None


def measured(item: pytest.Item, check: Check) -> dict[str, Any]:
    """What a check adds to its record beyond the outcome."""
    after = {**check.after, "during": check.telemetry()} if check.samples else check.after
    return {
        "doc": _doc(item),
        "cause": check.cause,
        "devices": list(check.devices),
        "metrics": [asdict(metric) for metric in check.metrics],
        "evidence": {"before": check.before, "after": {**after, **check.told}},
        "violations": check.violations,
        "hints": () if check.lacks_only_bounds() else check.hints,
    }


def new_record(name: str) -> dict[str, Any]:
    """The record of a check that has not said anything yet."""
    return {
        "id": name,
        "outcome": "passed",
        "reason": None,
        "cause": None,
        "doc": None,
        "seconds": 0.0,
        "devices": [],
        "metrics": [],
        "evidence": {"before": {}, "after": {}},
    }


def merge(record: dict[str, Any], report: pytest.TestReport) -> None:
    """Add one phase: the worst outcome is the check's, and its reason."""
    record["seconds"] = round(record["seconds"] + getattr(report, "duration", 0.0), 4)
    outcome = getattr(report, KIND, "error" if report.failed else report.outcome)
    if RANK[outcome] > RANK[record["outcome"]]:
        record["outcome"] = outcome
        record["reason"] = _reason(report)
    found = json.loads(getattr(report, RECORD, "{}"))
    extra = [line for line in found.pop("violations", []) if line not in (record["reason"] or "")]
    hints = [f"look at: {hint}" for hint in found.pop("hints", ())]
    if record["outcome"] == "failed":
        extra += hints
    if extra:
        record["reason"] = "\n".join(filter(None, (record["reason"], *extra)))
    record.update(found)
    if report.when == "teardown" and report.failed:  # then something else failed as well
        record["cause"] = None


def _reason(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longreprtext)[:8000]
