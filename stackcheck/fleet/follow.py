"""Follow a job until every node has ended, or never will. In: a submitted job. Out: its last state, lines.

Three things end a node: its own last word (state.json), its engine (the job ended, the node is down), or a
clock (it did not start in time). When nothing more can come, the job is ended too, so that no node stays
occupied.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from stackcheck.engine import interrupts
from stackcheck.fleet.engines import FleetEngine, JobState, NodeFacts

if TYPE_CHECKING:
    from stackcheck.fleet.job import Job, NodeState


MOST_WITH_LINES = 64  # nodes whose lines of progress are shown; of more, only how each one ended


@dataclass(frozen=True, kw_only=True)
class JobPatience:
    """How long is waited for what, in seconds.

    Attributes:
        settle_s: For files to arrive after the job ended: shared file systems keep old listings for a while.
    """

    poll_s: float = 5.0  # between two looks
    queue_s: float | None = None  # for the job to get its nodes; None: as long as it takes
    start_s: float = 600.0  # for a node to say its first word, after the job got its nodes
    settle_s: float = 30.0


@dataclass(kw_only=True)
class Followed:
    """What is known of a job so far."""

    state: JobState = field(default_factory=lambda: JobState(phase="waiting", word="SUBMITTED"))
    nodes: dict[int, NodeState] = field(default_factory=dict)
    facts: dict[str, NodeFacts] = field(default_factory=dict)
    why_ended: str = ""
    never_started: bool = False

    def ended(self) -> set[int]:
        """The ranks that said their last word."""
        return {rank for rank, node in self.nodes.items() if node.state != "running"}

    def names(self) -> tuple[str, ...]:
        """The names of the nodes that have said something."""
        return tuple(told.node for told in self.nodes.values())

    def name_of(self, rank: int) -> str:
        """The name of a node: as it said itself, else as the engine counts them."""
        if rank in self.nodes:
            return self.nodes[rank].node
        return self.state.nodes[rank] if rank < len(self.state.nodes) else ""

    def facts_of(self, rank: int) -> NodeFacts:
        """What the engine knows of the node of a rank."""
        name = self.name_of(rank)
        return self.facts.get(name) or NodeFacts(name=name or f"rank {rank}")

    def missing(self, rank: int) -> str:
        """Why a rank left no result, in words."""
        facts = self.facts_of(rank)
        if not facts.alive:
            return f"the engine says that the node is {facts.words}"
        if self.why_ended:
            return self.why_ended
        if rank not in self.nodes and self.never_started:
            return "it said nothing in the time that a node has to start"
        reason = f" ({self.state.reason})" if self.state.reason else ""
        return f"its job is {self.state.word}{reason}"


def follow(
    job: Job, job_id: str, engine: FleetEngine, *, patience: JobPatience, report: Callable[[str], None]
) -> Followed:
    """Wait until every node of a job has ended or never will; end what is left of the job.

    Raises:
        EngineError: The engine does not answer.
        KeyboardInterrupt: The user gave up; the job is cancelled first.
    """
    watch = _Watch(job, job_id, engine, patience, report)
    try:
        while not watch.look():
            time.sleep(patience.poll_s)
    except BaseException:  # also Ctrl-C: no job of ours goes on without us, and a second one waits for that
        with interrupts.held():
            report(f"cancelling job {job_id}")
            engine.cancel(job_id)
        raise
    if not watch.found.state.is_over and len(watch.found.ended()) < job.nodes:
        engine.cancel(job_id)  # some nodes never end; where all have, the job ends by itself
    return watch.found


class _Watch:
    """Looks at a job again and again, and reports what changed."""

    def __init__(
        self, job: Job, job_id: str, engine: FleetEngine, patience: JobPatience, report: Callable[[str], None]
    ) -> None:
        self.job, self.job_id, self.engine, self.patience, self.report = job, job_id, engine, patience, report
        self.found = Followed()
        self.submitted = time.monotonic()
        self.since: float | None = None  # when the present attempt got its nodes
        self.over: float | None = None  # when the job ended
        self.read: dict[Path, int] = {}  # how much of each progress.log has been reported

    def look(self) -> bool:
        """Look once; whether nothing more can come."""
        self._job()
        attempt = self.found.state.attempt
        for rank, told in self.engine.node_states(self.job, attempt).items():
            if self.job.nodes <= MOST_WITH_LINES:
                self._progress(self.job.attempt(attempt) / str(rank) / "progress.log", told)
            if told != self.found.nodes.get(rank):
                self.found.nodes[rank] = told
                first = (told.error or "").partition("\n")[0]
                self.report(f"{told.node}: {told.state}{f': {first}' if first else ''}{self._count()}")
        # A node can begin and end between two looks: then it is the first to say its name.
        names = list(filter(None, dict.fromkeys((*self.found.state.nodes, *self.found.names()))))
        if names and (len(self.found.ended()) < self.job.nodes or not self.found.facts.keys() >= {*names}):
            self.found.facts = self.engine.nodes(names)
        everyone = len(self.found.ended()) == self.job.nodes
        return everyone or self._is_over() or self._is_stuck()

    def _job(self) -> None:
        before, now = self.found.state, self.engine.state(self.job_id)
        if (now.word, now.attempt, now.nodes) != (before.word, before.attempt, before.nodes):
            count = sum(map(bool, now.nodes))
            on = f" on {count} nodes" if count else ""
            self.report(f"job {self.job_id}: {now.word}{on}{f' ({now.reason})' if now.reason else ''}")
        if now.attempt != before.attempt:
            self.report(
                f"job {self.job_id}: started again, attempt {now.attempt}: earlier results do not count"
            )
            self.found.nodes, self.read, self.since = {}, {}, None
        if len(now.nodes) < len(before.nodes) and now.attempt == before.attempt:
            # An engine forgets the nodes of a job that ended, and takes dead nodes off its list.
            now = dataclasses.replace(now, nodes=before.nodes)
        if now.attempt == before.attempt:  # so does an array of the elements that ended
            known = itertools.zip_longest(now.nodes, before.nodes, fillvalue="")
            now = dataclasses.replace(now, nodes=tuple(new or old for new, old in known))
        if now.phase == "running" and self.since is None:
            self.since = time.monotonic()
        self.over = (self.over or time.monotonic()) if now.is_over else None
        self.found.state = now

    def _count(self) -> str:
        return f" ({len(self.found.ended())} of {self.job.nodes} nodes have ended)"

    def _progress(self, path: Path, told: NodeState) -> None:
        """Report the new lines of a node."""
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self.read.get(path, 0))
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.read[path] = self.read.get(path, 0) + len(whole)
        for line in whole.decode("utf-8", errors="replace").splitlines():
            self.report(f"{told.node}: {line}")

    def _is_over(self) -> bool:
        """Whether the job ended, and its files had time to arrive."""
        if self.over is None:
            return False
        return time.monotonic() - self.over >= self.patience.settle_s

    def _is_stuck(self) -> bool:
        """Whether the ranks that have not ended cannot: they are down, or did not start in time."""
        now = time.monotonic()
        if self.found.state.phase == "waiting" and self.patience.queue_s is not None:
            waited = now - self.submitted
            if waited >= self.patience.queue_s and self.since is None:
                self.found.why_ended = f"the job got no nodes within {self.patience.queue_s:g} s"
                return True
            return False
        if self.since is None:
            return False
        late = now - self.since >= self.patience.start_s
        self.found.never_started = late
        left = set(range(self.job.nodes)) - self.found.ended()
        return all(self._cannot_end(rank, late=late) for rank in left)

    def _cannot_end(self, rank: int, *, late: bool) -> bool:
        return not self.found.facts_of(rank).alive or (late and rank not in self.found.nodes)
