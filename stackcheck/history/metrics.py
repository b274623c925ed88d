"""What the index needs of a result. In: the JSON of result.json. Out: its abstract, for the head of a record.

A rebuild reads the head of every record. An abstract is a tenth of its result, and so is the time.
"""

import datetime as dt
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from stackcheck.suite.judgement import NO_IMAGE

VERSION = 2  # of the abstract; one of another version is made anew from the result
POINT = ("name", "unit", "value", "repeats", "direction", "bound", "ceiling")


def of(result: Mapping[str, Any]) -> dict[str, Any]:
    """The abstract of a result: the fields of `Run` that it gives, its points by check, how checks ended."""
    measured = [check for check in result["checks"] if check["metrics"]]
    known = sorted(device["id"] for device in result["host"]["devices"])
    chips = {check["id"]: _chips(check.get("devices", ()), known) for check in measured}
    ended = {check["id"]: check["outcome"] for check in result["checks"]}
    return {
        "version": VERSION,
        "run": _run(result),
        "points": {check["id"]: list(_points(check["metrics"])) for check in measured},
        "chips": {check: which for check, which in chips.items() if which},
        "notable": {check: how for check, how in ended.items() if how not in {"passed", "skipped"}},
    }


def node_id(device_ids: Iterable[str]) -> str:
    """The anonymous id of the machine that has these devices. A run on some of them has an id of its own."""
    return hashlib.sha256(" ".join(sorted(device_ids)).encode()).hexdigest()[:12]


def _chips(used: Iterable[str], known: Sequence[str]) -> str | None:
    """Which of a machine's devices a check ran on, by their places in the order of ids: `0`, or `0,3`.

    None: all of them, or none that the machine has. With `node_id` this is the anonymous id of a chip.
    """
    places = sorted(known.index(device) for device in set(used) if device in known)
    return ",".join(map(str, places)) if 0 < len(places) < len(known) else None


def _run(result: Mapping[str, Any]) -> dict[str, Any]:
    host, image = result["host"], result["image"]
    devices = host["devices"]
    return {
        "run_id": result["run_id"],
        "started": _utc(result["started"]),
        "finished": _utc(result["finished"] or result["started"]),
        "tier": result["tier"],
        "stack": result["stack_id"] or (image["reference"] if image else NO_IMAGE),
        "image": (image["manifest_digest"] or image["config_digest"]) if image else None,
        "vendor": host["vendor"],
        "device_model": " + ".join(sorted({device["model"] for device in devices})) or "none",
        "device_count": len(devices),
        "driver": host["driver"],
        "kernel": host["kernel"],
        "node": node_id(device["id"] for device in devices),
    }


def _points(metrics: Sequence[Mapping[str, Any]]) -> Iterator[list[Any]]:
    """Every finite metric of a check, in the order of `POINT`."""
    for metric, name in zip(metrics, _names(metrics), strict=True):
        if metric["value"] is not None:
            repeats = [value for value in metric.get("repeats", ()) if value is not None]
            rest = (metric.get(field) for field in ("direction", "bound", "ceiling"))
            yield [name, metric["unit"], metric["value"], repeats, *rest]


def _names(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each metric of one check that no other of them has."""
    names = [metric["name"] for metric in metrics]
    if len(set(names)) == len(names):
        return names
    groups: dict[str, list[int]] = defaultdict(list)
    for index, name in enumerate(names):
        groups[name].append(index)
    for name, indices in groups.items():
        if len(indices) > 1:
            labels = _labels([metrics[index].get("conditions", {}) for index in indices])
            for index, label in zip(indices, labels, strict=True):
                names[index] = f"{name}[{label}]"
    return names


def _labels(conditions: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each set of conditions the first few that tell it from the others; a number if none do."""
    labels = [""] * len(conditions)
    for key in conditions[0]:
        values = [each.get(key) for each in conditions]
        if not all(isinstance(value, str | int | float) for value in values) or len(set(values)) == 1:
            continue
        labels = [f"{label} {key}={value}".strip() for label, value in zip(labels, values, strict=True)]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{label} #{number}".strip() for number, label in enumerate(labels, start=1)]


def _utc(text: str) -> str:
    return dt.datetime.fromisoformat(text).astimezone(dt.UTC).isoformat()
