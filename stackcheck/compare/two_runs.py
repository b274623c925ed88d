"""Compare two runs. In: their metrics, and facts of machine and image. Out: a `Comparison`. Pure.

The ratio of a metric is B's value over A's. Its interval is a bootstrap: each side's repeats are drawn again
with replacement, 1000 times, and 95 % of the ratios of medians lie inside. Repeats of one process say nothing
of another night or chip, so a difference counts from 2 % on one machine, and from 5 % on two of one model.
"""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic_core import from_json

from stackcheck.errors import ConfigurationError, NothingSelectedError
from stackcheck.history import metrics, records, regressions
from stackcheck.history.runs import Point, Query, Run
from stackcheck.suite import results

if TYPE_CHECKING:
    from stackcheck.history.history import History

Verdict = Literal["worse", "unclear", "better", "changed", "only in A", "only in B", "equal"]
ORDER: tuple[Verdict, ...] = ("worse", "unclear", "better", "changed", "only in A", "only in B", "equal")

SAME_MACHINE, OTHER_MACHINE = 0.02, 0.05
DRAWS, SEED = 1000, 20261122
FEWEST_REPEATS = 3


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two runs.

    Attributes:
        facts: What may explain a difference: group -> name -> value, the likeliest causes first.
    """

    label: str
    node: str  # anonymous id of its machine
    points: tuple[Point, ...]
    facts: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One metric of both runs."""

    check: str
    name: str
    unit: str
    a: float | None  # a's value; None if A did not measure it
    b: float | None
    ratio: float | None  # b / a; None if one is missing, or a is 0
    interval: tuple[float, float] | None  # the ratio's interval; None if one side has fewer than 3 repeats
    gated: bool  # whether a bound judges the metric
    verdict: Verdict  # what the difference means
    loss: float  # how much worse B is; negative if it is better, 0 where nothing says what is better


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Something that the two runs do not share; `None` where a side lacks it."""

    group: str
    name: str
    a: str | None
    b: str | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs side by side: what matters first, then what may have caused it."""

    a: Side
    b: Side
    margin: float
    metrics: tuple[Compared, ...]
    differences: tuple[Difference, ...]

    def count(self, verdict: Verdict) -> int:
        """How many metrics have a verdict."""
        return sum(each.verdict == verdict for each in self.metrics)


def compare(a: Side, b: Side) -> Comparison:
    """Every metric of two runs, and what differs between them."""
    margin = SAME_MACHINE if a.node == b.node else OTHER_MACHINE
    mine = {(point.check, point.name, point.unit): point for point in a.points}
    yours = {(point.check, point.name, point.unit): point for point in b.points}
    keys = dict.fromkeys((*mine, *yours))
    metrics = [_compared(key, mine.get(key), yours.get(key), margin) for key in keys]
    metrics.sort(key=lambda each: (ORDER.index(each.verdict), not each.gated, -abs(each.loss)))
    return Comparison(
        a=a, b=b, margin=margin, metrics=tuple(metrics), differences=tuple(_differences(a.facts, b.facts))
    )


def _compared(key: tuple[str, str, str], a: Point | None, b: Point | None, margin: float) -> Compared:
    check, name, unit = key
    direction = (b.direction if b else None) or (a.direction if a else None)
    better = regressions.better(unit, direction)
    ratio = b.value / a.value if a and b and a.value else None
    interval = _interval(a.repeats, b.repeats) if a and b else None
    verdict: Verdict = "only in B" if a is None else "only in A"
    if a and b:
        range_ = interval or ((ratio, ratio) if ratio is not None else (1.0, 1.0))
        verdict = "equal" if a.value == b.value else _verdict(range_, better, margin)
        if ratio is None and a.value != b.value:  # from 0 to something
            verdict = "changed"
    change = ratio - 1 if ratio is not None else 0.0
    return Compared(
        check=check,
        name=name,
        unit=unit,
        a=a.value if a else None,
        b=b.value if b else None,
        ratio=ratio,
        interval=interval,
        gated=direction is not None,
        verdict=verdict,
        loss={"min": -change, "max": change, None: 0.0}[better],
    )


def _verdict(interval: tuple[float, float], better: Literal["min", "max"] | None, margin: float) -> Verdict:
    """What an interval of the ratio means: it lies inside the margin, across its edge, or outside."""
    low, high = interval
    if 1 - margin <= low and high <= 1 + margin:
        return "equal"
    if low <= 1 + margin and high >= 1 - margin:
        return "unclear"
    if better is None:
        return "changed"
    return "better" if (low > 1 + margin) == (better == "min") else "worse"


