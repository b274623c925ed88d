"""The `plant` fixture of the fault tests; `planting` tells how to add a fault."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import planting


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
def plant(suite_python: str, tmp_path: Path) -> Callable[[planting.Fault], dict[str, Any]]:
    """Run the suite with a fault planted, and assert that its check caught it."""
    assert suite_python

    def planted(fault: planting.Fault) -> dict[str, Any]:
        result = planting.run(fault, tmp_path)
        planting.judge(fault, result)
        return result

    return planted
