"""Rounds that try every link, who is to blame, and who stands out."""

from __future__ import annotations

import itertools
import random

import pytest

from stackcheck.fleet.links import culprits, rounds
from stackcheck.fleet.spread import outliers


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16, 33])
def test_every_link_is_tried_once_in_few_rounds(count: int) -> None:
    nodes = [f"n{number:02d}" for number in range(count)]
    found = rounds(nodes)
    assert len(found) == (count if count % 2 else count - 1)
    for each in found:
        ends = [name for pair in each for name in pair]
        assert len(ends) == len(set(ends)), "a node in two pairs at once"
    assert sorted(pair for each in found for pair in each) == list(itertools.combinations(nodes, 2))


def speeds(nodes: list[str], bad: dict[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    noise = random.Random(3)
    return {pair: bad.get(pair, noise.gauss(48.0, 0.3)) for pair in itertools.combinations(nodes, 2)}


def test_a_slow_link_is_named_and_neither_of_its_nodes() -> None:
    nodes = list("abcdefgh")
    (found,) = culprits({}, speeds(nodes, {("b", "f"): 30.0}))
    assert (found.kind, found.names) == ("link", ("b", "f"))
    assert "worse than the median of 28" in found.because


def test_a_bad_node_is_named_and_not_its_links() -> None:
    nodes = list("abcdefgh")
    measured = speeds(nodes, {})
    failed = {pair: "time-out" for pair in measured if "c" in pair}
    failed[("e", "g")] = "wrong sum"
    found = culprits(failed, {pair: value for pair, value in measured.items() if pair not in failed})
    assert [(each.kind, each.names) for each in found] == [("node", ("c",)), ("link", ("e", "g"))]
    assert "7 of its 7 pairs" in found[0].because
    assert culprits({}, measured) == []


def test_two_bad_nodes_are_both_named() -> None:
    nodes = list("abcdef")
    failed = {pair: "refused" for pair in itertools.combinations(nodes, 2) if set(pair) & {"a", "b"}}
    healthy = {pair: 48.0 for pair in itertools.combinations(nodes, 2) if pair not in failed}
    assert [each.names for each in culprits(failed, healthy)] == [("a",), ("b",)]


def test_stragglers_are_found_by_the_median_and_not_hidden_by_each_other() -> None:
    noise = random.Random(4)
    values = {f"n{number}": noise.gauss(100.0, 0.5) for number in range(100)}
    assert outliers(values, "min") == {}
    slow = values | dict.fromkeys(("n3", "n50", "n51", "n52"), 80.0) | {"n7": 60.0, "n9": 140.0}
    found = outliers(slow, "min")
    assert list(found) == ["n7", "n3", "n50", "n51", "n52"], "the worst first; a fast one is no straggler"
    assert found["n7"].loss == pytest.approx(0.4, abs=0.01)
    assert list(outliers(slow, "max")) == ["n9"]
    assert len(outliers(slow, None)) == 6
    equal = dict.fromkeys(values, 100.0)
    assert outliers(equal | {"n1": 99.0}, "min") == {}, "one per cent of an exact fleet troubles nobody"
    assert list(outliers(equal | {"n1": 97.0}, "min")) == ["n1"]
    assert outliers({"a": 1.0, "b": 2.0, "c": 100.0, "d": 1.0}, "max") == {}, "four tell nothing"


def test_of_few_pairs_a_link_far_below_the_median_is_named_and_an_unsteady_one_is_not() -> None:
    """Five of which one is a sixth: the spread alone would take it for noise."""
    three = {("a", "b"): 0.3, ("a", "c"): 0.03, ("b", "c"): 0.2}
    (found,) = culprits({}, three)
    assert (found.kind, found.names) == ("link", ("a", "c"))
    assert "0.03 GB/s, less than a third of the median, 0.2 GB/s" in found.because
    unsteady = {("a", "b"): 0.25, ("a", "c"): 0.55, ("b", "c"): 0.3, ("a", "d"): 0.4, ("b", "d"): 0.05}
    assert [found.names for found in culprits({}, unsteady)] == [("b", "d")]
    assert culprits({}, {("a", "b"): 0.2, ("a", "c"): 0.5}) == []
    assert culprits({}, {("a", "b"): 0.2}) == []
