"""Which planted faults were caught, as one JSON line at the end of a run of tests/faults with --proof.

In: what each test declares to plant, and how it ended. Out: {"checks": [...] or null, "faults": [{"test",
"name", "check", "vendor", "expected", "state", "reason"}], "healthy": [{"test", "name", "check", "vendor",
"state", "reason"}], "failed": [tests that plant nothing and failed]}. `stackcheck prove` reads it.

A test declares what it plants by a parameter with `name`, `check` and `outcome` (`planting.Fault`), by
`@pytest.mark.catches("test_x.py::test_y")`, by `@pytest.mark.healthy`, by the `plant` fixture, or by
`planting.tell` if one test plants many faults. "state" is "caught", "missed" or "not run"; of a healthy
run "passed", "false alarm" or "not run".
"""

import fnmatch
import json
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

import planting

COLLECT_TIMEOUT_S = 600
REASON_LENGTH = 2000


class Proof:
    """Collects the reports of one run; under pytest-xdist in the controller."""

    def __init__(self) -> None:
        self.ended: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst phase of each test, and everything that it planted."""
        test = self.ended.setdefault(report.nodeid, {"outcome": "passed", "reason": None, "planted": []})
        test["planted"] = [
            json.loads(text) for name, text in report.user_properties if name == planting.PLANTED
        ]
        if report.outcome != "passed" and test["outcome"] != "failed":
            test["outcome"] = report.outcome
            test["reason"] = _reason(report)

    def pytest_terminal_summary(self, terminalreporter: "pytest.TerminalReporter") -> None:
        """Print the line, after all output for people."""
        runs = list(self._runs())
        answer = {
            "checks": checks(),
            "faults": [run for run in runs if run["expected"] != "passed"],
            "healthy": [_healthy(run) for run in runs if run["expected"] == "passed"],
            "failed": [name for name, test in self.ended.items() if _is_bare(test)],
        }
        terminalreporter.ensure_newline()
        terminalreporter.write_line(json.dumps(answer))

    def _runs(self) -> Iterator[dict[str, Any]]:
        for name, test in self.ended.items():
            for planted in test["planted"]:
                caught = planted.pop("caught", None)
                state = {"passed": "caught", "failed": "missed", "skipped": "not run"}[test["outcome"]]
                if caught is not None:
                    state = "caught" if caught else "missed"
                yield {"test": name, **planted, "state": state, "reason": test["reason"]}


def statically(item: pytest.Item) -> list[dict[str, Any]]:
    """What a test plants, by its parameters and marks."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    found = [planting.declaration(value) for value in params.values() if planting.is_fault(value)]
    name = item.name.removeprefix("test_").replace("_", " ")
    if found:
        return found
    if (mark := item.get_closest_marker("healthy")) is not None:
        return [{"name": name, "check": "", "vendor": "cpu", "expected": "passed", **mark.kwargs}]
    if (mark := item.get_closest_marker("catches")) is not None:
        return [
            {"name": name, "check": check, "vendor": "cpu", "expected": "failed", **mark.kwargs}
            for check in mark.args
        ]
    return []


def is_chosen(pattern: str, item: pytest.Item, planted: list[dict[str, Any]]) -> bool:
    """Whether `prove --only PATTERN` runs a test: its name, its fault or its check has the pattern in it."""
    names = [item.nodeid, *(each[field] for each in planted for field in ("name", "check"))]
    return any(fnmatch.fnmatchcase(name, f"*{pattern}*") for name in names)


def checks() -> list[str] | None:
    """Every check of tests/acceptance by function, as pytest collects them; None if there is no torch."""
    ended = subprocess.run(
        [planting.SUITE_PYTHON, "-m", "pytest", str(planting.TESTS / "acceptance"), "--gpu-vendor", "cpu",
         "--tier", "soak", "--collect-only", "-q", "-p", "no:cacheprovider", "--assert=plain"],
        capture_output=True,
        text=True,
        timeout=COLLECT_TIMEOUT_S,
        check=False,
        cwd=planting.TESTS,
    )  # fmt: skip
    if ended.returncode:
        return None
    lines = (line.partition("[")[0] for line in ended.stdout.splitlines() if "::" in line)
    return sorted({line.removeprefix("acceptance/") for line in lines})


def _healthy(run: Mapping[str, Any]) -> dict[str, Any]:
    states = {"caught": "passed", "missed": "false alarm", "not run": "not run"}
    kept = {key: value for key, value in run.items() if key != "expected"}
    return {**kept, "state": states[run["state"]]}


def _is_bare(test: Mapping[str, Any]) -> bool:
    return test["outcome"] == "failed" and not test["planted"]


def _reason(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longreprtext)[:REASON_LENGTH]
