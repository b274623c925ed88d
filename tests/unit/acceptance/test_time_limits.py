"""Limits of time follow vendor and ranks: they tell a hang from slow work, and AMD's first calls search."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

import vendors
from harness.session import AcceptanceSession


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
def test_limits_grow_with_patience_and_ranks(vendor: str, ranks: int, limit: float) -> None:
    session = cast("Any", SimpleNamespace(vendor=vendor))
    assert AcceptanceSession.limit_s(session, 120, ranks) == limit


def test_every_vendor_has_patience_of_at_least_one() -> None:
    assert all(vendors.module(name).PATIENCE >= 1 for name in vendors.VENDORS)
