"""Rounds that try every link, who is to blame, and who stands out."""

import itertools
import json
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import small_fleet
from stackcheck.fleet import link_stage
from stackcheck.fleet.job import Job
from stackcheck.fleet.link_stage import EVERY_PAIR, LinkPlan, Report, culprits, rounds
from stackcheck.fleet.spread import outliers


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16, 33])
def test_every_link_is_tried_once_in_few_rounds(count):
    nodes = [f"n{number:02d}" for number in range(count)]
    found = rounds(nodes)
    assert len(found) == (count if count % 2 else count - 1)
    for each in found:
        ends = [name for pair in each for name in pair]
        assert len(ends) == len(set(ends)), "a node in two pairs at once"
    assert sorted(pair for each in found for pair in each) == list(itertools.combinations(nodes, 2))


leaf_sizes = st.lists(st.integers(1, 40), min_size=2, max_size=30).filter(
    lambda sizes: sum(sizes) > EVERY_PAIR
)


def fleet(sizes: list[int], seed: int = 0) -> tuple[list[str], dict[str, str]]:
    """Nodes of leaves in any order, and the leaf of each."""
    racks = {f"n{leaf}-{number}": f"leaf{leaf}" for leaf, size in enumerate(sizes) for number in range(size)}
    nodes = list(racks)
    random.Random(seed).shuffle(nodes)
    return nodes, racks


@settings(max_examples=60, deadline=None)
@given(sizes=leaf_sizes, seed=st.integers(0, 99))
def test_a_large_fleet_meets_in_its_leaves_and_between_them_in_few_rounds(sizes, seed):
    nodes, racks = fleet(sizes, seed)
    found = rounds(nodes, racks)
    for each in found:
        ends = [name for pair in each for name in pair]
        assert len(ends) == len(set(ends)), "a node in two pairs at once"
    pairs = [frozenset(pair) for each in found for pair in each]
    assert len(pairs) == len(set(pairs)), "a pair is tried twice"
    assert all(len(pair) == 2 for pair in pairs)
    assert len(found) <= 2 * (len(nodes).bit_length() + 2)
    meets = Counter((name, len({racks[end] for end in pair}) == 1) for pair in pairs for name in pair)
    for name, leaf in racks.items():
        size = sizes[int(leaf.removeprefix("leaf"))]
        assert meets[name, True] >= min(size - 1, (size - 1).bit_length()), "too few pairs in its leaf"
        if 2 * size <= len(nodes):
            assert meets[name, False] >= 2, "a node that never leaves its leaf"


@pytest.mark.parametrize("sizes", [[32] * 8, [7, 20, 33, 14], [1] * 50, [16] * 60])
def test_a_bad_part_of_a_large_fleet_is_named_and_nothing_else(sizes):
    nodes, racks = fleet(sizes)
    pairs = [pair for each in rounds(nodes, racks) for pair in each]
    chosen = random.Random(1)
    node, link = chosen.choice(nodes), chosen.choice(pairs)
    broken = {("node", (node,)): [pair for pair in pairs if node in pair], ("link", link): [link]}
    if max(sizes) > 1:
        leaf = racks[node]
        crossing = [pair for pair in pairs if (racks[pair[0]] == leaf) != (racks[pair[1]] == leaf)]
        broken["switch", (leaf,)] = crossing
    for blame, bad in broken.items():
        healthy = {pair: 48.0 for pair in pairs if pair not in set(bad)}
        usual = sum(racks[a] != racks[b] for a, b in healthy) > len(bad)  # else no median shows what is slow
        slow = [({}, healthy | dict.fromkeys(bad, 9.0))] if usual else []
        for failed, measured in [(dict.fromkeys(bad, "time-out"), healthy), *slow]:
            found = culprits(failed, measured, racks)
            assert [(each.kind, each.names) for each in found] == [blame]


def test_ten_thousand_nodes_without_known_leaves_take_16_rounds():
    assert len(rounds([f"n{number}" for number in range(10_000)])) == 16


