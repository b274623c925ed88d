"""The data of the page's plots and tables, which read it when they are first seen. In: `Content`. Out: JSON.

A block is the text of one `<script type="application/json">`; a browser does not parse it before it is asked
to. Numbers have five digits, names are written once, so that ten thousand runs stay a few megabytes.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stackcheck.history.runs import Run
from stackcheck.report.content import Content, Detail
from stackcheck.report.speed import SpeedGroup, SpeedSeries

DIGITS = 5
WARNED, DAY_S = 3, 24 * 3600
SHORT = 12  # characters of a digest that name it
REASONS, REASON_LENGTH = 3, 240
# Characters that could end the element, or that JavaScript once took for line ends.
_ESCAPED = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def blocks(content: Content) -> dict[str, str]:
    """Element id -> JSON text without any character that HTML could read as markup."""
    at = {run.record: number for number, run in enumerate(content.runs)}
    found: dict[str, Any] = {
        "data-runs": _runs(content.runs),
        "data-groups": [_group(group) for group in content.groups],
        "data-details": {
            at[record]: _detail(item) for record, item in content.details.items() if record in at
        },
        "data-curves": _curves(content, at),
        "data-losses": _losses(content, at),
    }
    for number, group in enumerate(content.groups):
        found[f"data-series-{number}"] = {
            "runs": [at[run.record] for run in group.runs],
            "series": [_series(series) for series in group.series],
        }
    return {name: text_of(value) for name, value in found.items()}


def text_of(value: object) -> str:
    """JSON that can stand inside an element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.translate(_ESCAPED)


def rounded(value: float | None) -> float | int | None:
    """A number with five digits; None for what is not a finite number."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


def _runs(runs: Sequence[Run]) -> dict[str, Any]:
    names: dict[str, dict[str, int]] = {key: {} for key in ("stack", "device", "driver", "node", "tier")}

    def number(key: str, text: str) -> int:
        return names[key].setdefault(text, len(names[key]))

    rows = [
        [
            int(run.started.timestamp()),
            round((run.finished - run.started).total_seconds()),
            number("stack", run.stack),
            number("device", run.device_model),
            run.device_count,
            number("driver", run.driver or ""),
            number("node", run.node),
            number("tier", run.tier),
            run.status[0],
            int(run.simulated),
            _short(run.record),
            _short(run.image or ""),
        ]
        for run in runs
    ]
    why = {at: _why(run) for at, run in enumerate(runs) if run.status != "PASSED"}
    return {"names": {key: [*texts] for key, texts in names.items()}, "rows": rows, "why": why}


def _why(run: Run) -> list[str]:
    lines = [" ".join(reason.split()) for reason in run.reasons[:REASONS]]
    more = len(run.reasons) - REASONS
    return [line[:REASON_LENGTH] for line in lines] + ([f"and {more} more reasons"] if more > 0 else [])


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:SHORT]


def _group(group: SpeedGroup) -> dict[str, Any]:
    return {
        "title": group.title,
        "runs": len(group.runs),
        "simulated": _simulated(group.runs),
        "warned": [
            [each.night * DAY_S, rounded(each.loss), list(each.nodes), len(each.metrics)]
            for each in group.warned[:WARNED]
        ],
    }


def _simulated(runs: Iterable[Run]) -> str:
    """Whether none, some or all of the runs were simulated."""
    found = {run.simulated for run in runs}
    return "all" if found == {True} else "some" if True in found else "none"


def _series(series: SpeedSeries) -> dict[str, Any]:
    return {
        "check": series.check,
        "name": series.name,
        "unit": series.unit,
        "direction": series.direction,
        "bound": rounded(series.bound),
        "ceiling": rounded(series.ceiling),
        "month": rounded(series.month),
        "shifts": [[shift.at, rounded(shift.loss), shift.node] for shift in series.shifts],
        "values": [rounded(value) for value in series.values],
    }


def _detail(detail: Detail) -> dict[str, Any]:
    return {
        "failures": [[item.check, item.outcome, item.proves, list(item.reason)] for item in detail.failures],
        "readings": [
            [
                item.check,
                rounded(item.seconds),
                item.clock_mhz,
                item.clock_min_mhz,
                item.power_w,
                item.temperature_c,
                ", ".join(item.throttle),
            ]
            for item in detail.readings
        ],
    }


def _curves(content: Content, at: Mapping[str, int]) -> list[dict[str, Any]]:
    """The bandwidth curves of the newest run of each group that has them."""
    found = []
    for group in content.groups:
        run = next((run for run in reversed(group.runs) if _has_curves(content, run)), None)
        if run is not None:
            curves = content.details[run.record].curves
            found.append(
                {"title": group.title, "run": at[run.record], "curves": [_curve(curve) for curve in curves]}
            )
    return found


def _has_curves(content: Content, run: Run) -> bool:
    return run.record in content.details and bool(content.details[run.record].curves)


def _curve(curve: Any) -> dict[str, Any]:
    return {
        "name": curve.name,
        "unit": curve.unit,
        "sizes": list(curve.sizes),
        "values": [rounded(value) for value in curve.values],
        "bounds": [rounded(value) for value in curve.bounds],
        "ceilings": [rounded(value) for value in curve.ceilings],
    }


def _losses(content: Content, at: Mapping[str, int]) -> dict[str, Any] | None:
    """The band, and the losses of the newest run of each group; None without a band."""
    if content.band is None:
        return None
    newest: dict[tuple[str, str, int], Run] = {}
    for run in content.runs:
        if run.record in content.details and content.details[run.record].losses:
            newest[run.stack, run.device_model, run.device_count] = run
    return {
        "source": content.band.source,
        "reference": [rounded(value) for value in content.band.losses],
        "low": [rounded(value) for value in content.band.low],
        "high": [rounded(value) for value in content.band.high],
        "runs": [
            {
                "title": f"{run.stack} on {run.device_count} x {run.device_model}",
                "run": at[run.record],
                "losses": [rounded(value) for value in content.details[run.record].losses],
            }
            for run in newest.values()
        ],
    }
