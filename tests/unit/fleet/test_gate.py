"""A node that starts slowly, or whose own stackcheck refused the job, is not a dead link or a lost node."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import small_fleet
from stackcheck.engine.client import RunSpec
from stackcheck.errors import ConfigurationError
from stackcheck.fleet import gate, link_stage, run, training
from stackcheck.fleet.follow import Followed
from stackcheck.fleet.job import NodeState
from stackcheck.fleet.link_stage import Report
from stackcheck.fleet.together import LinkNode, Torchrun, TrainNode
from stackcheck.fleet.training import TrainingReport

ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2"}
REFUSED = str(ConfigurationError("the image in the checkout is not the one of this job", got="sha256:f"))
IN_ONE_LINE = "the image in the checkout is not the one of this job; got: sha256:f"


class Clock:
    """Time passes only while somebody sleeps; then `happens` is told what time it is."""

    def __init__(self) -> None:
        self.now = 0.0
        self.happens: Callable[[float], object] = lambda _now: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.happens(self.now)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(gate, "time", made)
    return made


class TimedEngine:
    """An engine that kills a container when its time is over, and counts from the end of `on_start`."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.began: list[float] = []

    def run(self, spec: RunSpec) -> int:
        assert spec.on_start
        spec.on_start()
        self.began.append(self.clock.now)
        assert spec.on_line
        spec.on_line(Report(ranks=2, busbw_gb_per_s={"4096": 5.0}).model_dump_json())
        return 0


def refuse(attempt: Path) -> None:
    """Rank 1 says its last word before its container is up."""
    NodeState(rank=1, node="b", state="failed", code=2, error=REFUSED).write(attempt / "1")


class BareTorchrun(Torchrun):
    def _container(self, *asked: Any) -> RunSpec:
        _place, _ranks, _program, limit_s, _mounts = asked
        return RunSpec(image="x", command=("true",), timeout_s=limit_s)


def programs(job: Any, clock: Clock) -> Any:
    nothing: Any = None
    engine: Any = TimedEngine(clock)
    return BareTorchrun(job=job, subject=nothing, engine=engine, suite=job.folder)


def linked(root: Path, clock: Clock) -> tuple[Path, link_stage.LinkPlan, LinkNode]:
    job, plan = link_stage.make(small_fleet.bare_job(root), ("a", "b"), ADDRESSES)
    link_stage.save(job, plan)
    attempt = job.attempt(0)
    return attempt, plan, LinkNode(programs=programs(job, clock), name="a", attempt=attempt, report=print)


def told(attempt: Path) -> Report:
    return Report.model_validate_json(link_stage.report_file(attempt, 0, "a").read_bytes())


@pytest.mark.usefixtures("no_disk_flushes")
def test_the_time_of_a_group_begins_when_its_last_container_is_up(tmp_path, clock):
    attempt, plan, node = linked(tmp_path, clock)

    def starts_late(now: float) -> None:
        if now > gate.START_LIMIT_S - 20:
            gate.up_file(link_stage.folder_of(attempt, 0), "b").touch()
            link_stage.report_file(attempt, 0, "b").write_text(Report().model_dump_json())

    clock.happens = starts_late
    node.play()
    (began,) = node.programs.engine.began
    assert began == pytest.approx(gate.START_LIMIT_S - 20, abs=1), "the whole limit is left for the work"
    assert link_stage.read(attempt, plan, 1).is_good
    assert plan.start_s + plan.limit_s < node.programs.job.limit_s, "the time of the whole job allows for it"


@pytest.mark.usefixtures("no_disk_flushes")
def test_a_node_that_never_comes_up_is_named_and_one_that_refused_is_not_waited_for(tmp_path, clock):
    attempt, plan, node = linked(tmp_path, clock)
    node.play()
    assert told(attempt).error == "waited for b (not up within 300 s)"
    assert node.programs.engine.began == []
    assert link_stage.read(attempt, plan, 1).failed == {("a", "b"): "b: left no report"}

    refuse(attempt)
    before = clock.now
    node.play()
    assert clock.now - before <= 2 * gate.LOOK_S
    assert told(attempt).error == f"waited for b ({IN_ONE_LINE})"
    assert link_stage.read(attempt, plan, 1).failed == {("a", "b"): f"b: {IN_ONE_LINE}"}, "the cause"


@pytest.mark.usefixtures("no_disk_flushes")
def test_training_tells_the_error_of_a_node_that_refused_and_resumes_nothing_without_it(tmp_path, clock):
    job, plan = training.make(small_fleet.bare_job(tmp_path), ("a", "b"), ADDRESSES)
    training.save(job, plan)
    attempt = job.attempt(0)
    node = TrainNode(programs=programs(job, clock), name="a", attempt=attempt, report=print)
    refuse(attempt)
    node.play()
    reports = training.read(attempt, plan)
    assert reports["b"] == TrainingReport(error=IN_ONE_LINE)
    assert run.lost_nodes(plan, Followed(), reports) == []
    assert training.judge(plan, reports, ()).errors == (
        f"a: waited for b ({IN_ONE_LINE})",
        f"b: {IN_ONE_LINE}",
    )

    gate.up_file(training.folder_of(attempt), "b").touch()  # it trained: its engine died later
    (lost,) = run.lost_nodes(plan, Followed(), training.read(attempt, plan))
    assert lost.node == "b"
