"""The clock of `test_witness_of_speed`: an honest child passes on a busy host, one that lies never does."""

import functools
import random
from dataclasses import dataclass

import pytest

from harness import clock

SIZE = clock.Size(rows=3, width=8, checked=1)
SECONDS_A_STEP = 0.001


@dataclass
class Child:
    """A child that computes right, waits `outside_s` for a processor, and says `share` of its time."""

    outside_s: float
    share: float = 1.0
    now: float = 0.0
    seed: str = ""

    def __call__(self, function: str, **asked: object) -> object:
        if function.endswith(":prepare"):
            self.seed = str(asked["seed"])
            return None
        salt, steps = str(asked["salt"]), int(str(asked["steps"]))
        work_s = steps * SECONDS_A_STEP
        self.now += work_s + self.outside_s
        matrix = clock._packed(self.seed, SIZE.width)
        sums = [clock.row_sum(self.seed, salt, steps, row=row, matrix=matrix) for row in range(SIZE.rows)]
        return {"seconds": work_s * self.share, "sums": sums}


def found(child: Child, seed: int, monkeypatch: pytest.MonkeyPatch) -> clock.Clocked:
    monkeypatch.setattr(clock.time, "monotonic", lambda: child.now)
    return clock.clocked(random.Random(seed), child, SIZE)


def test_processes_compute_the_rows_that_one_computes() -> None:
    asked = {"matrix": clock._packed("seed", 64)}
    compute = functools.partial(clock.row_sum, "seed", "salt", 5, **asked)
    assert clock._together(compute, [7, 2, 7], 2) == clock._together(compute, [7, 2, 7], 1)


@pytest.mark.parametrize("seed", range(20))
def test_a_busy_host_is_no_contradiction(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = random.Random(seed).uniform(0.0, 0.5)
    assert found(Child(outside_s=drawn), seed, monkeypatch).problem == ""


@pytest.mark.parametrize("seed", range(20))
def test_a_child_that_claims_to_be_faster_is_contradicted(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(seed)
    child = Child(outside_s=source.uniform(0.0, 0.5), share=source.uniform(0.0, 0.49))
    assert "by the controller's clock" in found(child, seed, monkeypatch).problem


def test_a_child_cannot_have_worked_longer_than_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "by the controller's clock" in found(Child(outside_s=0.0, share=1.1), 0, monkeypatch).problem
