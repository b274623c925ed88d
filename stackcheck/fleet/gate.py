"""Nodes that work together begin together. In: a file of each node. Out: who never writes its own, and why.

The time of a group starts when the container of every node in it is up: a node that is only slow to start
one must not look like a dead link. A node whose own stackcheck has ended is not waited for.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from stackcheck.errors import ChecksFailedError
from stackcheck.files.atomic import write_atomically
from stackcheck.files.regular import read_regular
from stackcheck.fleet.job import NodeState, read_state

AReport = TypeVar("AReport", bound="BaseModel")
# From the first container of a group to its last one; less than torchrun itself waits for the others.
START_LIMIT_S = 300
AROUND_S = 300  # for the work of a job outside its groups: to load the image, to write the files
POLL_S = 0.2
REPORT_LIMIT_BYTES = 4 << 20
LOOK_S = 5.0  # at the states of all nodes, which are many small files on a shared disk


class NotUpError(ChecksFailedError):
    """A node of a group does not take part."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Where a node waits, with its container up, for those of its group."""

    attempt: Path  # the folder of the job's attempt
    folder: Path  # where the nodes of the group say that they are up
    name: str
    names: tuple[str, ...]  # all nodes of the group
    limit_s: float = START_LIMIT_S  # how long it waits

    def passed(self) -> None:
        """Say that this node is up, and return when all are.

        Raises:
            NotUpError: With the nodes that are not, and why.
        """
        write_atomically(up_file(self.folder, self.name), ())
        files = {name: up_file(self.folder, name) for name in self.names}
        late = missing(self.attempt, files, self.limit_s)
        if late:
            told = [f"{name} ({why or f'not up within {self.limit_s:g} s'})" for name, why in late.items()]
            raise NotUpError(f"waited for {', '.join(told)}")


def up_file(folder: Path, name: str) -> Path:
    """What a node writes when its container is up."""
    return folder / f"{name}.up"


def missing(attempt: Path, files: Mapping[str, Path], limit_s: float) -> dict[str, str | None]:
    """Wait for a file of each node.

    Returns:
        The nodes that have none, and why the node has ended; None if nobody knows.
    """
    end = time.monotonic() + limit_s
    look_at, ended = 0.0, dict[str, str]()
    while True:
        now = time.monotonic()
        if now >= min(look_at, end):  # before the files: the last thing that a node writes is its state
            ended, look_at = why_ended(attempt), now + LOOK_S
        absent = [name for name, path in files.items() if not path.exists()]
        if now >= end or all(name in ended for name in absent):
            return {name: ended.get(name) for name in absent}
        time.sleep(POLL_S)


def why_ended(attempt: Path) -> dict[str, str]:
    """Node -> its error, of the nodes whose own stackcheck has ended."""
    return {
        state.node: in_one_line(state.error or "it has ended")
        for state in _states(attempt)
        if state.state != "running"
    }


def refusals(attempt: Path, names: Iterable[str], folder: Path) -> dict[str, str]:
    """Node -> its error, of the nodes that failed before their container was up: they refused the job."""
    return {
        state.node: in_one_line(state.error or "")
        for state in _states(attempt)
        if state.state == "failed" and state.node in names and not up_file(folder, state.node).exists()
    }


def report(kind: type[AReport], path: Path) -> AReport | None:
    """What a node wrote of a stage; None if it wrote nothing."""
    try:
        return kind.model_validate_json(read_regular(path, REPORT_LIMIT_BYTES, follow=False))
    except OSError:
        return None
    except ValueError as error:
        return kind(error=f"left a damaged report: {str(error).splitlines()[0]}")


def _states(attempt: Path) -> list[NodeState]:
    """What each node that wrote anything says of itself."""
    return [state for folder in attempt.glob("[0-9]*") if (state := read_state(folder))]


def in_one_line(error: str) -> str:
    """An error with its details, as part of a sentence."""
    return "; ".join(line.strip() for line in error.splitlines())
