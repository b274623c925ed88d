"""One run of a fleet from the job to its verdicts. In: a stack, an engine. Out: a `FleetRun`, in the history.

`build/fleet/<id>/` has the script, the files of every node, and fleet.json with every verdict.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import gc
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stackcheck.errors import ConfigurationError
from stackcheck.files.atomic import write_atomically
from stackcheck.fleet import collect, link_stage
from stackcheck.fleet.collect import Judge, NodeOutcome
from stackcheck.fleet.engines import JobState
from stackcheck.fleet.follow import Followed, follow
from stackcheck.fleet.job import FOLDER, Job, read_state, subject_of
from stackcheck.fleet.spread import Outlier, outliers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from stackcheck.fleet.engines import FleetEngine
    from stackcheck.fleet.follow import Patience
    from stackcheck.fleet.link_stage import Links
    from stackcheck.fleet.slurm import Slurm
    from stackcheck.history.history import History
    from stackcheck.suite.subject import Subject

FIT = ("PASSED", "MEASURED")
FEWEST_FOR_A_LINK = 2
JOB_ID = "job-id"  # the file that has the engine's name for a job
ORDER = ("FAILED", "UNFIT", "MEASURED", "PASSED")  # the outliers first


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A figure of one node that is worse than those of its fleet."""

    node: str
    check: str
    metric: str
    unit: str
    outlier: Outlier


@dataclass(frozen=True, kw_only=True)
class FleetRun:
    """What a fleet run came to.

    Attributes:
        job: What ran.
        job_id: The engine's name for it.
        nodes: The outcomes; who did not pass comes first, then who stands out.
        stragglers: Figures that stand out from the fleet, the worst first.
        links: What the pairs of nodes that passed showed; None if they were not tried.
    """

    job: Job
    job_id: str
    nodes: tuple[NodeOutcome, ...]
    stragglers: tuple[Straggler, ...]
    links: Links | None = None

    @property
    def status(self) -> str:
        """The worst of the nodes; FAILED too if a link is bad."""
        if self.links is not None and not self.links.is_good:
            return "FAILED"
        return min((node.status for node in self.nodes), key=ORDER.index)

    def as_json(self) -> dict[str, Any]:
        """The document `fleet.json`, which `--json` prints too."""
        return {
            "job": self.job.model_dump(mode="json"),
            "job_id": self.job_id,
            "status": self.status,
            "nodes": [_node_json(node) for node in self.nodes],
            "links": self.links.as_json() if self.links else None,
            "stragglers": [
                {
                    "node": item.node,
                    "check": item.check,
                    "metric": item.metric,
                    "unit": item.unit,
                    "value": item.outlier.value,
                    "median": item.outlier.median,
                    "z": round(item.outlier.z, 2),
                    "loss": round(item.outlier.loss, 4),
                }
                for item in self.stragglers
            ],
        }


def _node_json(node: NodeOutcome) -> dict[str, Any]:
    return {
        "rank": node.rank,
        "node": node.name,
        "rack": node.facts.rack,
        "partition": node.facts.partition,
        "engine_says": node.facts.words,
        "status": node.status,
        "reasons": list(node.reasons),
        "seconds": round(node.seconds, 1),
        "devices": [device.model for device in node.host.devices] if node.host else None,
        "checks": {check.id: check.outcome for check in node.result.checks} if node.result else {},
    }


def start(job: Job, engine: FleetEngine, report: Callable[[str], None]) -> str:
    """Write the job, and submit it; the engine's id."""
    job.save()
    job_id = engine.submit(job)
    (job.folder / JOB_ID).write_text(job_id, encoding="utf-8")
    report(f"job {job_id}: submitted, {job.nodes} nodes; files in {job.folder}")
    return job_id


def complete(  # what a run needs
    job: Job,
    job_id: str,
    subject: Subject,
    engine: FleetEngine,
    *,
    patience: Patience,
    history: History | None,
    report: Callable[[str], None],
) -> FleetRun:
    """Follow a submitted job to its end, judge every node here, and keep the runs."""
    followed = follow(job, job_id, engine, patience=patience, report=report)
    return judged(job, job_id, subject, followed, history=history)


def judged(
    job: Job, job_id: str, subject: Subject, followed: Followed, *, history: History | None
) -> FleetRun:
    """Judge what the nodes of a job left, here, and keep the runs."""
    judge = Judge(job=job, subject=subject, root=job.checkout)
    facts = {rank: followed.facts_of(rank) for rank in range(job.nodes)}
    attempt = job.attempt(followed.state.attempt)
    with _many_objects():
        found = collect.outcomes(judge, attempt, facts, followed.nodes, followed.missing)
        done = assembled(job, job_id, found)
    write_atomically(job.folder / "fleet.json", (json.dumps(done.as_json(), indent=1).encode(),))
    if history is not None:
        keep(done, history)
    return done


