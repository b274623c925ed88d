"""Training on several nodes: the plan of each try, and what the reports of its nodes say."""

import json
from pathlib import Path
from typing import Any

import pytest

import small_fleet
from stackcheck.fleet import link_stage, run, training
from stackcheck.fleet.job import Job
from stackcheck.fleet.run import FleetRun
from stackcheck.fleet.training import Lost, Record, TrainingPlan, TrainingReport

NAMES = ("a", "b", "c")
ADDRESSES = {name: f"10.0.0.{number}" for number, name in enumerate("abcdef")}


def first(root: Path) -> tuple[Job, TrainingPlan]:
    return training.make(small_fleet.bare_job(root), NAMES, ADDRESSES)


def record(**changes: Any) -> Record:
    fields = {"first_step": 0, "losses": [1.0] * training.STEPS, "problems": [], "ranks_agree": True}
    return Record(**fields | changes)


def reports(**changes: Any) -> dict[str, TrainingReport | None]:
    told: dict[str, TrainingReport | None] = {name: TrainingReport() for name in NAMES}
    told["a"] = TrainingReport(records={"fsdp": record(), "hsdp": record(**changes)})
    return told


def test_the_rest_keeps_the_batch_and_meets_at_its_own_first_node(tmp_path):
    job, plan = first(tmp_path)
    assert (job.stage, job.nodes, plan.ranks, plan.batch) == ("training", 3, 2, 12)
    flags = plan.flags("/c")
    assert flags["hsdp"][flags["hsdp"].index("--replicas") + 1] == "3"
    assert flags["fsdp"][-1] == "/c/fsdp"
    again, rest = training.make(small_fleet.bare_job(tmp_path), NAMES[1:], ADDRESSES, number=1, before=plan)
    assert (rest.names, rest.address, rest.batch) == (["b", "c"], ADDRESSES["b"], plan.batch)
    assert (again.id != job.id, rest.port != plan.port) == (True, True)
    assert rest.checkpoints == plan.checkpoints, "the same folder, or nothing would be resumed"
    more = tuple("abcdef")
    _, wide = training.make(small_fleet.bare_job(tmp_path), more, ADDRESSES)
    for count in range(6, 0, -1):
        _, left = training.make(small_fleet.bare_job(tmp_path), more[:count], ADDRESSES, before=wide)
        assert wide.batch % (left.ranks * len(left.names)) == 0
        assert len(left.names) == count or count == 4, "60 samples are not for eight ranks"


def test_the_newest_complete_checkpoint_of_each_layout_is_what_the_rest_goes_on_from(tmp_path):
    _, plan = first(tmp_path)
    assert training.checkpointed(plan) == {}
    for name in ("fsdp/step_00000005", "fsdp/step_00000010", "hsdp/step_00000005"):
        folder = Path(plan.checkpoints) / name
        folder.mkdir(parents=True)
        (folder / "COMPLETE").touch()
    (Path(plan.checkpoints) / "fsdp" / "step_00000015.partial").mkdir()
    assert training.checkpointed(plan) == {"fsdp": 10, "hsdp": 5}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"losses": [1.0] * 7}, "hsdp: ended after step 7 of 30"),
        ({"ranks_agree": False}, "hsdp: the ranks do not hold the same weights"),
        ({"problems": ["the loss rose"]}, "hsdp: the loss rose"),
    ],
)
def test_training_that_is_not_whole_is_not_good(tmp_path, changes, words):
    _, plan = first(tmp_path)
    assert training.judge(plan, reports(), ()).is_good
    found = training.judge(plan, reports(**changes), ())
    assert (found.is_good, found.errors) == (False, (words,))


def test_a_lost_node_an_error_and_missing_or_damaged_reports_are_told(tmp_path):
    job, plan = first(tmp_path)
    lost = Lost(node="c", because="down", at_step={"fsdp": 10})
    found = training.judge(plan, reports(), (lost,))
    assert (found.is_good, found.errors) == (False, ()), "the rest came to the end, the fleet did not"
    done = FleetRun(job=job, job_id="1", nodes=(), stragglers=(), training=found)
    assert done.status == "FAILED"
    assert done.as_json()["training"]["lost"] == [{"node": "c", "because": "down", "at_step": {"fsdp": 10}}]
    told = reports() | {"a": None, "b": TrainingReport(error="exit code 6")}
    assert training.judge(plan, told, ()).errors == ("b: exit code 6",)
    assert training.judge(plan, dict.fromkeys(NAMES), ()).errors == ("fsdp: no record",)

    path = training.report_file(tmp_path, "a")
    path.parent.mkdir()
    path.write_text("{")
    read = training.read(tmp_path, plan)
    assert "damaged" in str(read["a"] and read["a"].error)
    assert (read["b"], read["c"]) == (None, None)


def test_a_run_that_is_judged_again_keeps_its_bad_link_and_its_lost_node(tmp_path):
    job, plan = first(tmp_path)
    training.save(job, plan)
    job.save()
    for name, report in reports().items():
        path = training.report_file(job.attempt(0), name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if report and name != "c":
            path.write_text(report.model_dump_json())
    links, tried = link_stage.make(small_fleet.bare_job(tmp_path), NAMES, ADDRESSES)
    links.save()
    link_stage.save(links, tried)
    alone = FleetRun(job=small_fleet.bare_job(tmp_path), job_id="1", nodes=(), stragglers=())
    found = run._together_again(alone)
    assert found.links is not None
    assert found.training is not None
    assert len(found.links.failed) == 3, "no node left a report of its pairs"
    assert [lost.node for lost in found.training.lost] == ["c"]
    assert found.status == "FAILED"


def test_the_records_are_in_the_last_line_that_holds_them():
    line = json.dumps({"records": {"fsdp": record().model_dump() | {"more": 1}}, "preflight": None})
    assert training.parse_lines(["{no}", line, "a warning"]).records["fsdp"] == record()
    for broken in ('{"records": {"fsdp": {"losses": [NaN]}}}', "{}", "nothing"):
        assert "printed no record" in str(training.parse_lines([broken]).error)