def _interval(a: Sequence[float], b: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of the ratio of medians, by a bootstrap that gives the same answer each time."""
    if min(len(a), len(b)) < FEWEST_REPEATS or min(a) <= 0:
        return None
    chance = random.Random(SEED)  # noqa: S311  # no secret depends on it
    ratios = sorted(
        statistics.median(chance.choices(b, k=len(b))) / statistics.median(chance.choices(a, k=len(a)))
        for _ in range(DRAWS)
    )
    return ratios[round(0.025 * DRAWS)], ratios[round(0.975 * DRAWS) - 1]


def _differences(
    a: Mapping[str, Mapping[str, str]], b: Mapping[str, Mapping[str, str]]
) -> Iterator[Difference]:
    for group in dict.fromkeys((*a, *b)):
        mine, yours = a.get(group, {}), b.get(group, {})
        for name in dict.fromkeys((*mine, *yours)):
            if mine.get(name) != yours.get(name):
                yield Difference(group=group, name=name, a=mine.get(name), b=yours.get(name))


def facts_of(result: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """What a result says of its machine and image, in groups; the likeliest causes of a difference first."""
    host = result["host"]
    devices = host["devices"]
    image = result["image"] or {}
    return {
        "driver": _texts({"driver": host["driver"], "kernel": host["kernel"]}),
        "device": _texts(
            {
                "model": _each(devices, "model"),
                "count": len(devices),
                "firmware": _each(devices, "firmware"),
                "power cap": _each(devices, "power_cap_w"),
                "partition": host.get("partition"),
                "NVLS": host.get("nvls"),
            }
        ),
        "software": _texts(result["software"]),
        "environment": _texts(result["environment"]),
        "choices": _choices(result),
        "suites": _texts(
            {"tier": result["tier"]}
            | {key: value for key, value in result["inputs"].items() if key != "matrix"}
        ),
        "machine": _texts(
            {
                "devices": _each(devices, "id"),
                "processor": host.get("cpu"),
                "memory": host.get("memory_bytes"),
            }
        ),
        "image": _texts({"config": image.get("config_digest"), "reference": image.get("reference")}),
    }


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items() if value is not None}


def _each(devices: Sequence[Mapping[str, Any]], field: str) -> str | None:
    return (
        ", ".join(sorted({str(device[field]) for device in devices if device.get(field) is not None})) or None
    )


def _choices(result: Mapping[str, Any]) -> dict[str, str]:
    """The algorithm, kernel or backend that a library chose for a metric, where a check records it."""
    found = {}
    for check in result["checks"]:
        for metric in check["metrics"]:
            conditions = metric.get("conditions", {})
            place = f"{check['id']} {metric['name']} {conditions.get('bytes', '')}".strip()
            for key in ("choice", "kernel", "backend", "library"):
                if isinstance(conditions.get(key), str):
                    found[f"{place} {key}"] = conditions[key]
    return found


_PREFIX = re.compile(r"(sha256:)?[0-9a-f]{4,64}")
_DRIVER = "driver="
SHOWN = 8  # digits of a run id


def find(name: str, history: History, *, like: Run | None = None) -> tuple[Side, Run | None]:
    """The side that a name stands for, and its run; None for a file that is not in the history.

    Args:
        name: The beginning of a run id, record or image digest; a result.json; a stack id or image, or a
            pattern on them: its newest run; `driver=VERSION`: the newest run with this driver.
        history: Where to look.
        like: For `driver=`, the other side: the run has to be of its stack and device model.

    Raises:
        NothingSelectedError: Nothing has this name.
        ConfigurationError: Several runs have it.
    """
    if Path(name).is_file():
        return _of_file(Path(name)), None
    run = _of_digits(name, history) or _newest(name, history, like)
    if run is None:
        raise NothingSelectedError(
            "the history has no such run",
            got=name,
            expected="a run id, a result.json, a stack id, an image or driver=VERSION",
            next_step="stackcheck history",
        )
    return _of_run(run, history), run


def of_result(body: bytes, label: str) -> Side:
    """The side of a result.json."""
    result = from_json(body)
    found = metrics.of(result)
    points = tuple(records.points(found, label))
    return Side(label=label, node=found["run"]["node"], points=points, facts=facts_of(result))


def _of_file(path: Path) -> Side:
    body = results.read_result_file(path)
    results.parse(body, where=str(path))
    return of_result(body, str(path))


def _of_run(run: Run, history: History) -> Side:
    data = history.records.read(run.record)
    machine = f"{run.device_model} x{run.device_count}"
    driver = f", driver {run.driver}" if run.driver else ""
    when = f"{run.started:%Y-%m-%d %H:%M}"
    return of_result(
        records.result_of(data),
        f"{run.run_id[:SHOWN]} ({run.stack}, {machine}{driver}, {when}, {run.status})",
    )


def _of_digits(name: str, history: History) -> Run | None:
    """The one run whose id, record or image begins with these digits."""
    if not _PREFIX.fullmatch(name):
        return None
    found = {run.run_id: run for run in history.find(name)}
    images = {run.image for run in found.values()}
    if len(found) > 1 and len(images) == 1 and None not in images:
        return max(found.values(), key=lambda run: run.started)  # several runs of one image: the newest
    if len(found) > 1:
        raise ConfigurationError(
            "several runs begin with these digits",
            got=name,
            expected="one of " + ", ".join(sorted(found)[:5]),
            next_step="give more digits",
        )
    return next(iter(found.values()), None)


def _newest(name: str, history: History, like: Run | None) -> Run | None:
    if not name.startswith(_DRIVER):
        return history.latest(Query(stack=name))
    stack, model = (like.stack, like.device_model) if like else (None, None)
    return history.latest(Query(driver=name.removeprefix(_DRIVER), stack=stack, device_model=model))
