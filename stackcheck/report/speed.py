"""How fast each stack is. In: runs and points. Out: `SpeedGroup`s, each of one metric over the runs. Pure.

A group is one stack on one number of one device model; drivers change inside of it, so that a step at a new
driver shows. Of the points those that a bound judges count; where there are none (a processor has no bounds),
those with a unit per second. Steps are those of history/regressions.py: each is shown, and one that two
nodes or two figures agree on is a warning.
"""

import dataclasses
import datetime as dt
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from stackcheck.history import alerts, regressions
from stackcheck.history.runs import Point, Run

# A month ago: the two weeks around the day 30 days before the newest run.
MONTH_FROM, MONTH_TO = dt.timedelta(days=37), dt.timedelta(days=23)
Direction = Literal["min", "max"]
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


@dataclass(frozen=True, kw_only=True)
class Shift:
    """A change of level on one node: its first run in the group, and by which share it is worse."""

    at: int
    node: str
    loss: float


@dataclass(frozen=True, kw_only=True)
class SpeedSeries:
    """One metric of one check over the runs of a group.

    Attributes:
        values: One for each run of the group; None where the run has no such figure.
        month: The median of the figures a month before the newest; `None` without such figures.
    """

    check: str
    name: str
    unit: str
    direction: Direction | None
    bound: float | None
    ceiling: float | None
    values: tuple[float | None, ...]
    month: float | None
    shifts: tuple[Shift, ...] = ()

    @property
    def latest(self) -> float | None:
        """The figure of the newest run that has one."""
        return next((value for value in reversed(self.values) if value is not None), None)

    @property
    def margin(self) -> float | None:
        """By which share of the bound the newest figure is better than it; negative: worse."""
        if self.latest is None or not self.bound or self.direction is None:
            return None
        share = self.latest / self.bound - 1
        return share if self.direction == "min" else -share

    @property
    def change(self) -> float | None:
        """By which share of last month's figure the newest one is larger."""
        return None if self.latest is None or not self.month else self.latest / self.month - 1


@dataclass(frozen=True, kw_only=True)
class SpeedGroup:
    """One stack on one number of one device model, with its runs, oldest first.

    Attributes:
        warned: The steps to the worse that two nodes or two figures agree on; `night` counts days since 1970.
    """

    stack: str
    device_model: str
    device_count: int
    runs: tuple[Run, ...]
    series: tuple[SpeedSeries, ...]
    warned: tuple[regressions.Warned, ...] = ()

    @property
    def title(self) -> str:
        """The heading: stack, number of devices and model."""
        return f"{self.stack} on {self.device_count} x {self.device_model}"


_Place = tuple[str, str, int]
_Name = tuple[str, str]  # check and metric


class _Gathered:
    """The figures of one group while its points are read. It keeps numbers: there are millions of points."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.values: dict[_Name, dict[str, float]] = {}
        self.newest: dict[_Name, tuple[dt.datetime, Point]] = {}

    def add(self, run: Run, point: Point) -> None:
        name = point.check, point.name
        self.runs.setdefault(run.record, run)
        self.values.setdefault(name, {})[run.record] = point.value
        if name not in self.newest or self.newest[name][0] <= run.started:
            self.newest[name] = run.started, point

    def chosen(self) -> list[_Name]:
        """What a bound judges; else what has a unit per second."""
        judged = [name for name, (_, point) in self.newest.items() if _is_judged(point)]
        return sorted(judged or (name for name, (_, point) in self.newest.items() if alerts.is_figure(point)))


def groups(points: Iterable[tuple[Run, Point]]) -> tuple[SpeedGroup, ...]:
    """The groups of measured points, by stack and device."""
    places: dict[_Place, _Gathered] = {}
    for run, point in points:
        place = run.stack, run.device_model, run.device_count
        places.setdefault(place, _Gathered()).add(run, point)
    return tuple(_group(place, places[place]) for place in sorted(places))


def _is_judged(point: Point) -> bool:
    return point.direction is not None and point.bound is not None


def _group(place: _Place, gathered: _Gathered) -> SpeedGroup:
    runs = tuple(sorted(gathered.runs.values(), key=lambda run: run.started))
    series = tuple(_series(gathered, name, runs) for name in gathered.chosen())
    by_node = [each for item in series for each in _by_node(item, runs)]
    return SpeedGroup(
        stack=place[0],
        device_model=place[1],
        device_count=place[2],
        runs=runs,
        series=series,
        warned=tuple(regressions.warnings(by_node)),
    )


def _series(gathered: _Gathered, name: _Name, runs: Sequence[Run]) -> SpeedSeries:
    values = [gathered.values[name].get(run.record) for run in runs]
    _, last = gathered.newest[name]
    found = SpeedSeries(
        check=last.check,
        name=last.name,
        unit=last.unit,
        direction=last.direction,
        bound=last.bound,
        ceiling=last.ceiling,
        values=tuple(values),
        month=_month(runs, values),
    )
    return dataclasses.replace(found, shifts=tuple(_shifts(found, runs)))


def _shifts(series: SpeedSeries, runs: Sequence[Run]) -> Iterator[Shift]:
    """The steps on each node: chips differ more than nights do, so nodes are never mixed."""
    if series.direction is None:
        return
    for node, numbers in _numbers(series, runs).items():
        values = [series.values[number] or 0.0 for number in numbers]
        for step in regressions.steps(values, series.direction):
            yield Shift(at=numbers[step.night], node=node, loss=step.loss)


def _by_node(series: SpeedSeries, runs: Sequence[Run]) -> Iterator[regressions.Series]:
    """A series as regressions.py reads it: one for each node."""
    if series.direction is None:
        return
    for node, numbers in _numbers(series, runs).items():
        yield regressions.Series(
            node=node,
            check=series.check,
            metric=series.name,
            direction=series.direction,
            nights=tuple((runs[number].started - EPOCH).days for number in numbers),
            values=tuple(series.values[number] or 0.0 for number in numbers),
        )


def _numbers(series: SpeedSeries, runs: Sequence[Run]) -> dict[str, list[int]]:
    """Node -> the numbers of its runs that have a figure."""
    found: dict[str, list[int]] = {}
    for number, run in enumerate(runs):
        if series.values[number] is not None:
            found.setdefault(run.node, []).append(number)
    return found


def _month(runs: Sequence[Run], values: Sequence[float | None]) -> float | None:
    """The median of the figures a month before the newest one."""
    pairs = [(run, value) for run, value in zip(runs, values, strict=True) if value is not None]
    newest = pairs[-1][0].started
    old = [value for run, value in pairs if newest - MONTH_FROM <= run.started <= newest - MONTH_TO]
    return statistics.median(old) if old else None
