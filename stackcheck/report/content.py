"""Everything that a report says. In: a history, what a target publishes, a checkout. Out: `Content`.

The page, the markdown and the figures for Prometheus are three views of one `Content`.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stackcheck.errors import StackcheckError
from stackcheck.history import alerts
from stackcheck.history.records import result_of
from stackcheck.history.runs import Query
from stackcheck.report import details, night, speed, standing, verb_files
from stackcheck.report.wall import Wall, wall
from stackcheck.suite import results

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from stackcheck.history.alerts import Finding
    from stackcheck.history.history import History
    from stackcheck.history.runs import Point, Run
    from stackcheck.report.details import LossBand
    from stackcheck.report.others import Others
    from stackcheck.report.published import PublishedImage
    from stackcheck.report.verb_files import Campaign, FleetFile, NightlyFile

WINDOW = 400  # runs whose points are read at once: more would need gigabytes
COMPARED = 60  # runs of last night that are compared with earlier ones
DETAILED = 80  # runs whose records are read; a record has up to a megabyte


@dataclass(frozen=True, kw_only=True)
class Detail:
    """What the record of one run tells beyond the index."""

    failures: tuple[details.ShownFailure, ...]
    readings: tuple[details.Reading, ...]
    curves: tuple[details.DetailCurve, ...]
    losses: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class Offered:
    """The images that a target offers.

    Attributes:
        problem: Why the images are not known; then nothing can be said about certificates.
    """

    target: str
    images: tuple[PublishedImage, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a report says.

    Attributes:
        here: The machine that is shown first; None if there is nothing to show.
        details: Record of a run -> what it tells; only of the runs that are looked at most.
        below: Figures of last night that are worse than the last nights of the same chips.
        refresh_s: A page for a wall: it begins with the fleet, and a browser loads it again so often.
    """

    made: dt.datetime
    here: standing.StandingMachine | None
    machines: tuple[standing.StandingMachine, ...]
    offered: Offered
    runs: tuple[Run, ...]
    cells: tuple[standing.StandingCell, ...]
    warnings: tuple[str, ...]
    night: night.Night
    groups: tuple[speed.SpeedGroup, ...]
    details: dict[str, Detail]
    band: LossBand | None
    campaign: Campaign | None
    nightly: NightlyFile | None
    below: tuple[Finding, ...]
    problems: tuple[str, ...]
    fleets: tuple[FleetFile, ...] = ()
    refresh_s: int | None = None
    others: tuple[Others, ...] = ()

    @property
    def wall(self) -> Wall:
        """The nodes of the fleet, by stacks."""
        return wall(self.runs, self.made)

    @property
    def simulated(self) -> int:
        """How many runs nobody ran."""
        return sum(run.simulated for run in self.runs)

    def simulated_run(self, run_id: str) -> bool:
        """Whether the run of a certificate was simulated; a run that the history lacks is not known to be."""
        return any(run.simulated for run in self.runs if run.run_id == run_id)


def gather(
    history: History,
    offered: Offered,
    *,
    root: Path,
    now: dt.datetime,
    since: dt.datetime | None,
    here: standing.StandingMachine | None = None,
    asked: standing.StandingMachine | None = None,
    campaign: Campaign | None = None,
    nightly: NightlyFile | None = None,
    refresh_s: int | None = None,
    report: Callable[[str], None],
) -> Content:
    """Ask the history for what a report says."""
    runs = tuple(history.runs(Query(since=since, newest_first=False)))
    report(f"runs: {len(runs)}; published images: {len(offered.images)}")
    groups = speed.groups(_points(history, runs))
    found_night = night.last_night(runs, now)
    found, problems = _details(history, _notable(runs, groups, found_night), report)
    fleets, unread = verb_files.load_fleets(root)
    machines = _machines(standing.machines(runs, offered.images), asked)
    cells = standing.cells(runs, offered.images, now)
    return Content(
        made=now,
        here=_first(asked or here, machines, runs),
        machines=machines,
        offered=offered,
        runs=runs,
        cells=cells,
        warnings=standing.warnings(cells),
        night=found_night,
        groups=groups,
        details=found,
        band=details.loss_band(root),
        campaign=campaign,
        nightly=nightly,
        below=_below(history, found_night),
        problems=(*problems, *unread),
        fleets=fleets,
        refresh_s=refresh_s,
    )


def _points(history: History, runs: Sequence[Run]) -> Iterator[tuple[Run, Point]]:
    """The points that matter for speed, window by window, oldest first."""
    for start in range(0, len(runs), WINDOW):
        window = runs[start : start + WINDOW]
        until = window[-1].started + dt.timedelta(microseconds=1)
        wanted = {run.record for run in window}  # a window's edge may cut runs of one moment
        query = Query(since=window[0].started, until=until, newest_first=False)
        for run, point in history.points(query):
            if run.record in wanted and (point.direction is not None or alerts.is_figure(point)):
                yield run, point


def _below(history: History, last: night.Night) -> tuple[Finding, ...]:
    """What the newest run of each stack and machine of last night measured worse than its own nights."""
    newest = {(run.stack, run.node): run for run in last.runs if run.status != "UNFIT"}
    chosen = list(newest.values())[-COMPARED:]
    return tuple(each for run in chosen for each in alerts.below_own_nights(history, run))


def _notable(runs: Sequence[Run], groups: Iterable[speed.SpeedGroup], last: night.Night) -> list[Run]:
    """The runs that readers look at, the most important first:
    last night's failures, the newest of each stack and machine, the rest of last night, then earlier
    failures.
    """
    newest = {(run.stack, standing.machine_of(run), run.device_count): run for run in runs}
    grouped = [group.runs[-1] for group in groups]
    earlier = [run for run in reversed(runs) if run.status != "PASSED"]
    ordered = [*(item.run for item in last.troubles), *newest.values(), *grouped, *last.runs, *earlier]
    return list({run.record: run for run in ordered}.values())[:DETAILED]


def _details(
    history: History, runs: Iterable[Run], report: Callable[[str], None]
) -> tuple[dict[str, Detail], list[str]]:
    found: dict[str, Detail] = {}
    problems = []
    for run in runs:
        try:
            result = results.parse(result_of(history.records.read(run.record)), where=run.record)
        except StackcheckError as error:  # one damaged record does not hide the others
            report(f"not read: {run.record}: {error.what}")
            problems.append(f"{error.what}: {run.record}")
            continue
        found[run.record] = _detail(result)
    return found, problems


def _detail(result: results.RunResult) -> Detail:
    return Detail(
        failures=details.failures(result),
        readings=details.readings(result),
        curves=details.bandwidth(result),
        losses=details.losses(result),
    )


def _machines(
    known: tuple[standing.StandingMachine, ...], asked: standing.StandingMachine | None
) -> tuple[standing.StandingMachine, ...]:
    """The known machines and the one that is asked for: that nothing is certified for it is an answer."""
    return known if asked is None or asked in known else tuple(sorted((*known, asked)))


def _first(
    here: standing.StandingMachine | None, machines: Sequence[standing.StandingMachine], runs: Sequence[Run]
) -> standing.StandingMachine | None:
    """This host if anything is known about it, else the machine of the newest run."""
    if here in machines:
        return here
    if runs:
        return standing.machine_of(runs[-1])
    return machines[0] if machines else None
