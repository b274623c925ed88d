"""What a record says. In: its bytes. Out: `Kept`: the run, its points, and the checks that failed.

The result in a record was checked when it was appended, so the head is read here without a schema.
"""

import datetime as dt
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic_core import from_json

from stackcheck.files.border import first_problem
from stackcheck.history import metrics
from stackcheck.history.records import SCHEMA, Records, head_of, result_of
from stackcheck.history.runs import HistoryError, Point, Run


@dataclass(frozen=True, kw_only=True)
class Kept:
    """One record, read."""

    run: Run
    # Id of each check that neither passed nor was skipped -> how it ended, or `waived`
    notable: Mapping[str, str]
    judged: dt.datetime  # when the verdict was given
    result_digest: str  # digest of result.json: two records of one result are two verdicts on it
    head: Mapping[str, Any]  # the record without the result: verdict, fingerprint, source, …
    measured: Mapping[str, Any]  # the abstract of the result, which has its metrics

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """The metrics of the run, made when first asked for: a rebuild of the index does not need them."""
        return tuple(points(self.measured, self.run.record))


def read(data: bytes, digest: str) -> Kept:
    """Read a record of this digest."""
    return _read(head_of(data), digest, lambda: data)


def read_kept(records: Records, digest: str) -> Kept:
    """Read the record of this digest; only its head is unpacked if that says all."""
    return _read(records.head(digest), digest, lambda: records.read(digest))


def _read(text: bytes, digest: str, whole: Callable[[], bytes]) -> Kept:
    try:
        head = from_json(text)
        if head["schema"] != SCHEMA:
            raise ValueError(f"schema {head['schema']}")
        found = head["abstract"]
        if found["version"] != metrics.VERSION:
            found = metrics.of(from_json(result_of(whole())))
        return _kept(head, found, digest)
    except (ValueError, KeyError, TypeError) as error:
        raise HistoryError(
            "a record of the history cannot be read",
            where=digest,
            got=first_problem(error),
            expected=f"a record of schema {SCHEMA}",
            next_step="use the version of stackcheck that wrote it, or import the run's result.json again",
        ) from error


def _kept(head: Mapping[str, Any], found: Mapping[str, Any], digest: str) -> Kept:
    verdict, facts, columns = head["verdict"], dict(found["run"]), len(metrics.POINT)
    if not found["chips"].keys() <= found["points"].keys():
        raise ValueError("chips")
    if any(len(row) != columns for rows in found["points"].values() for row in rows):
        raise ValueError("points")
    facts |= {name: dt.datetime.fromisoformat(facts[name]) for name in ("started", "finished")}
    waived = tuple(verdict["warned"])
    run = Run(
        record=digest,
        status=verdict["status"],
        reasons=tuple(verdict["reasons"]),
        failed=tuple(verdict["failed"]),
        waived=waived,
        simulated=head["simulated"],
        **facts,
    )
    return Kept(
        run=run,
        notable=dict.fromkeys(run.failed, "failed") | found["notable"] | dict.fromkeys(waived, "waived"),
        judged=dt.datetime.fromisoformat(head["judged"]),
        result_digest=head["result_digest"],
        head=head,
        measured=found,
    )


def points(found: Mapping[str, Any], digest: str) -> Iterator[Point]:
    """The points that an abstract holds, for the record of this digest."""
    for check, rows in found["points"].items():
        chips = found["chips"].get(check)
        for name, unit, value, repeats, direction, bound, ceiling in rows:
            told = tuple(repeats)
            yield Point(digest, check, name, unit, value, told, direction, bound, ceiling, chips)
