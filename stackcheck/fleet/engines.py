"""What every engine of a fleet offers. In: nothing. Out: `JobState`, `NodeFacts`, protocol `FleetEngine`."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from stackcheck.errors import EngineError

if TYPE_CHECKING:
    from stackcheck.fleet.job import Job, NodeState

COMMAND_TIMEOUT_S = 60
Phase = Literal["waiting", "running", "ended", "cancelled", "out of time", "a node failed", "out of memory"]


@dataclass(frozen=True, kw_only=True)
class JobState:
    """How a job is, in the words of its engine too."""

    phase: Phase  # what it means for us
    word: str  # what the engine says
    reason: str = ""
    attempt: int = 0  # how often it was started again; the nodes write below `attempt-<n>/`
    nodes: tuple[str, ...] = ()  # names of its nodes, in order of rank, once it has some

    @property
    def is_over(self) -> bool:
        """Whether no node will start any more."""
        return self.phase not in {"waiting", "running"}


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """What the engine knows of a node."""

    name: str
    partition: str = ""  # partitions (Slurm) or pools (Kubernetes) that it is in
    rack: str = ""  # the leaf switch or the zone that it hangs on; empty if nobody says
    alive: bool = True  # whether the engine reaches it
    words: str = ""  # its state, for people


class FleetEngine(Protocol):
    """The names that slurm.py and kubernetes.py share."""

    def render(self, job: Job) -> str:
        """What is submitted, for people to review."""

    def submit(self, job: Job) -> str:
        """Submit it; the id of the job."""

    def state(self, job_id: str) -> JobState:
        """How a job is now."""

    def node_states(self, job: Job, attempt: int) -> dict[int, NodeState]:
        """What each rank that began has said, or the engine says of it."""

    def nodes(self, names: Sequence[str]) -> dict[str, NodeFacts]:
        """What the engine knows of nodes."""

    def cancel(self, job_id: str) -> None:
        """End a job."""

    def drain(self, node: str, reason: str) -> None:
        """Keep jobs away from a node."""


class LinkedEngine(FleetEngine, Protocol):
    """An engine whose nodes can work together: it knows how they reach each other."""

    def addresses(self, names: Sequence[str]) -> dict[str, str]:
        """Node -> the address by which the other nodes reach it."""

    def on(self, names: Sequence[str]) -> LinkedEngine:
        """The same site, on exactly these nodes."""


def ask(system: str, *command: str, package: str, look: str) -> str:
    """What a client program of a cluster prints.

    Args:
        system: The cluster, for messages.
        command: The program and its arguments.
        package: The Debian package that has the program.
        look: The command with which a user looks at the cluster.

    Raises:
        EngineError: It is missing, failed, or does not answer.
    """
    if shutil.which(command[0]) is None:
        raise EngineError(
            f"{command[0]} is not on PATH",
            expected=f"{system}'s client programs",
            next_step=f"call this on a login node of the cluster, or install {package}",
        )
    try:
        # In a session of its own: a second Ctrl-C of a terminal must not end scancel.
        done = subprocess.run(
            command,
            capture_output=True,
            errors="replace",
            timeout=COMMAND_TIMEOUT_S,
            check=False,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as error:
        raise EngineError(
            f"{system} does not answer",
            where=shlex.join(command),
            expected=f"an answer within {COMMAND_TIMEOUT_S} s",
            next_step=look,
        ) from error
    if done.returncode:
        raise EngineError(
            f"{system} refused a command",
            where=shlex.join(command),
            got=(done.stderr or done.stdout).strip()[-500:] or f"exit code {done.returncode}",
            next_step=look,
        )
    return done.stdout
