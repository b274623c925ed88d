"""Each night draws other generated cases, and all nodes and runs of a night draw the same ones."""

import datetime as dt
from pathlib import Path
from typing import Any

import pytest

import small_checkout as checkouts
from nights import Nights, Node
from small_checkout import CHECKS
from stackcheck.matrix import resolve
from stackcheck.vendors import amd

pytestmark = pytest.mark.usefixtures("no_disk_flushes")

REAL_AMD = {name: getattr(amd, name) for name in ("devices", "driver", "present")}


@pytest.fixture
def nights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nights:
    return Nights(tmp_path, checkouts.make_checkout(tmp_path, monkeypatch), monkeypatch, REAL_AMD)


def seeds(nights: Nights, node: Node) -> list[str]:
    """The seeds of one night's runs."""
    before = len(node.engine.runs)
    nights.play(node, force=True)
    commands = [run.beside.command for run in node.engine.runs[before:] if _is_of_suites(run)]
    return [word for command in commands for word in command if word.startswith("--case-seed")]


def _is_of_suites(run: Any) -> bool:
    return getattr(run, "beside", None) is not None


def test_nights_of_one_day_agree_and_the_next_day_draws_others(nights: Nights) -> None:
    """Seven nights have seven seeds, none of them a first certificate's; a failing night repeats its own."""
    first, second = nights.node("a", first_id=100), nights.node("b", first_id=200)
    (stack,) = resolve.load_stacks(first.root, ("rocm7.1.0-torch2.10.0-*",))
    nights.publish(first, stack, "A1")
    drawn = []
    for _ in range(7):
        mine = {*seeds(nights, first), *seeds(nights, second)}
        assert len(mine) == 1
        drawn += mine
        nights.clock.now += dt.timedelta(days=1)
    assert len(set(drawn)) == 7
    assert "--case-seed=0" not in drawn
    nights.finds = lambda _digest, _driver, _run: {CHECKS[1]: "failed"}
    again = seeds(nights, first)
    assert len(again) == 2
    assert len(set(again)) == 1
