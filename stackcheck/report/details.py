"""What single runs tell beyond their index: failures, evidence, bandwidth and loss curves.

In: a `RunResult`. Out: plain rows and curves. The result was written in an image that may not be trusted, so
what is evidence there is read as foreign data: a value of the wrong type is left out. Pure.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stackcheck.errors import ConfigurationError
from stackcheck.suite.results import CheckResult, Metric, RunResult

REASON_LINES, REASON_LENGTH = 6, 240
LOSSES = "train_loss_last"  # its repeats are the losses of every step of the tiny job
REFERENCE = "trainers/curves/CPU/llama-tiny.json"


@dataclass(frozen=True, kw_only=True)
class ShownFailure:
    """A check that did not pass: what it proves, and the first lines of why."""

    check: str
    outcome: str
    proves: str | None
    reason: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The machine while one check ran; `None` is a reading that the machine does not have."""

    check: str
    seconds: float
    clock_mhz: float | None
    clock_min_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    throttle: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DetailCurve:
    """Bandwidth over message size; a size without a bound has None there."""

    name: str
    unit: str
    sizes: tuple[int, ...]
    values: tuple[float, ...]
    bounds: tuple[float | None, ...]
    ceilings: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class LossBand:
    """The reference of the tiny training job: its losses, and the band around them."""

    losses: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    source: str


def failures(result: RunResult) -> tuple[ShownFailure, ...]:
    """The checks that failed, ended with an error or found the machine unfit."""
    bad = [check for check in result.checks if check.outcome in {"failed", "error", "invalid"}]
    return tuple(
        ShownFailure(check=check.id, outcome=check.outcome, proves=check.doc, reason=_lines(check.reason))
        for check in bad
    )


def _lines(text: str | None) -> tuple[str, ...]:
    lines = [line.rstrip() for line in (text or "").splitlines() if line.strip()]
    more = [f"… {len(lines) - REASON_LINES} more lines"] if len(lines) > REASON_LINES else []
    return (*(_cut(line) for line in lines[:REASON_LINES]), *more)


def _cut(line: str) -> str:
    return line if len(line) <= REASON_LENGTH else line[: REASON_LENGTH - 1] + "…"


def readings(result: RunResult) -> tuple[Reading, ...]:
    """The machine's state in each check that watched it."""
    return tuple(_reading(check) for check in result.checks if _during(check))


def _during(check: CheckResult) -> Mapping[str, Any]:
    found = check.evidence.after.get("during")
    return found if isinstance(found, dict) else {}


def _reading(check: CheckResult) -> Reading:
    during = _during(check)
    throttle = during.get("throttle")
    return Reading(
        check=check.id,
        seconds=check.seconds,
        clock_mhz=_number(during.get("clock_mhz_median")),
        clock_min_mhz=_number(during.get("clock_mhz_min")),
        power_w=_number(during.get("power_w_max")),
        temperature_c=_number(during.get("temperature_c_max")),
        throttle=tuple(map(str, throttle)) if isinstance(throttle, list) else (),
    )


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return round(float(value), 3) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]


def bandwidth(result: RunResult) -> tuple[DetailCurve, ...]:
    """Each bandwidth that was measured at three message sizes or more."""
    found: dict[str, dict[int, Metric]] = {}
    for metric in _metrics(result):
        size = metric.conditions.get("bytes")
        if metric.name.endswith("_busbw") and isinstance(size, int) and metric.value is not None:
            kept = found.setdefault(_curve_name(metric), {})
            kept[size] = metric if metric.bound is not None else kept.get(size, metric)
    return tuple(_curve(name, sizes) for name, sizes in found.items() if len(sizes) >= 3)


def _metrics(result: RunResult) -> Iterator[Metric]:
    for check in result.checks:
        yield from check.metrics


def _curve_name(metric: Metric) -> str:
    dtype = metric.conditions.get("dtype")
    return f"{metric.name} ({dtype})" if isinstance(dtype, str) else metric.name


def _curve(name: str, sizes: Mapping[int, Metric]) -> DetailCurve:
    ordered = [sizes[size] for size in sorted(sizes)]
    return DetailCurve(
        name=name,
        unit=ordered[0].unit,
        sizes=tuple(sorted(sizes)),
        values=tuple(metric.value or 0.0 for metric in ordered),
        bounds=tuple(metric.bound for metric in ordered),
        ceilings=tuple(metric.ceiling for metric in ordered),
    )


def losses(result: RunResult) -> tuple[float | None, ...]:
    """The losses of every step of the tiny training job; empty if the run did not train."""
    found = [metric for metric in _metrics(result) if metric.name == LOSSES]
    return found[0].repeats if found else ()


def loss_band(root: Path) -> LossBand | None:
    """The reference curve of this checkout; None where the trainers are not there.

    Raises:
        ConfigurationError: The file is damaged.
    """
    path = root / REFERENCE
    if not path.is_file():
        return None
    try:
        facts = json.loads(path.read_bytes())
        values = [float(loss) for loss in facts["losses"]]
        first, last = float(facts["band"]["first"]), float(facts["band"]["last"])
        widths = _widths(first, last, len(values))
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise ConfigurationError(
            "the reference of the loss curves cannot be read",
            where=str(path),
            got=repr(error),
            expected="a loss curve of schema 1, with losses and a band",
            next_step="restore it: git checkout trainers/curves",
        ) from error
    return LossBand(
        losses=tuple(values),
        low=tuple(loss * (1 - width) for loss, width in zip(values, widths, strict=True)),
        high=tuple(loss * (1 + width) for loss, width in zip(values, widths, strict=True)),
        source=REFERENCE,
    )


def _widths(first: float, last: float, steps: int) -> Sequence[float]:
    """Relative half widths, as `Band.width` in trainers/loss_curve.py has them."""
    return [first * (last / first) ** (step / max(1, steps - 1)) for step in range(steps)]
