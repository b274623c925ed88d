"""Judge what the nodes of a job left. In: a job's folder. Out: a `NodeOutcome` for each node.

The judge is that of one machine (`suite.verdict`), with the checks, bounds, waivers and digests of this
checkout. A node without a file has failed. The files are read as foreign input: the container wrote
result.json, and its node the rest.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import gc
import json
import multiprocessing
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from stackcheck.errors import ChecksFailedError, StackcheckError
from stackcheck.files import strictjson
from stackcheck.fleet import stored
from stackcheck.fleet.engines import NodeFacts
from stackcheck.fleet.job import Job, NodeState
from stackcheck.oci.documents import sha256
from stackcheck.suite import bounds, consistency, requirements, results
from stackcheck.suite.judged import judge
from stackcheck.suite.results import RunResult
from stackcheck.suite.subject import Subject
from stackcheck.suite.verdict import Verdict
from stackcheck.vendors import Host, HostDevice

_Task = tuple[Path, NodeFacts, int, NodeState | None, str]  # what `Judge.node` takes

Status = Literal["PASSED", "FAILED", "UNFIT", "MEASURED"]
FACTS_LIMIT_BYTES = 1 << 20
CLOCKS = dt.timedelta(minutes=5)  # how far the clocks of nodes may be apart
NO_WALL = "a pod has no program outside the image, so this run certifies nothing"
FEWEST_FOR_PROCESSES = 64  # nodes; fewer are judged before a process has started
CHUNK = 64  # nodes of one answer of a process
_HOST = TypeAdapter(Host)

MetricKey = tuple[str, str, str, str, Literal["min", "max"] | None]
Keep = Callable[["NodeOutcome", bytes, "Verdict", Host], None]


@dataclass(frozen=True, kw_only=True)
class NodeOutcome:
    """How one node ended.

    Attributes:
        metrics: What was measured: check, metric, unit, conditions, direction. Nodes that are equal share it.
    """

    rank: int  # from 0
    facts: NodeFacts
    status: Status  # the verdict; MEASURED: nothing failed in a selection of the checks, or in a pod
    reasons: tuple[str, ...]  # why it is not PASSED
    seconds: float = 0.0  # how long the suites ran
    models: tuple[str, ...] | None = None  # its devices; None if there is no result that counts
    checks: tuple[tuple[str, str], ...] = ()  # check and outcome of that result
    metrics: tuple[MetricKey, ...] = ()
    figures: array[float] = field(default_factory=lambda: array("d"))  # the value of each metric

    @property
    def name(self) -> str:
        """The node's name."""
        return self.facts.name


def _kept_nowhere(*_: object) -> None:
    """The history of a judge that has none."""


