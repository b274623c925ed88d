"""What failed last night and why. In: runs, oldest first. Out: `Night`: its runs, and what failed. Pure.

Silence is never success: a night without a run is said, and the newest night that had one is shown.
"""

import datetime as dt
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stackcheck.history.runs import Run
from stackcheck.report.standing import StandingMachine, machine_of

_Place = tuple[str, "StandingMachine", int]
LENGTH = dt.timedelta(hours=24)


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """A run that did not pass, and how many runs in a row did not, on this stack and machine.

    Attributes:
        since: When the series of runs without a pass began, on this stack and machine; None: it is new.
        others: How many earlier runs of this night did not pass either, on the same stack and machine.
    """

    run: Run
    since: dt.datetime | None
    nights: int
    first: bool = False
    others: int = 0
    nodes: int = 1


@dataclass(frozen=True, kw_only=True)
class Night:
    """The runs of one night, counted by verdict.

    Attributes:
        missing: Whether no run started in the last 24 hours.
        troubles: The newest run of each stack and machine that did not pass, FAILED first.
    """

    missing: bool
    newest: dt.datetime | None
    counts: dict[str, int]
    runs: tuple[Run, ...]
    troubles: tuple[Trouble, ...]


def last_night(runs: Sequence[Run], now: dt.datetime) -> Night:
    """The runs of the last 24 hours; if there are none, those of the 24 hours before the newest run."""
    if not runs:
        return Night(missing=True, newest=None, counts={}, runs=(), troubles=())
    newest = runs[-1].started
    missing = newest <= now - LENGTH
    end = newest if missing else now
    chosen = tuple(run for run in runs if end - LENGTH < run.started <= end)
    bad: dict[_Place, list[Run]] = {}
    for run in chosen:
        if run.status != "PASSED":
            bad.setdefault(_place(run), []).append(run)
    troubles = [_trouble(found, runs) for found in bad.values()]
    return Night(
        missing=missing,
        newest=newest,
        counts=dict(Counter(run.status for run in chosen)),
        runs=chosen,
        troubles=tuple(sorted(troubles, key=lambda item: (item.run.status != "FAILED", item.run.stack))),
    )


def _trouble(bad: Sequence[Run], runs: Sequence[Run]) -> Trouble:
    run = bad[-1]
    row = _before(run, runs)
    return Trouble(
        run=run,
        since=row[-1].started if row else None,
        nights=len(row) + 1,
        first=not any(other.started < run.started and _place(other) == _place(run) for other in runs),
        others=len(bad) - 1,
        nodes=len({each.node for each in bad}),
    )


def _before(run: Run, runs: Sequence[Run]) -> list[Run]:
    """The runs on the same stack and machine just before this one that did not pass either, newest first."""
    found: list[Run] = []
    for other in reversed(runs):
        if other.started >= run.started or _place(other) != _place(run):
            continue
        if other.status == "PASSED":
            break
        found.append(other)
    return found


def _place(run: Run) -> _Place:
    return run.stack, machine_of(run), run.device_count
