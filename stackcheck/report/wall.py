"""The fleet at one look: nodes by stacks. In: runs, oldest first, and a time. Out: a `Wall`. Pure.

The page and `stackcheck status` show the same `Wall`. A node is late if its newest run is older than a night
and a morning: silence is never success.
"""

import datetime as dt
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from stackcheck.history.runs import Run
from stackcheck.report.standing import State

LATE = dt.timedelta(hours=36)
SHOWN_NODES = 200
Outcome = Literal["failed", "unfit", "late", "passed"]
OUTCOMES: tuple[Outcome, ...] = ("failed", "unfit", "late", "passed")  # the worst first
ICONS: Mapping[Outcome, State] = {
    "failed": "failed",
    "unfit": "unfit",
    "late": "expired",
    "passed": "certified",
}
_STEPS = ((86400, "d"), (3600, "h"), (60, "min"))


@dataclass(frozen=True, kw_only=True)
class WallCell:
    """The newest run of one stack on one node."""

    run: Run
    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class WallNode:
    """One node: its last night, and its newest run of each stack."""

    name: str
    newest: Run
    outcome: Outcome
    cells: Mapping[str, WallCell]

    @property
    def devices(self) -> str:
        """The number and model of the node's devices, as `8 x MI300X`."""
        return f"{self.newest.device_count} x {self.newest.device_model}"


@dataclass(frozen=True, kw_only=True)
class Wall:
    """The fleet: its stacks in order, and its nodes, the worst first.

    Attributes:
        hidden: How many more nodes there are, none worse than those shown.
        counts: Outcome -> how many nodes, of all.
    """

    made: dt.datetime
    stacks: tuple[str, ...]
    nodes: tuple[WallNode, ...]
    hidden: int
    counts: Mapping[Outcome, int]

    @property
    def outcome(self) -> Outcome:
        """The worst of all nodes; an empty fleet is late."""
        return next((each for each in OUTCOMES if self.counts.get(each)), "late")


def wall(runs: Sequence[Run], now: dt.datetime) -> Wall:
    """The newest run of each stack on each node; runs come oldest first."""
    newest = {(run.node, run.stack): run for run in runs}
    by_node: dict[str, list[Run]] = {}
    for run in newest.values():
        by_node.setdefault(run.node, []).append(run)
    nodes = sorted((_node(found, now) for found in by_node.values()), key=_rank)
    shown = nodes[:SHOWN_NODES]
    return Wall(
        made=now,
        stacks=tuple(sorted({stack for node in shown for stack in node.cells})),
        nodes=tuple(shown),
        hidden=len(nodes) - len(shown),
        counts=Counter(node.outcome for node in nodes),
    )


def _node(runs: Sequence[Run], now: dt.datetime) -> WallNode:
    last = max(runs, key=lambda run: run.started)
    night = [run for run in runs if run.started > last.started - dt.timedelta(hours=24)]
    cells = {run.stack: WallCell(run=run, outcome=_outcome(run)) for run in runs}
    worst = min((_outcome(run) for run in night), key=OUTCOMES.index)
    late = now - last.started > LATE and worst == "passed"
    return WallNode(name=last.node, newest=last, outcome="late" if late else worst, cells=cells)


def _outcome(run: Run) -> Outcome:
    return "passed" if run.status == "PASSED" else "failed" if run.status == "FAILED" else "unfit"


def _rank(node: WallNode) -> tuple[int, str, str]:
    return OUTCOMES.index(node.outcome), node.newest.device_model, node.name


def age(since: dt.datetime, now: dt.datetime) -> str:
    """`3 d`, `5 h`, `12 min`: how long ago, rounded down."""
    seconds = max(0.0, (now - since).total_seconds())
    length, unit = next((step for step in _STEPS if seconds >= step[0]), _STEPS[-1])
    return f"{int(seconds // length)} {unit}"