@dataclass(frozen=True, kw_only=True)
class Judge:
    """What all nodes of a job are held to."""

    job: Job
    subject: Subject  # the image, its policy and its machines
    root: Path
    keep: Keep = _kept_nowhere  # takes each result that counts, while it is in memory

    def node(
        self, folder: Path, facts: NodeFacts, rank: int, state: NodeState | None, missing: str
    ) -> NodeOutcome:
        """The outcome of one node; `missing` says why, if there is no file."""
        try:
            return self._judged(rank, folder, facts, state, missing)
        except StackcheckError as error:
            return NodeOutcome(rank=rank, facts=facts, status="FAILED", reasons=(str(error),))

    def _judged(
        self, rank: int, folder: Path, facts: NodeFacts, state: NodeState | None, missing: str
    ) -> NodeOutcome:
        if state is None:
            raise ChecksFailedError("the node never started", got=missing or "no file of it")
        if state.state != "ended":
            raise ChecksFailedError(
                state.error or f"the node did not come to its end: {missing or 'no result'}"
            )
        body = results.read_result_file(folder / "result.json", self.read)
        seen = self.job.engine == "slurm"  # whether the machine was read from outside the container
        read = state.result if seen else None  # digest of what the node's own program read, by `parse`
        if read is not None and read != (digest := sha256(body)):
            raise ChecksFailedError(
                "result.json is not the one that the node's own program read",
                where=str(folder / "result.json"),
                got=digest,
                expected=read,
                next_step="see who writes to the folder of the job, or to the store of its results",
            )
        result = results.parse_to_judge(body, where=str(folder / "result.json"), strict=read is None)
        told = self._told(folder / "run.json")
        host = self._host(folder / "host.json") if seen else _HOST.validate_python(result.host.model_dump())
        if not seen:
            consistency.require_exit_code(result, state.code, folder / "result.json")
        self._require_ours(result, told, host, folder)
        required = self._requirements(host)
        found = judge(result, required, self.root, ask=lambda root, asked: _answer(root, to_json(asked)))
        outcome = self._outcome(rank, facts, result, host, found)
        if seen:  # the history holds later runs to its figures, so it takes no image's own word
            self.keep(outcome, body, found, host)
        return outcome

    def _outcome(
        self, rank: int, facts: NodeFacts, result: RunResult, host: Host, found: Verdict
    ) -> NodeOutcome:
        status: Status = found.status
        reasons = found.reasons
        if self.job.only:  # a selection never gets a verdict: what was left out is no fault of the node
            bad = [check for check in result.checks if check.outcome in consistency.NOT_GOOD]
            status = "FAILED" if bad or not result.checks or result.state != "finished" else "MEASURED"
            reasons = tuple(f"{check.id} {check.outcome}: {check.reason}" for check in bad) or (
                () if status == "MEASURED" else ("no check ran to its end",)
            )
        elif status == "PASSED" and self.job.engine == "kubernetes":
            status, reasons = "MEASURED", (NO_WALL,)
        few = self._too_few_devices(host)
        seconds = ((result.finished or result.started) - result.started).total_seconds()
        return NodeOutcome(
            rank=rank,
            facts=facts,
            status="FAILED" if few else status,
            reasons=(*few, *reasons),
            seconds=seconds,
            models=_shared(tuple(device.model for device in host.devices)),
            checks=_shared(tuple((check.id, check.outcome) for check in result.checks)),
            **_measured(result),
        )

    def _too_few_devices(self, host: Host) -> tuple[str, ...]:
        """A node that lost a GPU shows a machine that is whole, only smaller."""
        seen, wanted = len(host.devices), self.job.devices
        if wanted is None or seen == wanted:
            return ()
        return (f"the node shows {seen} devices, the job asked for {wanted}",)

    def _require_ours(self, result: RunResult, told: Mapping[str, Any], host: Host, folder: Path) -> None:
        """The result is about this job's image and suites, on the machine that the node's own side saw.

        Raises:
            ChecksFailedError: With the first thing that differs.
        """
        ours = {
            "tier": self.job.tier,
            "stack_id": self.job.stack_id,
            "image": self.subject.as_tested
            | {"config_digest": self.job.config_digest, "manifest_digest": self.job.manifest_digest},
            "inputs": self.job.inputs,
            "host": json.loads(json.dumps(host.as_json())),
        }
        path = folder / "result.json"
        if result.run_id != told.get("run_id"):
            raise ChecksFailedError(
                "result.json belongs to a different run",
                where=str(path),
                got=result.run_id,
                expected=str(told.get("run_id")),
            )
        consistency.require_same_run(result, ours, path)
        consistency.require_interpreter(result, told.get("interpreter") or {}, path)
        now = dt.datetime.now(dt.UTC)
        consistency.require_times_within(result, self.job.created - CLOCKS, now + CLOCKS, path)

    def _requirements(self, host: Host) -> requirements.Requirements:
        """Read once for each kind of machine: a fleet has few."""
        kind = tuple(device.model for device in host.devices)
        found = _of_kind(self, kind)
        seen = tuple(device.id for device in host.devices) if self.job.engine == "slurm" else None
        return dataclasses.replace(found, devices=seen)

    def read(self, path: Path, limit: int) -> bytes:
        """A file that a node left, at most `limit` bytes of it."""
        return stored.read(self.job, path, limit)

    def _told(self, path: Path) -> Mapping[str, Any]:
        found = self._document(path)
        return found if isinstance(found, dict) else {}

    def _host(self, path: Path) -> Host:
        try:
            return _HOST.validate_python(self._document(path))
        except ValidationError as error:
            raise ChecksFailedError(
                "the node's description of its machine is damaged",
                where=str(path),
                got=str(error).splitlines()[0],
            ) from error

    def _document(self, path: Path) -> object:
        try:
            text = self.read(path, FACTS_LIMIT_BYTES)
            strictjson.check(text)
            found: object = json.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            raise ChecksFailedError(
                "a file of this node cannot be read",
                where=str(path),
                got=str(error),
                expected="what its run left",
            ) from error
        return found

    def __hash__(self) -> int:
        """For the cache of `_of_kind`."""
        return hash(self.job.id)


