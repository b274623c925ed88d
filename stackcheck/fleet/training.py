"""Training on several nodes, on this host. In: the nodes that are left. Out: a plan; what its nodes showed.

The tiny Llama of trainers/ trains as FSDP over all ranks, then as HSDP with one copy on each node; both write
checkpoints to the job's folder. A node that is lost in the middle leaves no report: it is named, and the
others go on from the newest checkpoint. The global batch stays, so the steps after it are those of the same
job.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, FiniteFloat, PositiveInt

from stackcheck.files.atomic import write_atomically
from stackcheck.files.border import Closed, Open
from stackcheck.fleet import gate
from stackcheck.fleet.job import Job

PLAN = "training.json"
PORT, PORTS = 29400, 100  # a port is free again only after a while, so the next try takes another
LIMIT_S = 900  # for the containers of one try, from the time when all are up
STEP_LIMIT_S = 120  # a step of the tiny job takes milliseconds; one that waits for a lost node never ends
STEPS, EVERY = 30, 5
RANKS_OF_A_CPU_NODE = 2  # so that HSDP has something to share inside a node


class TrainingPlan(Closed, strict=True):
    """One try: the nodes that take part, the first one being where the others meet it."""

    names: list[str]
    address: str
    port: int = PORT
    ranks: PositiveInt
    batch: PositiveInt
    steps: PositiveInt = STEPS
    every: PositiveInt = EVERY
    step_limit_s: PositiveInt = STEP_LIMIT_S
    limit_s: PositiveInt = LIMIT_S
    start_s: PositiveInt = gate.START_LIMIT_S
    checkpoints: str

    def flags(self, folder: str) -> dict[str, list[str]]:
        """Layout -> the flags of trainers/train.py, with the checkpoints in a folder of that name."""
        common = [
            *("--model", "llama", "--size", "tiny", "--data", "text", "--steps", str(self.steps)),
            *("--global-batch", str(self.batch), "--checkpoint-every", str(self.every)),
            *("--full-every", str(self.every * self.steps), "--phase-limit-s", str(self.step_limit_s)),
            *("--no-backend-check", "--no-preflight", "--parallel", "fsdp2"),
        ]
        copies = {"fsdp": 1, "hsdp": len(self.names)}
        return {
            layout: [*common, "--replicas", str(count), "--checkpoint", f"{folder}/{layout}"]
            for layout, count in copies.items()
        }


class Record(Open, strict=True):
    """The fields of the record of trainers/train.py that are judged."""

    first_step: int
    losses: list[FiniteFloat]
    problems: list[str]
    ranks_agree: bool


class TrainingReport(Closed, strict=True):
    """What a node says of a try: rank 0 its records, the others only that they came to the end."""

    error: str | None = None
    records: dict[str, Record] = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A node that was lost while it trained, why this is known, and how far the checkpoints were."""

    node: str
    because: str
    at_step: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Training:
    """How training on several nodes went."""

    nodes: tuple[str, ...]
    ranks: int  # of each node
    records: Mapping[str, Record]  # layout -> the record of the last try
    lost: tuple[Lost, ...] = ()
    errors: tuple[str, ...] = ()  # why it is not good, apart from lost nodes

    @property
    def is_good(self) -> bool:
        """Whether every node and every layout came to the end."""
        return not self.lost and not self.errors

    def as_json(self) -> dict[str, Any]:
        """For fleet.json."""
        return {
            "nodes": list(self.nodes),
            "ranks_of_a_node": self.ranks,
            "lost": [dataclasses.asdict(lost) for lost in self.lost],
            "errors": list(self.errors),
            "layouts": {name: record.model_dump() for name, record in self.records.items()},
        }


