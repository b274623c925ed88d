"""What happened in each check. In: pytest's reports of its phases. Out: records for result.json, a summary.

A check's metrics and evidence travel as text on its teardown report, because only text reaches the controller
of pytest-xdist.
"""

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import pytest

from harness import causes, timeline
from harness.check import Check
from harness.unfit import InvalidRun

RECORD = "stackcheck_record"
KIND = "stackcheck_kind"
RANK = {"passed": 0, "skipped": 1, "failed": 2, "invalid": 3, "error": 4}
Phase = Literal["setup", "call", "teardown"]
PhaseOutcome = Literal["passed", "failed", "skipped"]
SHOWN = 20  # without a device every check fails for the same reason; result.json lists them all


def check_id(nodeid: str) -> str:
    """The id of a check, relative to tests/acceptance."""
    return nodeid.removeprefix("acceptance/")


def concluding(function: Callable[..., object], check: Check) -> Callable[..., None]:
    """The check's function, which also fails on what its own assertions did not see:
    an unfit machine, a violated bound.
    """

    @functools.wraps(function)
    def run(*args: object, **kwargs: object) -> None:
        try:
            function(*args, **kwargs)
        except (AssertionError, pytest.fail.Exception):
            if check.unfit:  # a wrong figure on an unfit machine says nothing about the image
                check.conclude()
            raise
        check.conclude()

    return run


def fail_at_once(item: pytest.Item, reason: str) -> bool:
    """Report a check as failed without running it."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    _report_phase(item, "setup", "passed")
    _report_phase(item, "call", "failed", reason)
    _report_phase(item, "teardown", "passed")
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _report_phase(item: pytest.Item, when: Phase, outcome: PhaseOutcome, reason: str | None = None) -> None:
    report = pytest.TestReport(
        nodeid=item.nodeid, location=item.location, keywords={}, outcome=outcome, longrepr=reason, when=when
    )
    setattr(report, KIND, outcome)
    setattr(report, RECORD, json.dumps({"doc": _doc(item)}))
    item.ihook.pytest_runtest_logreport(report=report)


def kind(report: pytest.TestReport, call: pytest.CallInfo[None]) -> str:
    """The outcome of a phase, as result.json spells it."""
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
    """What a check adds to its record: its docstring, devices, metrics, evidence, violations and hints."""
    after = {**check.after, "during": check.telemetry()} if check.samples else check.after
    return {
        "doc": _doc(item),
        "skip": check.skip,
        "machine": [asdict(found) for found in check.machine],
        "cause": check.cause,
        "started": check.started,
        "waited_s": round(check.waited_s, 4),
        "devices": list(check.devices),
        "metrics": [asdict(metric) for metric in check.metrics],
        "evidence": {"before": check.before, "after": {**after, **check.more_evidence}},
        "violations": check.violations,
        "hints": () if check.lacks_only_bounds() else check.hints,
    }


def new_record(name: str) -> dict[str, Any]:
    """The record of a check before any of its phases was reported."""
    return {
        "id": name,
        "outcome": "passed",
        "reason": None,
        "cause": None,
        "doc": None,
        "skip": None,
        "machine": [],
        "seconds": 0.0,
        "started": None,
        "waited_s": 0.0,
        "devices": [],
        "metrics": [],
        "evidence": {"before": {}, "after": {}},
    }


def merge(record: dict[str, Any], report: pytest.TestReport) -> None:
    """Add one phase to a record: the check's outcome and reason are those of its worst phase."""
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
    if report.when == "teardown":
        record["seconds"] = round(max(0.0, record["seconds"] - record["waited_s"]), 4)
    if report.when == "teardown" and report.failed:  # then something else failed as well
        record["cause"] = None


def _reason(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longreprtext)[:8000]


def summarize(
    terminal: "pytest.TerminalReporter", result: Mapping[str, Any], path: Path, model: str, devices: int
) -> None:
    """Print the end of the terminal output: each check that did not pass, its causes and the next command.

    Args:
        terminal: Where to print.
        result: The content of result.json.
        path: The file that holds it.
        model: The device model.
        devices: How many devices the run used.
    """
    checks = result["checks"]
    terminal.section("stackcheck")
    bad = [check for check in checks if check["outcome"] in ("failed", "error", "invalid")]
    for check in bad[:SHOWN]:
        for line in _lines(check, model, devices, result["host"]["vendor"]):
            terminal.write_line(line)
    if len(bad) > SHOWN:
        terminal.write_line(f"and {len(bad) - SHOWN} more")
    skipped = Counter(check["reason"] for check in checks if check["outcome"] == "skipped")
    for reason, count in skipped.items():
        terminal.write_line(f"skipped {count}: {reason}")
    counts = sorted(Counter(_outcome(check) for check in checks).items())
    total = ", ".join(f"{count} {outcome}" for outcome, count in counts) or "no check ran"
    terminal.write_line(f"{model} x{devices}: {total}; {path}")
    terminal.write_line(timeline.words(result))
    if any(check["cause"] == "no_threshold" for check in checks):
        terminal.write_line(f"bounds: stackcheck baseline {path} and the results of two more healthy runs")


def _outcome(check: Mapping[str, Any]) -> str:
    """How a check ended, for a reader: a missing bound says nothing about the machine or the image."""
    return "no bound" if check["cause"] == "no_threshold" else str(check["outcome"])


def _lines(check: Mapping[str, Any], model: str, devices: int, vendor: str) -> Iterator[str]:
    yield f"{_outcome(check).upper()} {check['id']} on {model} x{len(check['devices']) or devices}"
    if check["doc"]:
        yield f"  proves: {check['doc']}"
    for line in (check["reason"] or "").splitlines()[:8]:
        yield f"  {line}"
    for metric in check["metrics"]:
        if metric["verdict"] == "fail":
            yield f"  got {metric['value']} {metric['unit']}, bound {metric['bound']} ({metric['source']})"
            yield from (f"  look at: {cause}" for cause in causes.likely(metric["name"]))
    if check["cause"] == "no_threshold":  # nothing is known to be slow: there is no cause to look for
        yield "  next: stackcheck baseline, with the results of three healthy runs on this device model"
    else:
        yield f"  next: pytest 'tests/acceptance/{check['id']}' --gpu-vendor {vendor} -x -vv"
