"""What nodes of a fleet leave, made here: a job on a small checkout, and folders of healthy nodes."""

import datetime as dt
import json
from pathlib import Path
from typing import Any

import result_files
from small_checkout import CHECKS, CPU_STACK
from stackcheck import vendors
from stackcheck.fleet.engines import JobState, NodeFacts
from stackcheck.fleet.job import Job, NodeState, new_job, read_state
from stackcheck.suite.subject import Subject

JOB_ID = "0123abcd"
DIGEST = "sha256:" + "a" * 64


def make_job(checkout: Path, nodes: int, **changes: Any) -> tuple[Job, Subject]:
    """A job of the cpu stack, whose image is in the checkout already."""
    job, subject = new_job(CPU_STACK, checkout, job_id=JOB_ID, nodes=nodes, **changes)
    job.save()
    return job, subject


def bare_job(root: Path) -> Job:
    """A job without an image or a file: for plans."""
    return Job(
        id="0",
        name="cpu-x",
        root=str(root),
        config_digest=DIGEST,
        manifest_digest=DIGEST,
        reference="x:1",
        stack_id=None,
        vendor="cpu",
        tier="smoke",
        inputs={},
        nodes=9,
        limit_s=60,
        created=dt.datetime.now(dt.UTC),
    )


def leave(
    job: Job, rank: int, *changes: tuple[str, str], seconds: float | None = None, **broken: Any
) -> Path:
    """What a node leaves: healthy, but for the outcomes in `changes` and the fields in `broken`."""
    folder, name = job.attempt(0) / str(rank), f"node{rank:04d}"
    host = vendors.host("cpu").as_json()
    told = {
        "run_id": f"{rank:032x}",
        "tier": job.tier,
        "stack_id": job.stack_id,
        "image": {
            "reference": job.reference,
            "config_digest": job.config_digest,
            "manifest_digest": job.manifest_digest,
        },
        "inputs": job.inputs,
        "host": host,
        "interpreter": result_files.INTERPRETER,
    }
    outcomes = dict(changes)
    checks = [result_files.check(check, outcomes.get(check, "passed"), devices=[]) for check in CHECKS]
    if seconds is not None:
        told_time = result_files.metric(
            "step_seconds", seconds, unit="s", direction=None, bound=None, verdict="recorded"
        )
        checks[0]["metrics"] = [told_time]
    now = dt.datetime.now(dt.UTC).isoformat()
    document = (
        result_files.result(*checks, **result_files.told_again(told), started=now, finished=now) | broken
    )
    NodeState(rank=rank, node=name, state="ended").write(folder)
    (folder / "host.json").write_text(json.dumps(host))
    (folder / "run.json").write_text(json.dumps(told))
    (folder / "result.json").write_text(json.dumps(document))
    return folder


class SteadyEngine:
    """An engine whose job is over: only the files tell, and the racks have ten nodes each."""

    def __init__(self, *states: JobState) -> None:
        self.states = [*states, JobState(phase="ended", word="COMPLETED")]
        self.told: list[str] = []
        self.down: set[str] = set()

    def render(self, job: Job) -> str:
        return f"# {job.name}\n"

    def submit(self, job: Job) -> str:
        self.told.append(f"submit {job.nodes}")
        return "7"

    def state(self, _job_id: str) -> JobState:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def node_states(self, job: Job, attempt: int) -> dict[int, NodeState]:
        told = {rank: read_state(job.attempt(attempt) / str(rank)) for rank in range(job.nodes)}
        return {rank: state for rank, state in told.items() if state}

    def nodes(self, names: Any) -> dict[str, NodeFacts]:
        return {
            name: NodeFacts(
                name=name,
                rack=f"rack{int(name[-4:]) // 10}",
                partition="all",
                alive=name not in self.down,
                words="down: no power" if name in self.down else "allocated",
            )
            for name in names
        }

    def cancel(self, job_id: str) -> None:
        self.told.append(f"cancel {job_id}")

    def drain(self, node: str, reason: str) -> None:
        self.told.append(f"drain {node}: {reason}")


class LeavingEngine(SteadyEngine):
    """Nodes that run nothing and leave what nodes leave; check `failing` fails on the second."""

    failing = ""

    def __init__(self, **_chosen: object) -> None:
        super().__init__()
        self.states = [JobState(phase="running", word="RUNNING", nodes=names(3))]

    def submit(self, job: Job) -> str:
        for rank in range(job.nodes):
            leave(job, rank, *(((self.failing, "failed"),) if self.failing and rank == 1 else ()))
        return super().submit(job)


def names(count: int) -> tuple[str, ...]:
    return tuple(f"node{rank:04d}" for rank in range(count))