def make(
    job: Job,
    names: Sequence[str],
    addresses: Mapping[str, str],
    *,
    number: int = 0,
    before: TrainingPlan | None = None,
) -> tuple[Job, TrainingPlan]:
    """One try on these nodes, and its plan. Pure.

    The batch of the first try can be divided among all nodes and among all but one. When more are lost, some
    of the rest do not take part, so that the number that does divides it.
    """
    ranks = job.devices or RANKS_OF_A_CPU_NODE
    batch = before.batch if before else ranks * math.lcm(len(names), max(1, len(names) - 1))
    fitting = next(count for count in range(len(names), 0, -1) if batch % (ranks * count) == 0)
    chosen = list(names)[:fitting]
    same = before.model_dump(exclude={"names", "address", "port"}) if before else {"ranks": ranks}
    plan = TrainingPlan(
        **same
        | {
            "names": chosen,
            "address": addresses[chosen[0]],
            "port": PORT + number % PORTS,
            "batch": batch,
            "checkpoints": str(job.folder / "checkpoints"),
        }
    )
    changes = {"id": f"{job.id}-training-{number}", "nodes": len(chosen), "stage": "training", "array": False}
    return job.model_copy(update=changes | {"limit_s": plan.start_s + plan.limit_s + gate.AROUND_S}), plan


def save(job: Job, plan: TrainingPlan) -> None:
    """Write the plan where the nodes read it."""
    write_atomically(job.folder / PLAN, (plan.model_dump_json(indent=1).encode(),))


def folder_of(attempt: Path) -> Path:
    """Where the nodes of a try write."""
    return attempt / "training"


def report_file(attempt: Path, name: str) -> Path:
    """Where a node writes its report."""
    return folder_of(attempt) / f"{name}.json"


def read(attempt: Path, plan: TrainingPlan) -> dict[str, TrainingReport | None]:
    """Node -> its report; the error with which it refused the job; None if it left neither."""
    refused = gate.refusals(attempt, plan.names, folder_of(attempt))
    found = {name: gate.report(TrainingReport, report_file(attempt, name)) for name in plan.names}
    return found | {name: TrainingReport(error=why) for name, why in refused.items() if not found[name]}


def checkpointed(plan: TrainingPlan) -> dict[str, int]:
    """Layout -> the step of its newest complete checkpoint, of those that have one."""
    from pathlib import Path

    found = {}
    for layout in plan.flags(""):
        marked = Path(plan.checkpoints, layout).glob("step_????????/COMPLETE")
        steps = [int(path.parent.name.partition("_")[2]) for path in marked]
        if steps:
            found[layout] = max(steps)
    return found


def words(at_step: Mapping[str, int]) -> str:
    """How far the checkpoints are: `fsdp at step 5, hsdp at step 10`."""
    return ", ".join(f"{layout} at step {step}" for layout, step in at_step.items()) or "none"


def judge(plan: TrainingPlan, reports: Mapping[str, TrainingReport | None], lost: Sequence[Lost]) -> Training:
    """What the nodes of the last try showed. Pure."""
    told = {name: report for name, report in reports.items() if report}
    errors = [f"{name}: {report.error}" for name, report in told.items() if report.error]
    first = told.get(plan.names[0], TrainingReport())
    for layout in plan.flags(""):
        record = first.records.get(layout)
        if record is None:
            errors += [] if errors else [f"{layout}: no record"]
            continue
        errors += [f"{layout}: {problem}" for problem in record.problems]
        if not record.ranks_agree:
            errors.append(f"{layout}: the ranks do not hold the same weights")
        if record.first_step + len(record.losses) != plan.steps:
            errors.append(
                f"{layout}: ended after step {record.first_step + len(record.losses)} of {plan.steps}"
            )
    return Training(
        nodes=tuple(plan.names),
        ranks=plan.ranks,
        records=first.records,
        lost=tuple(lost),
        errors=tuple(errors),
    )


def parse_lines(lines: Sequence[str]) -> TrainingReport:
    """The records in the last line of rank 0 that holds them."""
    for line in reversed(lines):
        if line.startswith("{"):
            try:
                return TrainingReport.model_validate({"records": json.loads(line)["records"]})
            except (ValueError, KeyError, TypeError):
                continue
    return TrainingReport(error="the trainer printed no record; it ended with: " + " | ".join(lines[-3:]))
