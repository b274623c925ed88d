"""The plan of the links, and what its reports say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import small_fleet
from stackcheck.fleet import link_stage
from stackcheck.fleet.job import Job
from stackcheck.fleet.link_stage import LinkPlan, Report

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


def test_pairs_come_before_the_whole_set_and_no_two_groups_of_a_round_share_a_port(tmp_path: Path) -> None:
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


def test_a_bad_link_and_a_bad_node_are_named_from_the_reports(tmp_path: Path) -> None:
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
def test_a_pair_without_a_good_report_has_failed(tmp_path: Path, text: str | None, words: str) -> None:
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


def test_the_report_is_the_last_line_that_is_one() -> None:
    line = Report(ranks=2, busbw_gb_per_s={"1": 5.0}).model_dump_json()
    assert link_stage.parse_line(["{not this}", line, "a warning of torch"]).ranks == 2
    assert "printed no report" in str(link_stage.parse_line(["a", "b"]).error)
