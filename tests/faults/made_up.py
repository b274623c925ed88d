"""What healthy devices would answer where none can: a whole result to judge. In: a run. Out: JSON values.

A fabricated host answers the checks that ask its management library. Each other check of the tier has a
made-up pass here. Its figures are those that the checks of speed define (`workloads.gated`), a tenth better
than the bound; which check records a figure is taken from a run on real devices. The result is marked
`made_up`, and every verb refuses it: only a test that says so gets a verdict on its other reasons.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness import models, thresholds
from stackcheck.suite import bounds, expected
from workloads import attention_default, gated, speed_conditions

ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT / "docs/results/suites-h200-x2-standard.json"
BETTER = 1.1
TORCH = "2.13.0"  # of the image that nobody ran
WHOLE = {"arguments": [], "deselected": 0, "dropped": 0}
WITHOUT_PACKAGE = {"kind": "not in this stack", "needs": {"package": "flash-attn-4"}}
# Kinds of skips of the fabricated hosts' plugins; a skip of a check itself has a kind that the judge knows.
UNANSWERED = (None, "not without a GPU")


def whole(result: Mapping[str, Any]) -> dict[str, Any]:
    """The run, with an answer for every check that no device could answer."""
    host = result["host"]
    count = max(1, len(host["devices"]))
    ids = expected.check_ids(ROOT, vendor=host["vendor"], tier=result["tier"], count=count)
    own = {check["id"]: check for check in result["checks"] if is_answered(check)}
    recorded: dict[str, list[dict[str, Any]]] = {}
    for figure in _figures({device["model"] for device in host["devices"]}, count, _runtime(result)):
        for name in _recorded_by(figure, count):
            recorded.setdefault(name, []).append(figure)
    checks = [own.get(name) or _passed(name, recorded.get(name, [])) for name in ids]
    strange = own.keys() - set(ids)
    assert not strange, f"{sorted(strange)} are no checks of this checkout"
    return {
        **{name: result[name] for name in result if name not in {"output", "exit"}},
        "made_up": True,
        "software": {**result["software"], "torch": TORCH},
        "selection": {**WHOLE, "collected": len(checks)},
        "checks": checks,
    }


def is_answered(check: Mapping[str, Any]) -> bool:
    """Whether the check ran, or skipped by itself."""
    return check["outcome"] != "skipped" or (check["skip"] or {}).get("kind") not in UNANSWERED


def _passed(name: str, figures: list[dict[str, Any]]) -> dict[str, Any]:
    absent = name == speed_conditions.OPTIONAL_CHECK
    return {
        "id": name, "outcome": "skipped" if absent else "passed", "reason": "made up" if absent else None,
        "skip": WITHOUT_PACKAGE if absent else None, "cause": None, "seconds": 0.1, "devices": [],
        "metrics": figures, "machine": [], "evidence": {"before": {}, "after": {}},
    }  # fmt: skip


def _runtime(result: Mapping[str, Any]) -> str | None:
    """The ROCm or CUDA release that the run told."""
    told = (one for check in result["checks"] for one in check["metrics"] if one["name"] == bounds.DRIVER)
    return next((one["conditions"]["runtime"] for one in told), None)


def _figures(found: set[str], count: int, runtime: str | None) -> Iterator[dict[str, Any]]:
    """Every figure that so many devices of a model are judged by; none of several models, or of another."""
    for model in found & {row["model"] for row in models.table()} if len(found) == 1 else ():
        row = models.row(model)
        entries = thresholds.load(thresholds.path_of(row["vendor"], model))
        for name, conditions in gated.figures(row, count, "standard"):
            for shown in _backends(row, conditions, runtime):
                if entry := thresholds.find(entries, name, shown | {"nvls": "unavailable"}):
                    yield _figure(entry, shown)


def _backends(
    row: Mapping[str, Any], conditions: Mapping[str, Any], runtime: str | None
) -> Iterator[dict[str, Any]]:
    """The conditions; and once more as the default's, if the default of this device is their backend."""
    yield dict(conditions)
    default = attention_default.expected(row["arch"], TORCH, runtime if row["vendor"] == "nvidia" else None)
    if conditions.get("backend") == default:
        yield {**conditions, "backend": attention_default.DEFAULT, attention_default.RESOLVED: default}


def _figure(bound: thresholds.Threshold, conditions: Mapping[str, Any]) -> dict[str, Any]:
    value = bound.bound * BETTER if bound.direction == "min" else bound.bound / BETTER
    return {
        "name": bound.metric, "value": value, "unit": bound.unit, "repeats": [value] * 5,
        "conditions": dict(conditions), "direction": bound.direction, "bound": bound.bound, "ceiling": None,
        "source": "made up", "verdict": "pass",
    }  # fmt: skip


def _recorded_by(figure: Mapping[str, Any], count: int) -> set[str]:
    """The ids that may record a figure: its function has no parameter, or one of the figure's conditions."""
    function = _functions()[figure["name"]]
    named = (figure["conditions"].get(name) for name in ("backend", "dtype"))
    return {function, *(f"{function}[{value}]" for value in (count, *named))}


@functools.cache
def _functions() -> Mapping[str, str]:
    """Metric -> the check that recorded it on real devices."""
    run = json.loads(REAL.read_text(encoding="utf-8"))
    return {
        metric["name"]: check["id"].partition("[")[0]
        for check in run["checks"]
        for metric in check["metrics"]
    }
