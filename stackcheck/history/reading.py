"""What a record says. In: its bytes. Out: `Kept`: the run, its points, and the checks that did not pass.

The result in a record was checked when it was appended, so it is read here without a schema: a rebuild reads
every record.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from stackcheck.history.records import SCHEMA
from stackcheck.history.runs import HistoryError, Point, Run
from stackcheck.oci.documents import sha256
from stackcheck.suite.judgement import NO_IMAGE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


@dataclass(frozen=True, kw_only=True)
class Kept:
    """One record, read.

    Attributes:
        run: The run.
        points: Its metrics.
        notable: Id of each check that did not simply pass -> how it ended (`waived` for a waived one).
        judged: When the verdict was given.
        result_digest: Digest of result.json: two records of one result are two verdicts on it.
    """

    run: Run
    points: tuple[Point, ...]
    notable: Mapping[str, str]
    judged: dt.datetime
    result_digest: str


def read(data: bytes, digest: str | None = None) -> Kept:
    """Read a record.

    Args:
        data: The record's bytes.
        digest: Its digest, if it is known.

    Raises:
        HistoryError: It is not a record of this schema.
    """
    digest = digest or sha256(data)
    try:
        document = from_json(data)
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']}")
        run = _run(document, digest)
        return Kept(
            run=run,
            points=tuple(points_of(document["result"], digest)),
            notable=_notable(document["result"], run.waived),
            judged=dt.datetime.fromisoformat(document["judged"]),
            result_digest=document["result_digest"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise HistoryError(
            "a record of the history cannot be read",
            where=digest,
            got=f"{type(error).__name__}: {error}",
            expected=f"a record of schema {SCHEMA}",
            next_step="use the version of stackcheck that wrote it, or import the run's result.json again",
        ) from error


def _run(document: Mapping[str, Any], digest: str) -> Run:
    result, verdict = document["result"], document["verdict"]
    host, image = result["host"], result["image"]
    started = _utc(result["started"])
    devices = host["devices"]
    return Run(
        record=digest,
        run_id=result["run_id"],
        started=started,
        finished=_utc(result["finished"]) if result["finished"] else started,
        tier=result["tier"],
        stack=result["stack_id"] or (image["reference"] if image else NO_IMAGE),
        image=(image["manifest_digest"] or image["config_digest"]) if image else None,
        vendor=host["vendor"],
        device_model=" + ".join(sorted({device["model"] for device in devices})) or "none",
        device_count=len(devices),
        driver=host["driver"],
        kernel=host["kernel"],
        node=node_id(device["id"] for device in devices),
        status=verdict["status"],
        reasons=tuple(verdict["reasons"]),
        failed=tuple(verdict["failed"]),
        waived=tuple(verdict["warned"]),
        simulated=document["simulated"],
    )


def node_id(device_ids: Iterable[str]) -> str:
    """The anonymous id of the machine that has these devices. A run on some of them has an id of its own."""
    return hashlib.sha256(" ".join(sorted(device_ids)).encode()).hexdigest()[:12]


def points_of(result: Mapping[str, Any], digest: str) -> Iterator[Point]:
    """Every finite metric of a result."""
    for check in result["checks"]:
        metrics = check["metrics"]
        if metrics:
            for metric, name in zip(metrics, _names(metrics), strict=True):
                if metric["value"] is not None:
                    yield _point(metric, name, check["id"], digest)


def _point(metric: Mapping[str, Any], name: str, check: str, digest: str) -> Point:
    return Point(
        record=digest,
        check=check,
        name=name,
        unit=metric["unit"],
        value=metric["value"],
        repeats=tuple(value for value in metric.get("repeats", ()) if value is not None),
        direction=metric.get("direction"),
        bound=metric.get("bound"),
        ceiling=metric.get("ceiling"),
    )


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


def _notable(result: Mapping[str, Any], waived: Iterable[str]) -> dict[str, str]:
    ended = {check["id"]: check["outcome"] for check in result["checks"] if check["outcome"] != "passed"}
    return ended | dict.fromkeys(waived, "waived")


def _utc(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text).astimezone(dt.UTC)