def speeds(nodes: list[str], bad: dict[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    noise = random.Random(3)
    return {pair: bad.get(pair, noise.gauss(48.0, 0.3)) for pair in itertools.combinations(nodes, 2)}


def test_a_slow_link_is_named_and_neither_of_its_nodes():
    nodes = list("abcdefgh")
    (found,) = culprits({}, speeds(nodes, {("b", "f"): 30.0}))
    assert (found.kind, found.names) == ("link", ("b", "f"))
    assert "worse than the median of 28" in found.because


def test_stragglers_are_found_by_the_median_and_not_hidden_by_each_other():
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


def test_of_few_pairs_a_link_far_below_the_median_is_named_and_an_unsteady_one_is_not():
    """Five of which one is a sixth: the spread alone would take it for noise."""
    three = {("a", "b"): 0.3, ("a", "c"): 0.03, ("b", "c"): 0.2}
    (found,) = culprits({}, three)
    assert (found.kind, found.names) == ("link", ("a", "c"))
    assert "0.03 GB/s, less than a third of the median, 0.2 GB/s" in found.because
    unsteady = {("a", "b"): 0.25, ("a", "c"): 0.55, ("b", "c"): 0.3, ("a", "d"): 0.4, ("b", "d"): 0.05}
    assert [found.names for found in culprits({}, unsteady)] == [("b", "d")]
    assert culprits({}, {("a", "b"): 0.2, ("a", "c"): 0.5}) == []
    assert culprits({}, {("a", "b"): 0.2}) == []


# The plan of the links, and what its reports say.

NAMES = tuple("abcdef")
ADDRESSES = {name: f"10.0.0.{number}" for number, name in enumerate(NAMES)}


def planned(root: Path) -> tuple[Job, LinkPlan]:
    return link_stage.make(small_fleet.bare_job(root), NAMES, ADDRESSES)


def write(attempt: Path, plan: LinkPlan, changes: dict[frozenset[str], Report]) -> None:
    """A healthy report of every group, except `changes`, which the first node of a group reports."""
    for number, groups in enumerate(plan.rounds):
        for group in groups:
            healthy = Report(ranks=len(group.names), busbw_gb_per_s={"4096": 0.1, "16777216": 5.0})
            for rank, name in enumerate(group.names):
                told = changes.get(frozenset(group.names), healthy) if rank == 0 else Report()
                path = link_stage.report_file(attempt, number, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(told.model_dump_json())


def test_pairs_come_before_the_whole_set_and_no_two_groups_of_a_round_share_a_port(tmp_path):
    job, plan = planned(tmp_path)
    assert (job.id, job.stage, job.nodes) == ("0-links", "links", 6)
    assert [len(groups) for groups in plan.rounds] == [3, 3, 3, 3, 3, 1]
    assert plan.rounds[-1][0].names == list(NAMES)
    for groups in plan.rounds:
        assert len({group.port for group in groups}) == len(groups)
        assert all(group.address == ADDRESSES[group.names[0]] for group in groups)
    link_stage.save(job, plan)
    assert LinkPlan.model_validate_json((job.folder / link_stage.PLAN).read_bytes()) == plan
    _, two = link_stage.make(job, ("a", "b"), ADDRESSES)
    assert [len(groups) for groups in two.rounds] == [1], "of two nodes the pair is the whole set"


def test_a_bad_link_and_a_bad_node_are_named_from_the_reports(tmp_path):
    _, plan = planned(tmp_path)
    slow = Report(ranks=2, busbw_gb_per_s={"16777216": 2.0})
    write(tmp_path, plan, {frozenset("be"): slow})
    found = link_stage.read(tmp_path, plan, 1)
    assert [(each.kind, each.names) for each in found.culprits] == [("link", ("b", "e"))]
    assert (found.whole_gb_per_s, found.is_good) == (5.0, False)

    hung = {frozenset((name, "c")): Report(error="did not end within 120 s") for name in "abdef"}
    write(tmp_path, plan, hung)
    found = link_stage.read(tmp_path, plan, 1)
    assert [(each.kind, each.names) for each in found.culprits] == [("node", ("c",))]
    assert len(found.failed) == 5

    write(tmp_path, plan, {})
    assert link_stage.read(tmp_path, plan, 1).is_good
    json.dumps(link_stage.read(tmp_path, plan, 1).as_json())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "left no report"),
        ("{", "left a damaged report"),
        ('{"ranks": 2, "busbw_gb_per_s": {"1": NaN}}', "left a damaged report"),
        (Report(ranks=1, busbw_gb_per_s={"1": 5.0}).model_dump_json(), "1 ranks worked together, expected 2"),
        (Report(ranks=2, wrong=["rank 1: 3 of 9 elements"]).model_dump_json(), "3 of 9 elements"),
        (Report(ranks=2).model_dump_json(), "no speed was measured"),
        (Report(error="exit code 1: refused").model_dump_json(), "a: exit code 1: refused"),
    ],
)
def test_a_pair_without_a_good_report_has_failed(tmp_path, text, words):
    job, _ = planned(tmp_path)
    _, plan = link_stage.make(job, ("a", "b"), ADDRESSES)
    write(tmp_path, plan, {})
    path = link_stage.report_file(tmp_path, 0, "a")
    path.unlink()
    if text is not None:
        path.write_text(text)
    found = link_stage.read(tmp_path, plan, 1)
    assert words in found.failed["a", "b"]
    assert not found.is_good


def test_the_report_is_the_last_line_that_is_one():
    line = Report(ranks=2, busbw_gb_per_s={"1": 5.0}).model_dump_json()
    assert link_stage.parse_line(["{not this}", line, "a warning of torch"]).ranks == 2
    assert "printed no report" in str(link_stage.parse_line(["a", "b"]).error)
