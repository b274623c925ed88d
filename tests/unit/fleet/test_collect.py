"""What nodes left is judged here: one file for each node, believed in nothing that can be compared."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import small_fleet
from small_checkout import CHECKS, CPU_STACK, FakeEngine, call
from stackcheck.fleet import collect, run
from stackcheck.fleet.engines import JobState
from stackcheck.fleet.follow import JobPatience, follow
from stackcheck.fleet.job import Job, NodeState
from stackcheck.fleet.run import FleetRun
from stackcheck.history.history import open_history
from stackcheck.history.runs import Query
from stackcheck.suite.subject import Subject

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")

HURRY = JobPatience(poll_s=0, queue_s=None, start_s=600, settle_s=0)
GEMM = "test_kernels.py::test_gemm"


def silent(_line: str) -> None:
    pass


@pytest.fixture
def built(small_checkout: Path, fake_engine: FakeEngine, capsys) -> Path:  # noqa: ARG001
    assert call(capsys, "build", CPU_STACK).code == 0
    return small_checkout


def judged(
    job: Job, subject: Subject, engine: small_fleet.SteadyEngine | None = None, **keep: Any
) -> FleetRun:
    engine = engine or steady(job)
    return run.complete(job, "7", subject, engine, patience=HURRY, history=keep.get("history"), report=silent)


def steady(job: Job) -> small_fleet.SteadyEngine:
    allocated = JobState(phase="running", word="RUNNING", nodes=small_fleet.names(job.nodes))
    return small_fleet.SteadyEngine(allocated)


def reasons(done: FleetRun, rank: int) -> str:
    (node,) = (node for node in done.nodes if node.rank == rank)
    return f"{node.status}: " + " | ".join(node.reasons)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_processes_judge_as_one_does(built, monkeypatch):
    job, subject = small_fleet.make_job(built, 40)
    for rank in range(39):
        small_fleet.leave(
            job, rank, *(((GEMM, "failed"),) if rank == 7 else ()), seconds=9.0 if rank == 30 else 1.0
        )
    alone = judged(job, subject).as_json()
    monkeypatch.setattr(collect, "FEWEST_FOR_PROCESSES", 2)
    history = open_history(built)
    assert judged(job, subject, history=history).as_json() == alone
    assert [each["node"] for each in alone["stragglers"]] == ["node0030"]
    assert len(history.runs(Query(limit=99))) == 39, "kept by one process"
    assert json.loads((job.folder / "fleet.json").read_text()) == json.loads(json.dumps(alone))


def test_a_process_with_threads_is_never_copied_to_judge(built, monkeypatch):
    """A thread that watches Kubernetes may hold a lock, which a copy of the process would wait for."""
    job, subject = small_fleet.make_job(built, 4)
    for rank in range(4):
        small_fleet.leave(job, rank)
    monkeypatch.setattr(collect, "FEWEST_FOR_PROCESSES", 2)
    copies: list[int] = []
    os.register_at_fork(after_in_parent=lambda: copies.append(1))
    over = threading.Event()
    watching = threading.Thread(target=over.wait)
    watching.start()
    try:
        assert judged(job, subject).status == "PASSED"
    finally:
        over.set()
        watching.join()
    assert not copies


def test_what_a_node_says_of_itself_is_compared(built):
    job, subject = small_fleet.make_job(built, 12, devices=1)
    folders = [small_fleet.leave(job, rank) for rank in range(12)]
    told = json.loads((folders[0] / "run.json").read_text())
    other = "sha256:" + "e" * 64
    edit(folders[0] / "result.json", image=told["image"] | {"config_digest": other})
    edit(folders[1] / "result.json", inputs=told["inputs"] | {"suites": other})
    edit(folders[2] / "result.json", run_id="ffffffff")
    edit(folders[3] / "result.json", started="2026-01-02T03:04:05Z", finished="2026-01-02T03:05:05Z")
    (folders[4] / "result.json").write_text('{"schema": 1')
    (folders[5] / "result.json").unlink()
    (folders[5] / "result.json").symlink_to(folders[6] / "result.json")
    edit(folders[7] / "host.json", devices=[])
    NodeState(rank=8, node="node0008", state="failed", code=4, error="no daemon answers").write(folders[8])
    document = json.loads((folders[9] / "result.json").read_text())
    edit(folders[9] / "result.json", checks=document["checks"][:-1])
    edit(folders[10] / "result.json", tier="soak")
    (folders[11] / "state.json").write_text("{")
    done = judged(job, subject)
    wrong = {
        0: "image in result.json differs",
        1: "inputs in result.json differs",
        2: "belongs to a different run",
        3: "the times in result.json lie outside the run",
        4: "not valid JSON",
        5: "cannot be read",
        7: "host in result.json differs",
        8: "no daemon answers",
        9: f"{CHECKS[-1]}: no result",
        10: "tier in result.json differs",
        11: "never started",
    }
    for rank, words in wrong.items():
        assert reasons(done, rank).startswith("FAILED: "), rank
        assert words in reasons(done, rank), rank
    assert reasons(done, 6) == "PASSED: "


def test_a_node_that_took_two_ranks_counts_once(built):
    job, subject = small_fleet.make_job(built, 4, array=True)
    for rank in range(4):
        small_fleet.leave(job, rank)
    for rank, state in ((2, "ended"), (3, "failed")):
        NodeState(rank=rank, node="node0001", state=state, error="own words").write(
            job.attempt(0) / str(rank)
        )  # type: ignore[arg-type]
    done = judged(job, subject)
    assert [node.status for node in sorted(done.nodes, key=lambda node: node.rank)] == [
        *["PASSED"] * 2,
        *["FAILED"] * 2,
    ]
    assert "node0001 was tested as rank 1 too" in reasons(done, 2)
    assert "own words" in reasons(done, 3)


def test_a_node_that_lost_a_gpu_has_failed(built):
    job, subject = small_fleet.make_job(built, 1, devices=2)
    small_fleet.leave(job, 0)
    assert "the node shows 1 devices, the job asked for 2" in reasons(judged(job, subject), 0)


def test_a_selection_of_checks_measures_and_never_passes(built):
    job, subject = small_fleet.make_job(built, 2, only="gemm")
    small_fleet.leave(job, 0)
    small_fleet.leave(job, 1, (GEMM, "failed"))
    done = judged(job, subject)
    assert [(node.rank, node.status) for node in done.nodes] == [(1, "FAILED"), (0, "MEASURED")]


def test_a_job_is_followed_until_nothing_more_can_come(built):
    job, _ = small_fleet.make_job(built, 3)
    lines: list[str] = []
    names = small_fleet.names(3)
    first = JobState(phase="waiting", word="PENDING", reason="Priority")
    running = JobState(phase="running", word="RUNNING", nodes=names)
    again = JobState(phase="running", word="RUNNING", nodes=names, attempt=1)
    engine = small_fleet.SteadyEngine(first, running, again, again)
    engine.states.pop()  # it never ends by itself
    engine.down = {names[2]}
    for rank in range(2):
        small_fleet.leave(job, rank)
        (job.attempt(0) / str(rank)).rename(job.attempt(0).with_name(f"move-{rank}"))
    job.attempt(1).mkdir()
    for rank in range(2):
        (job.folder / f"move-{rank}").rename(job.attempt(1) / str(rank))
    found = follow(job, "7", engine, patience=HURRY, report=lines.append)
    assert engine.told == ["cancel 7"], "what is left is ended"
    assert found.state.attempt == 1
    assert "down: no power" in found.missing(2)
    text = "\n".join(lines)
    assert "job 7: PENDING (Priority)" in text
    assert "started again, attempt 1" in text
    assert "node0001: ended (2 of 3 nodes have ended)" in text


@pytest.mark.parametrize("known", range(4))
def test_nodes_that_began_and_ended_between_two_looks_have_their_racks(known, built):
    job, _ = small_fleet.make_job(built, 3)
    word = JobState(phase="running", word="RUNNING", nodes=small_fleet.names(known))
    for rank in range(3):
        small_fleet.leave(job, rank)
    found = follow(job, "7", small_fleet.SteadyEngine(word), patience=HURRY, report=silent)
    assert [found.facts_of(rank).rack for rank in range(3)] == ["rack0"] * 3


def test_a_job_without_nodes_and_a_node_without_a_word_have_their_time(built):
    job, _ = small_fleet.make_job(built, 2)
    waiting = small_fleet.SteadyEngine(JobState(phase="waiting", word="PENDING"))
    waiting.states.pop()
    soon = JobPatience(poll_s=0, queue_s=0, start_s=0, settle_s=0)
    assert "no nodes within 0 s" in follow(job, "7", waiting, patience=soon, report=silent).missing(0)
    assert waiting.told == ["cancel 7"]
    running = JobState(phase="running", word="RUNNING", nodes=small_fleet.names(2))
    engine = small_fleet.SteadyEngine(running, running)
    engine.states.pop()
    small_fleet.leave(job, 0)
    found = follow(job, "8", engine, patience=soon, report=silent)
    assert found.missing(1) == "it said nothing in the time that a node has to start"

    def give_up(_names: object) -> Any:
        raise KeyboardInterrupt

    engine.nodes = give_up  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        follow(job, "9", engine, patience=HURRY, report=silent)
    assert engine.told[-1] == "cancel 9"


def test_ctrl_c_pressed_twice_still_cancels_the_job(built):
    class Impatient(small_fleet.SteadyEngine):
        def nodes(self, _names: object) -> Any:
            signal.raise_signal(signal.SIGINT)

        def cancel(self, job_id: str) -> None:
            signal.raise_signal(signal.SIGINT)
            super().cancel(job_id)

    job, _ = small_fleet.make_job(built, 1)
    engine = Impatient(JobState(phase="running", word="RUNNING", nodes=small_fleet.names(1)))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            follow(job, "9", engine, patience=HURRY, report=silent)
    finally:
        signal.signal(signal.SIGINT, before)
    assert engine.told == ["cancel 9"]


def test_a_thousand_nodes_are_judged_in_seconds_with_their_racks_and_stragglers(built, capsys):
    from stackcheck.cli import fleet_outcome

    job, subject = small_fleet.make_job(built, 1000)
    for rank in range(1000):
        failed = ((GEMM, "failed"),) if rank in {70, 71, 500} else ()
        small_fleet.leave(job, rank, *failed, seconds=0.5 if rank == 123 else 0.25 + rank % 7 * 1e-4)
    (job.attempt(0) / "999" / "result.json").unlink()
    start = time.process_time()
    done = judged(job, subject)
    assert time.process_time() - start < 30
    assert [node.rank for node in done.nodes[:5]] == [500, 70, 71, 999, 123]
    assert [(item.node, item.metric) for item in done.stragglers] == [("node0123", "step_seconds")]
    fleet_outcome.show(done)
    shown = capsys.readouterr().out
    assert "… and 975 more nodes that passed: --json has all" in shown
    lines = shown.splitlines()
    assert lines[2].split()[:4] == ["node0070", "rack7", "all", "FAILED"]
    assert [line.split() for line in lines if line.startswith("rack7 ")] == [["rack7", "all", "10", "2", "0"]]
    assert "996 PASSED" in shown
