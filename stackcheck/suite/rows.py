"""Published figures of a founding document as gates of an image.

In: rows.yaml, a host, what the image measured. Out: the ids of the rows that it reached, and why it missed
others. The figures are read on the host (trainers/rows.yaml). The image measures with trainers/tools/table.py
and writes a file, which is foreign input: a row that is missing, of another size or not finite is missed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, FiniteFloat, TypeAdapter, ValidationError

from stackcheck.errors import ConfigurationError
from stackcheck.files import yamlfile
from stackcheck.files.regular import read_regular

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from stackcheck import vendors
    from stackcheck.suite.verdict import Verdict

SHARE = 0.9  # of a published figure: another trainer, another power cap, another day (docs/thresholds.md)
GATED = ("tflops_noncausal", "images_per_s")
LARGEST_FILE = 64 << 20  # bytes: a line holds the record of its job
TIMED_S, START_S = 60.0, 240.0  # a row is timed so long, and starts within so long


class Row(BaseModel):
    """What a gate needs of a row; the trainers' own reader checks the whole file (trainers/rows.py)."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    id: str
    metric: str
    unit: str
    value: FiniteFloat | list[FiniteFloat] | None
    device: str | None = None
    device_unit: Literal["gpu", "card", "gcd"] = "gpu"
    count: int | None = None


class Measured(BaseModel):
    """What the image measured for a row."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)
    document: str
    row: str
    machine: str
    ranks: int
    ours: FiniteFloat | None
    proxy: str | None = None
    reason: str | None = None


class _Document(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)
    defaults: dict[str, object]
    rows: list[dict[str, object]]


@dataclass(frozen=True)
class Judged:
    """Ids of the rows that the image reached, of those that it missed, and why."""

    passed: tuple[str, ...]
    failed: tuple[str, ...]
    reasons: tuple[str, ...]


def document_of(root: Path, name: str) -> tuple[Path, object]:
    """The file of the published figures, and its document of this name.

    Raises:
        ConfigurationError: There is no such document.
    """
    path = root / "trainers" / "rows.yaml"
    found = yamlfile.load(path)
    if name not in found:
        raise ConfigurationError(
            "there is no such document",
            where=str(path),
            got=name,
            expected=", ".join(found),
            next_step="name one of them with --rows",
        )
    return path, found[name]


def gates(root: Path, document: str, host: vendors.Host) -> tuple[Row, ...]:
    """The rows of a document that were published for these devices, and as many of them.

    Raises:
        ConfigurationError: There is no such document, or it has no figure for this host.
    """
    path, content = document_of(root, document)
    rows = _rows(content, f"{path}: {document}")
    gated = [row for row in rows if row.metric in GATED and row.device_unit == "gpu" and row.value]
    here = {device.model for device in host.devices}
    chosen = tuple(row for row in gated if {row.device} == here and row.count == len(host.devices))
    if not chosen:
        known = sorted({f"{row.count} x {row.device}" for row in gated})
        raise ConfigurationError(
            "the document has no figure for these devices",
            where=f"{path}: {document}",
            got=f"{len(host.devices)} x {', '.join(sorted(here)) or 'no device'}",
            expected=" or ".join(known) or "a document with speeds: amd-container",
            next_step=f"run it there; for a table on this machine: python trainers/tools/table.py {document}",
        )
    return chosen


def _rows(content: object, where: str) -> list[Row]:
    try:
        document = _Document.model_validate(content)
        return [Row.model_validate(document.defaults | row) for row in document.rows]
    except ValidationError as error:
        raise yamlfile.problems(error, where) from error


def command(document: str, chosen: Sequence[Row]) -> tuple[str, ...]:
    """The program that measures these rows in the image."""
    ids = ",".join(row.id for row in chosen)
    table = ("/stackcheck/trainers/tools/table.py", document, "--only", ids, "--seconds", f"{TIMED_S:g}")
    return (*table, "--out", "/stackcheck/out/rows.jsonl")


def limit_s(chosen: Sequence[Row]) -> float:
    """The longest time in which the program may measure these rows."""
    return len(chosen) * (TIMED_S + START_S)


def read(path: Path) -> tuple[Measured, ...]:
    """What the image wrote; nothing where that cannot be read, and then every row is missed."""
    if not path.is_file():
        return ()
    try:
        lines = read_regular(path, LARGEST_FILE, follow=False).splitlines()
        return tuple(TypeAdapter(Measured).validate_python(json.loads(line)) for line in lines)
    except (OSError, ValueError):
        return ()


def judge(document: str, chosen: Sequence[Row], measured: Sequence[Measured]) -> Judged:
    """Each row against SHARE of its published figure, at its true size."""
    said = {one.row: one for one in measured if one.document == document}
    reasons = {row.id: reason for row in chosen if (reason := _missed(row, said))}
    name = f"rows::{document}::"
    return Judged(
        passed=tuple(name + row.id for row in chosen if row.id not in reasons),
        failed=tuple(name + row for row in reasons),
        reasons=tuple(f"{name}{row}: {reason}" for row, reason in reasons.items()),
    )


def added_to(verdict: Verdict, found: Judged) -> Verdict:
    """The verdict of a run whose rows were measured too: a missed row makes it FAILED."""
    return replace(
        verdict,
        status="FAILED" if found.failed else verdict.status,
        reasons=(*verdict.reasons, *found.reasons),
        passed=(*verdict.passed, *found.passed),
        failed=(*verdict.failed, *found.failed),
        required=(*verdict.required, *found.passed, *found.failed),
    )


def _missed(row: Row, said: Mapping[str, Measured]) -> str | None:
    found = said.get(row.id)
    if found is None or found.ours is None:
        return (found and found.reason) or "the image measured nothing"
    if (found.machine, found.ranks) != (row.device, row.count):
        return f"measured on {found.ranks} x {found.machine}, published for {row.count} x {row.device}"
    if found.proxy is not None:
        return f"measured as a proxy ({found.proxy}), published at true size"
    assert isinstance(row.value, float)
    bound = SHARE * row.value
    if found.ours < bound:
        return f"{found.ours:.4g} {row.unit}, expected at least {bound:.4g}: {SHARE:.0%} of {row.value:g}"
    return None
