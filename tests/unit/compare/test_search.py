"""The search between a good and a bad end names the step to blame, in few questions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest

from stackcheck.compare.bisect import Culprit, Outcome, Steps, walk


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
def test_every_single_step_is_found_in_few_questions(count: int) -> None:
    for step in range(count):
        ask = broken_by({step})
        assert walk(count, ask) == Culprit(kind="one", steps=(step,))
        assert ask.count <= 3 + math.ceil(math.log2(count))  # both ends, the halves, the step alone


def test_every_pair_that_only_fails_together_is_found() -> None:
    for first, second in itertools.combinations(range(7), 2):
        found = walk(7, broken_by({first, second}))
        assert found == Culprit(kind="together", steps=(second, first))


def test_of_two_culprits_one_is_named() -> None:
    found = walk(9, broken_by({2}, {6}))
    assert found in {Culprit(kind="one", steps=(2,)), Culprit(kind="one", steps=(6,))}


def test_three_that_only_fail_together_are_not_told_as_two() -> None:
    found = walk(6, broken_by({0, 2, 4}))
    assert found.kind == "more"
    assert {0, 2, 4} <= set(found.steps)


def test_ends_that_are_not_what_they_were_said_to_be() -> None:
    assert walk(4, broken_by(set())).kind == "good fails"
    assert walk(4, broken_by({99})).kind == "bad passes"
    assert walk(4, broken_by({1}, unknown=lambda steps: not steps)).kind == "good fails"


def test_what_cannot_be_built_leaves_a_range() -> None:
    found = walk(8, broken_by({4}, unknown=lambda steps: len(steps) in {4, 5}))
    assert found == Culprit(kind="one of", steps=(3, 4, 5))
