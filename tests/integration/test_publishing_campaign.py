"""Publishing under fire, on a real registry: benchmarks/publishing.py, in a short mode."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    Campaign = Callable[..., dict[str, Any]]

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]


@pytest.fixture
def campaign(registry: str) -> Campaign:
    """The program, where the package of the registry is installed."""
    assert registry

    def run(*arguments: str) -> dict[str, Any]:
        command = [sys.executable, ROOT / "benchmarks" / "publishing.py", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.stdout, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        assert found["wrong"] == []
        assert done.returncode == 0, done.stderr
        assert found["tampering"]["cases"] >= 150
        assert found["tampering"]["refused"] == found["tampering"]["cases"]
        return found

    return run


@pytest.mark.slow
def test_a_short_campaign_finds_nothing_wrong(campaign: Campaign) -> None:
    count = ("--boundaries", "4", "--kills", "2", "--schedules", "6", "--races", "2", "--fuzz-s", "5")
    found = campaign("--seed", "2", *count)
    assert found["kill"]["boundaries"] == 4
    assert sum(found["faults"]["planted"].values()) > 0
    assert found["fuzz"]["inputs"] > 10
