"""A plugin for the pytest that runs a library's own tests. In: two variables. Out: a JSON line an event.

A line is written as its test ends, so what was done is known however the process ends.
"""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

LINES, SEED = "STACKCHECK_OWN_TESTS_LINES", "STACKCHECK_OWN_TESTS_SEED"
LONGEST = 6000  # characters of a traceback, from its end


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Another order for each seed but 0: the same one in all workers."""
    if seed := int(os.environ[SEED]):
        random.Random(seed).shuffle(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(ids: list[str]) -> None:
    _write(collected=len(ids))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.outcome != "passed":
        _write(file=report.nodeid, outcome=report.outcome, why=_why(report))


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(id=nodeid, outcome="began")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.outcome != "passed" or report.when == "call":
        _write(id=report.nodeid, outcome=report.outcome, why=_why(report))


def _why(report: Any) -> str:
    """The reason of a skip, or the end of a traceback."""
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    if expected := getattr(report, "wasxfail", ""):
        return f"fails as its authors expect: {expected}"
    return str(report.longrepr or "")[-LONGEST:]


def _write(**line: Any) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # the process that hands out tests hears of all of them
        with Path(os.environ[LINES]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
