"""One run of a fleet from the job to its verdicts. In: a stack, an engine. Out: a `FleetRun`, in the history.

`build/fleet/<id>/` has the script, the files of every node, and fleet.json with every verdict.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from stackcheck.errors import ConfigurationError, StackcheckError
from stackcheck.files.atomic import write_atomically
from stackcheck.files.many_documents import without_collector
from stackcheck.fleet import collect, link_stage, training
from stackcheck.fleet.collect import Judge, Keep, MetricKey, NodeOutcome
from stackcheck.fleet.engines import FleetEngine, JobState, LinkedEngine
from stackcheck.fleet.follow import Followed, JobPatience, follow
from stackcheck.fleet.job import FOLDER, Job, read_state, subject_of
from stackcheck.fleet.link_stage import Links
from stackcheck.fleet.spread import Outlier, outliers
from stackcheck.fleet.training import Lost, Training, TrainingPlan, TrainingReport
from stackcheck.suite.subject import Subject
from stackcheck.suite.verdict import Verdict
from stackcheck.vendors import Host

if TYPE_CHECKING:
    from stackcheck.history.history import History

FIT = ("PASSED", "MEASURED")
FEWEST_TOGETHER = 2
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
    """What a fleet run came to."""

    job: Job
    job_id: str
    nodes: tuple[NodeOutcome, ...]  # the outcomes; who did not pass comes first, then who stands out
    stragglers: tuple[Straggler, ...]  # figures that stand out from the fleet, the worst first
    links: Links | None = None  # what the pairs of nodes that passed showed; None if they were not tried
    training: Training | None = None  # how they trained together; None if that was not tried

    @property
    def status(self) -> str:
        """The worst of the nodes; FAILED too if a link is bad, or training lost a node."""
        if any(stage is not None and not stage.is_good for stage in (self.links, self.training)):
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
            "training": self.training.as_json() if self.training else None,
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
        "devices": list(node.models) if node.models is not None else None,
        "checks": dict(node.checks),
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
    patience: JobPatience,
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
    judge, failed = Judge(job=job, subject=subject, root=job.checkout), list[StackcheckError]()
    if history is not None:
        judge = dataclasses.replace(judge, keep=kept_in(history, job, failed))
    facts = {rank: followed.facts_of(rank) for rank in range(job.nodes)}
    attempt = job.attempt(followed.state.attempt)
    with without_collector(kept=True):
        found = collect.outcomes(judge, attempt, facts, followed.nodes, followed.missing)
        done = assembled(job, job_id, found)
    _saved(done)
    if failed:
        raise failed[0]
    return done


def with_links(
    done: FleetRun,
    engine: LinkedEngine,
    patience: JobPatience,
    report: Callable[[str], None],
    *,
    limit_s: int = link_stage.LIMIT_S,
) -> FleetRun:
    """Try the links of the nodes that passed: pairs in rounds, then all of them."""
    names = _fit_together(done, "links", report)
    if not names:
        return done
    racks = {node.name: node.facts.rack for node in done.nodes if node.facts.rack}
    job, plan = link_stage.make(done.job, names, engine.addresses(names), racks=racks, limit_s=limit_s)
    report(f"links: {len(names)} nodes that passed, rounds: {len(plan.rounds)}")
    link_stage.save(job, plan)
    job_id = start(job, engine.on(names), report)
    followed = follow(job, job_id, engine, patience=patience, report=report)
    found = link_stage.read(job.attempt(followed.state.attempt), plan, job.devices or 1)
    return _saved(dataclasses.replace(done, links=found))


def with_training(
    done: FleetRun, engine: LinkedEngine, patience: JobPatience, report: Callable[[str], None]
) -> FleetRun:
    """Train on the nodes that passed; after each lost node the rest goes on from the checkpoint."""
    names = _fit_together(done, "training", report)
    if not names:
        return done
    job, plan = training.make(done.job, names, engine.addresses(names))
    lost: list[Lost] = []
    while True:
        training.save(job, plan)
        followed = follow(
            job, start(job, engine.on(plan.names), report), engine, patience=patience, report=report
        )
        reports = training.read(job.attempt(followed.state.attempt), plan)
        gone = lost_nodes(plan, followed, reports)
        for node in gone:
            report(f"{node.node}: lost while it trained: {node.because}")
        lost += gone
        names = [name for name in names if name not in {node.node for node in lost}]
        if not gone or not names:
            return _saved(dataclasses.replace(done, training=training.judge(plan, reports, lost)))
        job, plan = training.make(done.job, names, engine.addresses(names), number=len(lost), before=plan)
        begun = training.words(training.checkpointed(plan))
        report(f"training: goes on with {', '.join(plan.names)}, checkpoints: {begun}")


def lost_nodes(
    plan: TrainingPlan, followed: Followed, reports: Mapping[str, TrainingReport | None]
) -> list[Lost]:
    """The nodes that took part and left no report: with them the steps after the checkpoint are gone."""
    ranks = {followed.name_of(rank): rank for rank in range(len(plan.names))}
    at_step = training.checkpointed(plan)
    return [
        Lost(node=name, because=_why_lost(followed, ranks.get(name)), at_step=at_step)
        for name in plan.names
        if reports[name] is None
    ]


def _why_lost(followed: Followed, rank: int | None) -> str:
    if rank is None:
        return "it never started"
    told = followed.nodes.get(rank)
    error = (told.error or "").partition("\n")[0] if told else ""
    return error or followed.missing(rank) or "it left no report"


def _fit_together(done: FleetRun, stage: str, report: Callable[[str], None]) -> list[str]:
    """The nodes that passed alone, by rank; none if there are too few to work together."""
    names = fit_nodes(done)
    if len(names) >= FEWEST_TOGETHER:
        return names
    report(f"{stage}: not tried: fewer than two nodes passed alone")
    return []


def fit_nodes(done: FleetRun) -> list[str]:
    """The nodes that passed alone, by rank."""
    return [node.name for node in sorted(done.nodes, key=lambda node: node.rank) if node.status in FIT]


def _saved(done: FleetRun) -> FleetRun:
    write_atomically(done.job.folder / "fleet.json", _in_parts(done))
    return done


def _in_parts(done: FleetRun) -> Iterator[bytes]:
    """The document, a node at a time: those of ten thousand nodes are 200 MB of text."""
    # Python's own encoder takes seconds for a thousand nodes once it indents.
    head = to_json(dataclasses.replace(done, nodes=done.nodes[:1]).as_json() | {"nodes": []}, indent=1)
    before, mark, after = head.partition(b'"nodes": []')
    yield before + mark[:-1]
    for number, node in enumerate(done.nodes):
        yield (b",\n" if number else b"\n") + to_json(_node_json(node))
    yield b"\n]" + after


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
    subject = subject_of(job.name, root, job.vendor, job.accepted_python)
    newest = _newest_attempt(job)
    states = {rank: read_state(job.attempt(newest) / str(rank)) for rank in range(job.nodes)}
    followed = Followed(
        state=JobState(phase="ended", word="of an earlier time", attempt=newest),
        nodes={rank: state for rank, state in states.items() if state},
    )
    number = (job.folder / JOB_ID).read_text(encoding="utf-8") if (job.folder / JOB_ID).exists() else ""
    return _saved(_together_again(judged(job, number, subject, followed, history=history)))


def _newest_attempt(job: Job) -> int:
    attempts = [int(path.name.partition("-")[2]) for path in job.folder.glob("attempt-*")]
    return max(attempts, default=0)


def _together_again(done: FleetRun) -> FleetRun:
    """With what the later stages of the run left: a bad link stays bad when its nodes are judged again."""
    folder, links, found = done.job.folder, None, None
    if (plan := folder.with_name(f"{folder.name}-links") / link_stage.PLAN).exists():
        job = Job.load(plan.parent)
        planned = link_stage.LinkPlan.model_validate_json(plan.read_bytes())
        links = link_stage.read(job.attempt(_newest_attempt(job)), planned, job.devices or 1)
    lost: list[Lost] = []
    tries = folder.parent.glob(f"{folder.name}-training-*/{training.PLAN}")
    for path in sorted(tries, key=lambda path: int(path.parent.name.rpartition("-")[2])):
        job, tried = Job.load(path.parent), training.TrainingPlan.model_validate_json(path.read_bytes())
        reports = training.read(job.attempt(_newest_attempt(job)), tried)
        lost += [
            Lost(node=name, because="it left no report", at_step={})
            for name in tried.names
            if not reports[name]
        ]
        found = training.judge(tried, reports, lost)
    return dataclasses.replace(done, links=links, training=found)


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
    """Figures of finished nodes that stand out among machines of the same kind, the worst first. Pure.

    One figure of all nodes is in memory at a time: together they are seven million of ten thousand nodes.
    """
    machines: dict[tuple[str, ...], list[NodeOutcome]] = {}
    for node in nodes:
        machines.setdefault(node.models or (), []).append(node)
    found = [
        Straggler(node=name, check=key[0], metric=key[1], unit=key[2], outlier=outlier)
        for alike in machines.values()
        for key, values in _columns(alike)
        for name, outlier in outliers(values, key[4]).items()
    ]
    return sorted(found, key=lambda item: -item.outlier.z)


def _columns(alike: Sequence[NodeOutcome]) -> Iterator[tuple[MetricKey, dict[str, float]]]:
    """Each metric with its figure of each node; equal nodes share their list of metrics."""
    lists = {id(node.metrics): node.metrics for node in alike}
    places = {number: {key: at for at, key in enumerate(one)} for number, one in lists.items()}
    for key in dict.fromkeys(key for one in lists.values() for key in one):
        have = {number: place[key] for number, place in places.items() if key in place}
        yield (
            key,
            {node.name: node.figures[have[id(node.metrics)]] for node in alike if id(node.metrics) in have},
        )


def kept_in(history: History, job: Job, failed: list[StackcheckError]) -> Keep:
    """What appends each node's run to the history, until that fails: no verdict waits for the history."""
    now = dt.datetime.now(dt.UTC)

    def keep(node: NodeOutcome, body: bytes, verdict: Verdict, host: Host) -> None:
        source = f"fleet {job.id}, node {node.name}, rack {node.facts.rack or '-'}"
        if failed:
            return
        try:
            history.append(body, verdict.as_json(), host.as_json(), source=source, judged=now)
        except StackcheckError as error:
            failed.append(error)

    return keep
