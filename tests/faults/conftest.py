"""The `plant` fixture of the fault tests. planting.py says how to add a fault, proof.py what a run
reports.
"""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import planting
import proof

VARIABLES = frozenset(os.environ)
# OpenMP reads it while a file of tests loads torch: threads that wait for a core of a busy machine spin. What
# children get is taken back to what it was before.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--proof", action="store_true", help="end with one JSON line: what was planted and caught"
    )
    parser.addoption(
        "--only",
        metavar="PATTERN",
        help="only tests whose check, fault or own name matches PATTERN (fnmatch)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "catches(*checks, **facts): plants a fault that these checks must catch"
    )
    config.addinivalue_line("markers", "healthy(**facts): plants nothing, and nothing may fail")
    config.addinivalue_line("markers", "waits: a hang is waited for; it begins first, while others compute")
    if config.getoption("proof", default=False) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(proof.Proof(), "stackcheck-proof")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked slow
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for name in set(os.environ) - VARIABLES:  # what a library sets while a file of tests is read
        if not name.startswith("PYTEST_"):
            del os.environ[name]
    for item in items:
        given = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(isinstance(value, planting.Fault) and value.another for value in given):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.get_closest_marker("waits") is None)
    pattern, kept, left = config.getoption("only", default=None), [], []
    for item in items:
        planted = proof.statically(item) if item.path.is_relative_to(here) else []
        for each in planted:
            planting.tell(item, each)
        (kept if pattern is None or proof.is_chosen(pattern, item, planted) else left).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Take back what a library sets while cases run here: children of later tests fork without it only."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def suite_python() -> str:
    """A Python that can run the suites."""
    found = subprocess.run(
        [
            planting.SUITE_PYTHON,
            "-c",
            "import importlib.util, sys; sys.exit(not importlib.util.find_spec('torch'))",
        ],
        check=False,
    )
    if found.returncode:
        pytest.skip("the suites need torch: name a Python that has it with STACKCHECK_SUITE_PYTHON")
    return planting.SUITE_PYTHON


@pytest.fixture
def plant(suite_python: str, tmp_path, request) -> Callable[[planting.Fault], dict[str, Any]]:
    """Run the suite with a fault planted, and assert that its check caught it."""
    assert suite_python

    def planted(fault: planting.Fault) -> dict[str, Any]:
        planting.tell(request.node, planting.declaration(fault))
        result = planting.run(fault, tmp_path)
        planting.judge(fault, result)
        return result

    return planted