@functools.lru_cache(maxsize=64)
def _of_kind(judge: Judge, models: tuple[str, ...]) -> requirements.Requirements:
    devices = tuple(
        HostDevice(model=model, arch="", id=str(n), memory_bytes=0) for n, model in enumerate(models)
    )
    some = Host(
        vendor=judge.job.vendor,
        devices=devices,
        driver=None,
        kernel="",
        partition=None,
        nvls="unavailable",
        cpu="",
        memory_bytes=0,
    )
    return requirements.of(judge.subject, some, judge.job.tier, judge.root)


@functools.lru_cache(maxsize=256)
def _answer(root: Path, question: bytes) -> str:
    """Equal nodes ask for the same bounds in the same order, and each answer takes a process."""
    return bounds.ask_suites(root, json.loads(question))


@functools.lru_cache(maxsize=4096)
def _shared(value: Any) -> Any:
    """The first of equal values: equal nodes hold one."""
    return value


def _measured(result: RunResult) -> dict[str, Any]:
    """The figures of the checks that ended by themselves."""
    found = [
        # Equal suites write their conditions in an equal order.
        ((check.id, metric.name, metric.unit, str(metric.conditions), metric.direction), metric.value)
        for check in result.checks
        if check.outcome in {"passed", "failed"}
        for metric in check.metrics
        if metric.value is not None
    ]
    return {
        "metrics": _shared(tuple(key for key, _ in found)),
        "figures": array("d", (value for _, value in found)),
    }


def outcomes(
    judge: Judge,
    attempt: Path,
    facts: Mapping[int, NodeFacts],
    states: Mapping[int, NodeState],
    missing: Callable[[int], str],
) -> list[NodeOutcome]:
    """Every node of an attempt, by rank; ranks that no node took have failed too.

    One result is in the memory of a process at a time; what stays of it are its figures, a few KB.
    """
    first = {
        state.node: rank for rank, state in sorted(states.items(), reverse=True) if state.state == "ended"
    }
    tasks = (
        (attempt / str(rank), facts[rank], rank, _once(states.get(rank), first), missing(rank))
        for rank in range(judge.job.nodes)
    )
    if judge.job.nodes < FEWEST_FOR_PROCESSES or (os.cpu_count() or 1) == 1:
        return [judge.node(*task) for task in tasks]
    return list(_by_processes(judge, attempt, tasks))


def _once(state: NodeState | None, first: Mapping[str, int]) -> NodeState | None:
    """What a rank says, unless an earlier rank ended on the same node: one node counts once."""
    if state is None or state.state != "ended" or first[state.node] == state.rank:
        return state
    error = f"{state.node} was tested as rank {first[state.node]} too: no node of its own took this rank"
    return dataclasses.replace(state, state="failed", error=error)


def _by_processes(judge: Judge, attempt: Path, tasks: Iterable[_Task]) -> Iterator[NodeOutcome]:
    """The outcomes by rank, from one process for each processor; each run is kept here, by one process.

    The processes come from a server that has no thread: those that watch Kubernetes, or belong to a library,
    may hold a lock here, and in a copy of this process nobody would ever release it.
    """
    keeps = judge.keep is not _kept_nowhere
    begin = dataclasses.replace(judge, keep=_Worker.take) if keeps else judge
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with context.Pool(os.cpu_count(), _Worker.begin, (begin,)) as pool:
        for outcome, held in pool.imap(_Worker.play, tasks, CHUNK):
            whole = dataclasses.replace(
                outcome,
                models=_shared(outcome.models),
                checks=_shared(outcome.checks),
                metrics=_shared(outcome.metrics),
                reasons=_shared(outcome.reasons),
            )
            if held:
                body = results.read_result_file(attempt / str(outcome.rank) / "result.json", judge.read)
                if sha256(body) == held[0]:  # what changed since then was not judged
                    judge.keep(whole, body, *held[1:])
            yield whole


class _Worker:
    """What a process that judges has: set before it begins."""

    judge: Judge
    held: tuple[str, Verdict, Host] | None = None

    @classmethod
    def begin(cls, judge: Judge) -> None:
        cls.judge = judge
        gc.disable()  # as `without_collector` does in the other process

    @classmethod
    def take(cls, _outcome: NodeOutcome, body: bytes, verdict: Verdict, host: Host) -> None:
        cls.held = (sha256(body), verdict, host)

    @classmethod
    def play(cls, task: _Task) -> tuple[NodeOutcome, tuple[str, Verdict, Host] | None]:
        cls.held = None
        outcome = cls.judge.node(*task)
        # Equal parts of one answer travel once.
        return dataclasses.replace(outcome, reasons=_shared(outcome.reasons)), cls.held
