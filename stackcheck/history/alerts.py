"""What the earlier nights of a machine say of its newest run. In: a history, a run. Out: `Finding`s.

Two of the rules of `regressions.py` look at earlier nights, and both only warn: a figure against the last
nights of the same chips, and a step that two nodes or two metrics agree on. The hard floor is judged by
`nightly/floor.py`, as it needs the certificate. What is watched: the figures that a bound judges; on a
machine without bounds, figures with a unit per second; and how near the numerics came to their gates.
"""

from __future__ import annotations

import datetime as dt
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stackcheck.history import regressions
from stackcheck.history.runs import Point, Query, Run

if TYPE_CHECKING:
    from stackcheck.history.history import History

OWN_NIGHTS = 30  # of the same chips, that a figure is compared with
POINTS_READ = 200_000  # at most, for the steps of one stack
NEW_NIGHTS = 10  # a step before them was warned of then
MARGIN_UNIT = "of the gate"  # of numeric_worst_margin: 1 is the gate itself
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
SHOWN = 5  # names in one sentence
Key = tuple[str, str, str]  # check, metric, chips
Rule = Literal["own nights", "step"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that got worse.

    Attributes:
        rule: `own nights`: a figure of the newest run against the last nights of the same chips. `step`: a
            change of level that two nodes or two metrics agree on.
        against: What the newest value was compared with, and the value; only for one figure.
    """

    rule: Rule
    stack: str
    device_model: str
    metrics: tuple[str, ...]  # `check metric` of what shows it
    nodes: tuple[str, ...]  # anonymous ids of the machines that show it; of single chips `node/place`
    loss: float  # the largest loss, as a share; of a numeric margin, in shares of its gate
    since: dt.date  # the night from which on it holds
    against: tuple[float, float, str] | None = None
    simulated: bool = False  # whether nobody ran it

    @property
    def words(self) -> str:
        """One sentence."""
        more = len(self.metrics) - SHOWN
        named = ", ".join(self.metrics[:SHOWN]) + (f" and {more} more" if more > 0 else "")
        if self.against:
            usual, value, unit = self.against
            return (
                f"{named} on {self.nodes[0]}: {value:.5g} {unit}, {self.loss:.1%} worse than its own nights "
                f"({usual:.5g})"
            )
        return f"a step since {self.since}: up to {self.loss:.1%} worse on {', '.join(self.nodes)} in {named}"


def look(history: History, run: Run) -> tuple[Finding, ...]:
    """What the history warns of, now that it has this run."""
    return (*below_own_nights(history, run), *steps(history, run))


def below_own_nights(history: History, run: Run) -> tuple[Finding, ...]:
    """The figures of a run that are worse than the last nights of the same chips, the worst first."""
    start = run.started - dt.timedelta(days=2 * OWN_NIGHTS)
    asked = Query(stack=run.stack, node=run.node, since=start, newest_first=False)
    pairs = [(other, point) for other, point in history.points(asked) if other.started <= run.started]
    newest = {key(point) for point in watched(point for other, point in pairs if other.record == run.record)}
    found = against_own_nights((other, point) for other, point in pairs if key(point) in newest)
    below = [each for each in found if each.is_below and each.run.record == run.record]
    return tuple(_finding(each) for each in sorted(below, key=lambda each: -each.loss))


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The newest value of some chips against their last nights."""

    run: Run
    point: Point
    usual: float
    loss: float
    is_below: bool


def against_own_nights(pairs: Iterable[tuple[Run, Point]]) -> list[Standing]:
    """For each metric of each chip its newest value against the nights before; the oldest pair comes first.

    A metric of fewer nights than `regressions.FEWEST_NIGHTS`, and one without a direction, is left out.
    """
    found: dict[tuple[str, str, Key], list[tuple[Run, Point]]] = defaultdict(list)
    for run, point in pairs:
        if run.status != "UNFIT":
            found[run.stack, run.node, key(point)].append((run, point))
    standings = (_standing(*each[-1], each[:-1]) for each in found.values())
    return [each for each in standings if each]


def _standing(run: Run, point: Point, before: Sequence[tuple[Run, Point]]) -> Standing | None:
    direction = regressions.better(point.unit, point.direction)
    values = [value_of(old) for other, old in before if other.simulated == run.simulated][-OWN_NIGHTS:]
    if direction is None or len(values) < regressions.FEWEST_NIGHTS:
        return None
    value, usual = value_of(point), statistics.median(values)
    is_below = bool(regressions.below_own_baseline(values, value, direction))
    loss = regressions.loss(usual, value, direction)
    return Standing(run=run, point=point, usual=usual, loss=loss, is_below=is_below)


def _finding(found: Standing) -> Finding:
    run, point = found.run, found.point
    shift = 1.0 if point.unit == MARGIN_UNIT else 0.0
    return Finding(
        rule="own nights",
        stack=run.stack,
        device_model=run.device_model,
        metrics=(f"{point.check} {point.name}",),
        nodes=(chip(run, point),),
        loss=found.loss,
        since=run.started.date(),
        against=(found.usual - shift, point.value, point.unit),
        simulated=run.simulated,
    )


def steps(history: History, run: Run) -> tuple[Finding, ...]:
    """The steps of the last nights that two nodes or two metrics show, for a stack on a device model."""
    start = run.started - dt.timedelta(days=regressions.NIGHTS)
    # The newest points, if there are too many: a shared history can have forty machines.
    asked = Query(stack=run.stack, device_model=run.device_model, since=start, limit=POINTS_READ)
    pairs = [
        (other, point)
        for other, point in reversed(history.points(asked))
        if other.status != "UNFIT" and other.simulated == run.simulated
    ]
    newest = (run.started - EPOCH).days
    return tuple(
        Finding(
            rule="step",
            stack=run.stack,
            device_model=run.device_model,
            metrics=warned.metrics,
            nodes=warned.nodes,
            loss=warned.loss,
            since=(EPOCH + dt.timedelta(days=warned.night)).date(),
            simulated=run.simulated,
        )
        for warned in regressions.warnings(series(pairs))
        if newest - warned.night < NEW_NIGHTS
    )


def series(pairs: Iterable[tuple[Run, Point]]) -> Iterator[regressions.Series]:
    """What `regressions.warnings` reads: a series for each watched metric of each chip, the oldest first."""
    pairs = list(pairs)
    found: dict[tuple[str, Key], list[tuple[Run, Point]]] = defaultdict(list)
    for run, point in pairs:
        found[run.node, key(point)].append((run, point))
    chosen = {(point.check, point.name) for point in watched(point for _, point in pairs)}
    for (_, (check, metric, _)), each in found.items():
        direction = regressions.better(each[-1][1].unit, each[-1][1].direction)
        if (check, metric) in chosen and direction:
            yield regressions.Series(
                node=each[-1][0].node,  # two chips of one machine are one witness
                check=check,
                metric=metric,
                direction=direction,
                nights=tuple((run.started - EPOCH).days for run, _ in each),
                values=tuple(value_of(point) for _, point in each),
            )


def watched(points: Iterable[Point]) -> list[Point]:
    """The points that are watched."""
    every = list(points)
    margins = [point for point in every if point.unit == MARGIN_UNIT]
    judged = [point for point in every if point.direction is not None and point.bound is not None]
    return margins + (judged or [point for point in every if is_figure(point)])


def is_figure(point: Point) -> bool:
    """Whether a point is a speed, though no bound judges it."""
    return point.unit.endswith("/s") or "/s/" in point.unit


def value_of(point: Point) -> float:
    """The number that is watched. Of a numeric margin 1 is added: its losses are then shares of the gate."""
    return point.value + 1 if point.unit == MARGIN_UNIT else point.value


def key(point: Point) -> Key:
    """A metric of some chips of a machine."""
    return point.check, point.name, point.chips or ""


def chip(run: Run, point: Point) -> str:
    """The anonymous id of what measured a point: the machine, or some of its chips."""
    return run.node if point.chips is None else f"{run.node}/{point.chips}"
