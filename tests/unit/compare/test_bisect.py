"""`bisect`: the stacks between two stacks of a matrix, and the search that names the step to blame."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import result_files
from small_checkout import CHECKS, CPU_STACK, FakeEngine, call
from stackcheck.compare import bisect
from stackcheck.compare.bisect import Culprit, Outcome, Steps, walk
from stackcheck.matrix import resolve
from stackcheck.recipe import lock, render

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")

OLD = "cpu-torch2.13.0-py3.11-debian12-old"
GEMM = CHECKS[2]
SEARCH = ("bisect", "--good", OLD, "--bad", CPU_STACK, "--check", GEMM, "--tier", "smoke")
# A second cpu stack, in which three packages are older.
ENTRY = f"""
  - id: {OLD}
    runtime: cpu
    torch: 2.13.0
    python: 3.11
    os: debian12
    wheels: upstream
    size_budget_gb: 3
    packages: {{numpy: 2.4.5, psutil: 7.2.1, pyyaml: 6.0.2}}
"""


@pytest.fixture
def checkout(small_checkout: Path, monkeypatch) -> Path:
    """A checkout with both stacks; a lock names the direct packages alone, without an index."""
    file = small_checkout / "matrix.yaml"
    file.write_text(file.read_text().replace("\ninclude:\n", f"\ninclude:{ENTRY}", 1))

    def locked(stack: Any, images: Path, _upstream: Any = None) -> lock.LockResult:
        folder = images / stack.id
        folder.mkdir(exist_ok=True)
        lines = [f"{pin} \\\n    --hash=sha256:{'0' * 64}\n" for pin in stack.requirements]
        (folder / "requirements.lock").write_text("".join(lines))
        pins = {"schema": 1, "stack_id": stack.id, "locked": True, "missing": [], "bases": {}, "sources": {}}
        (folder / "pins.json").write_text(json.dumps({**pins, "wheels": {}}))
        return lock.LockResult(missing=(), kept=())

    monkeypatch.setattr("stackcheck.compare.bisect.lock.lock", locked)
    (old,) = [each for each in resolve.load_stacks(small_checkout) if each.id == OLD]
    locked(old, small_checkout / "images")
    render.write(resolve.load_stacks(small_checkout, (OLD,)), small_checkout / "images")
    return small_checkout


def suites(engine: FakeEngine, *bad: tuple[str, ...]) -> list[frozenset[str]]:
    """GEMM fails in an image that holds all the versions of one entry of `bad`; what was run, by packages."""
    ran: list[frozenset[str]] = []

    def write(told: dict[str, Any]) -> str:
        now = dt.datetime.now(dt.UTC).isoformat()
        has = versions(told)
        ran.append(has)
        outcome = "failed" if any(set(each) <= has for each in bad) else "passed"
        check = result_files.check(GEMM, outcome, devices=[])
        same = result_files.told_again(told)
        return json.dumps(result_files.result(check, **same, started=now, finished=now))

    engine.answer = write
    return ran


def versions(told: dict[str, Any]) -> frozenset[str]:
    """The pinned packages of the image that was run: its stack's lock has them."""
    import pathlib

    roots = (pathlib.Path("images"), bisect.FOLDER / "checkout" / "images")
    (file,) = (
        place / told["stack_id"] / "requirements.lock"
        for place in roots
        if (place / told["stack_id"] / "requirements.lock").exists()
    )
    return frozenset(line.split()[0] for line in file.read_text().splitlines() if "==" in line)


