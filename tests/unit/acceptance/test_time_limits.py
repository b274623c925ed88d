"""Limits of time follow vendor and ranks: they tell a hang from slow work, and AMD's first calls search."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import vendors
from harness import processes, server
from harness.session import AcceptanceSession
from workloads import time_limits


@pytest.mark.parametrize(
    ("vendor", "ranks", "limit"),
    [
        ("nvidia", 1, 120),
        ("nvidia", 4, 120),
        ("nvidia", 8, 240),
        ("amd", 1, 360),
        ("amd", 8, 720),
        ("cpu", 2, 120),
    ],
)
def test_limits_grow_with_vendor_and_ranks(vendor: str, ranks: int, limit: float) -> None:
    session = cast("Any", SimpleNamespace(vendor=vendor))
    assert AcceptanceSession.limit_s(session, 120, ranks) == limit


def test_no_vendor_shortens_a_limit() -> None:
    assert all(vendors.module(name).TIME_LIMIT_FACTOR >= 1 for name in vendors.VENDORS)


def test_the_limits_inside_a_workload_grow_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that gives up earlier than its launch would end a healthy run all the same."""
    monkeypatch.delenv(processes.PATIENCE, raising=False)
    assert time_limits.scaled(60) == 60
    session = cast("Any", SimpleNamespace(vendor="amd"))
    monkeypatch.setenv(processes.PATIENCE, f"{AcceptanceSession.limit_s(session, 1, 8):g}")
    assert time_limits.scaled(60) == 360
    assert time_limits.VARIABLE == processes.PATIENCE
    assert processes.PATIENCE in server.READ_WHEN_USED  # or each launch would load torch anew


def test_no_workload_has_a_limit_that_does_not_grow() -> None:
    """Every limit of a workload passes through `scaled`; what a check itself asks for does not."""
    asked = {"collective_hang.py": "limit_s = options.timeout_s"}  # how soon the library has to give up
    for path in sorted(Path(time_limits.__file__).parent.glob("*.py")):
        for line in path.read_text(encoding="utf-8").splitlines():
            made = "Phases(" in line or "timeout=dt.timedelta(" in line or "monotonic() + LIMIT_S" in line
            own = path.name in asked and "options.timeout_s" in line
            assert not made or own or "scaled(" in line, f"{path.name}: {line.strip()}"