@contextlib.contextmanager
def _many_objects() -> Iterator[None]:
    """Without Python's cyclic collector: it halves the time of a thousand results, which have no cycles."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def with_links(done: FleetRun, slurm: Slurm, patience: Patience, report: Callable[[str], None]) -> FleetRun:
    """Try the links of the nodes that passed: pairs in rounds, then all of them.

    Raises:
        EngineError: Slurm does not answer.
    """
    names = [node.name for node in sorted(done.nodes, key=lambda node: node.rank) if node.status in FIT]
    if len(names) < FEWEST_FOR_A_LINK:
        report("links: not tried: fewer than two nodes passed alone")
        return done
    job, plan = link_stage.make(done.job, names, slurm.addresses(names))
    report(f"links: {len(names)} nodes that passed, rounds: {len(plan.rounds)}")
    link_stage.save(job, plan)
    job_id = start(job, slurm.on(names), report)
    followed = follow(job, job_id, slurm, patience=patience, report=report)
    found = link_stage.read(job.attempt(followed.state.attempt), plan, job.devices or 1)
    done = dataclasses.replace(done, links=found)
    write_atomically(done.job.folder / "fleet.json", (json.dumps(done.as_json(), indent=1).encode(),))
    return done


def again(root: Path, job_id: str, history: History | None) -> FleetRun:
    """Judge the newest attempt of a run once more, from its files alone.

    Raises:
        ConfigurationError: There is no such run in this checkout.
    """
    known = sorted(path.name for path in (root / FOLDER).glob("*") if path.is_dir())
    if job_id not in known:
        raise ConfigurationError(
            "there is no such fleet run",
            where=str(root / FOLDER),
            got=job_id,
            expected=", ".join(known) or "a run: there is none yet",
            next_step="stackcheck fleet run STACK --nodes N",
        )
    job = Job.load(root / FOLDER / job_id)
    subject = subject_of(job.name, root, job.vendor)
    attempts = [int(path.name.partition("-")[2]) for path in job.folder.glob("attempt-*")]
    newest = max(attempts, default=0)
    states = {rank: read_state(job.attempt(newest) / str(rank)) for rank in range(job.nodes)}
    followed = Followed(
        state=JobState(phase="ended", word="of an earlier time", attempt=newest),
        nodes={rank: state for rank, state in states.items() if state},
    )
    number = (job.folder / JOB_ID).read_text(encoding="utf-8") if (job.folder / JOB_ID).exists() else ""
    return judged(job, number, subject, followed, history=history)


def assembled(job: Job, job_id: str, found: Iterable[NodeOutcome]) -> FleetRun:
    """Put the outliers first. Pure."""
    nodes = list(found)
    slow = stragglers(nodes)
    worst = {item.node: item.outlier.z for item in reversed(slow)}
    nodes.sort(
        key=lambda node: (ORDER.index(node.status), -worst.get(node.name, 0.0), node.facts.rack, node.rank)
    )
    return FleetRun(job=job, job_id=job_id, nodes=tuple(nodes), stragglers=tuple(slow))


def stragglers(nodes: Iterable[NodeOutcome]) -> list[Straggler]:
    """Figures of finished nodes that stand out among machines of the same kind, the worst first. Pure."""
    figures: dict[tuple[str, ...], dict[str, float]] = {}
    directions: dict[tuple[str, ...], Any] = {}
    for node in nodes:
        machine = " + ".join(device.model for device in node.host.devices) if node.host else ""
        for check in node.result.checks if node.result else ():
            if check.outcome not in {"passed", "failed"}:
                continue
            for metric in check.metrics:
                if metric.value is None:
                    continue
                conditions = str(metric.conditions)  # equal suites write them in an equal order
                key = (check.id, metric.name, metric.unit, conditions, machine)
                figures.setdefault(key, {})[node.name] = metric.value
                directions[key] = metric.direction
    found = [
        Straggler(node=name, check=key[0], metric=key[1], unit=key[2], outlier=outlier)
        for key, values in figures.items()
        for name, outlier in outliers(values, directions[key]).items()
    ]
    return sorted(found, key=lambda item: -item.outlier.z)


def keep(done: FleetRun, history: History) -> None:
    """Append each node's run to the history; a node without a result has nothing to keep."""
    now = dt.datetime.now(dt.UTC)
    for node in done.nodes:
        if node.verdict is not None and node.host is not None:
            history.append(
                node.body,
                node.verdict.as_json(),
                node.host.as_json(),
                source=f"fleet {done.job.id}, node {node.name}, rack {node.facts.rack or '-'}",
                judged=now,
            )