@pytest.mark.usefixtures("checkout")
def test_the_package_to_blame_is_named_and_the_search_goes_on_where_it_was(fake_engine, capsys, checkout):
    ran = suites(fake_engine, ("psutil==7.2.2",))
    done = call(capsys, *SEARCH, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert (found["kind"], found["components"]) == ("one", ["psutil"])
    assert found["cause"] == "psutil 7.2.1 -> 7.2.2"
    assert len(ran) == 5
    assert not list((checkout / "images").glob("bisect-*"))
    again = json.loads(call(capsys, *SEARCH, "--json").out)
    assert len(ran) == 5  # nothing was run again
    assert [each["new"] for each in again["tried"]] == [False] * 5
    (kept,) = (checkout / "build" / "bisect").glob("*.json")
    document = json.loads(kept.read_text())
    document["tried"] = document["tried"][:3]
    kept.write_text(json.dumps(document))
    assert json.loads(call(capsys, *SEARCH, "--json").out)["components"] == ["psutil"]
    assert len(ran) == 7


@pytest.mark.usefixtures("checkout")
def test_components_that_break_it_together_and_ends_that_are_not_what_they_should_be(fake_engine, capsys):
    suites(fake_engine, ("numpy==2.4.6", "pyyaml==6.0.3"))
    done = call(capsys, *SEARCH)
    assert done.code == 0, done.err
    assert (
        "pyyaml 6.0.2 -> 6.0.3 and numpy 2.4.5 -> 2.4.6: only together; one alone does not break the check"
        in done.out
    )
    suites(fake_engine, ())
    done = call(capsys, *SEARCH, "--force")
    assert done.code == 2
    assert "--good names a stack in which the check does not pass" in done.err
    suites(fake_engine)
    done = call(capsys, *SEARCH, "--force")
    assert done.code == 2
    assert "--bad names a stack in which the check does not fail" in done.err


@pytest.mark.usefixtures("checkout")
def test_a_dry_run_lists_the_steps(capsys, fake_engine):
    done = call(capsys, *SEARCH, "--dry-run")
    assert [line.split()[:2] for line in done.out.splitlines()[1:]] == [
        ["1", "numpy"],
        ["2", "psutil"],
        ["3", "pyyaml"],
    ]
    assert not fake_engine.runs
    gone = call(capsys, "bisect", "--good", "nosuch", "--bad", CPU_STACK, "--check", GEMM, "--dry-run")
    assert gone.code == 3


def broken_by(*culprits: set[int], unknown: Callable[[Steps], bool] = lambda _steps: False) -> Asked:
    return Asked(culprits, unknown)


class Asked:
    """A check that fails with all the steps of one of the culprits."""

    def __init__(self, culprits: tuple[set[int], ...], unknown: Callable[[Steps], bool]) -> None:
        self.culprits, self.unknown, self.count = culprits, unknown, 0

    def __call__(self, steps: Steps) -> Outcome:
        self.count += 1
        if self.unknown(steps):
            return "unknown"
        return "fails" if any(each <= steps for each in self.culprits) else "passes"


@pytest.mark.parametrize("count", [1, 2, 3, 8, 20])
def test_every_single_step_is_found_in_few_questions(count):
    for step in range(count):
        ask = broken_by({step})
        assert walk(count, ask) == Culprit(kind="one", steps=(step,))
        assert ask.count <= 3 + math.ceil(math.log2(count))  # both ends, the halves, the step alone


def test_every_pair_that_only_fails_together_is_found():
    for first, second in itertools.combinations(range(7), 2):
        found = walk(7, broken_by({first, second}))
        assert found == Culprit(kind="together", steps=(second, first))


def test_of_two_culprits_one_is_named():
    found = walk(9, broken_by({2}, {6}))
    assert found in {Culprit(kind="one", steps=(2,)), Culprit(kind="one", steps=(6,))}


def test_three_that_only_fail_together_are_not_told_as_two():
    found = walk(6, broken_by({0, 2, 4}))
    assert found.kind == "more"
    assert {0, 2, 4} <= set(found.steps)


def test_ends_that_are_not_what_they_were_said_to_be():
    assert walk(4, broken_by(set())).kind == "good fails"
    assert walk(4, broken_by({99})).kind == "bad passes"
    assert walk(4, broken_by({1}, unknown=lambda steps: not steps)).kind == "good fails"


def test_what_cannot_be_built_leaves_a_range():
    found = walk(8, broken_by({4}, unknown=lambda steps: len(steps) in {4, 5}))
    assert found == Culprit(kind="one of", steps=(3, 4, 5))
