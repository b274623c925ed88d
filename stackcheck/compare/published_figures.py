"""The founding documents' figures, and ours beside them. In: a checkout. Out: `FoundingRow`s.

Published: `trainers/rows.yaml`. Ours: the lines that `python trainers/tools/table.py DOCUMENT --out FILE`
writes, in `build/rows/*.jsonl` and `docs/results/rows*.jsonl`; the last line of a row and machine counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping  # pydantic reads annotations at run time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, FiniteFloat, ValidationError

from stackcheck.errors import ConfigurationError, NothingSelectedError
from stackcheck.files import strictjson, yamlfile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILE = "trainers/rows.yaml"
MEASURED = ("docs/results/rows*.jsonl", "build/rows/*.jsonl")


def _number(value: object) -> object:
    """The strict YAML gives every scalar as text: what is published as `null` has no number."""
    return None if value == "null" else value


class _Published(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)
    id: str
    metric: str
    unit: str = ""
    value: Annotated[FiniteFloat | tuple[FiniteFloat, FiniteFloat] | None, BeforeValidator(_number)] = None
    convention: str = "none"
    source: str = ""
    device: str | None = None
    count: int | None = None
    precision: str | None = None


class _Document(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)
    title: str
    defaults: Mapping[str, object] = {}
    rows: tuple[Mapping[str, object], ...]


class _Measured(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)
    document: str
    row: str
    machine: str
    ranks: int = 1
    ours: FiniteFloat | None = None
    how: str | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Ours:
    """What was measured of a row here.

    Attributes:
        value: The figure; None if the row did not run.
        machine: On how many of which device.
        words: How it was measured, or why it did not run.
    """

    value: float | None
    machine: str
    words: str


@dataclass(frozen=True, kw_only=True)
class FoundingRow:
    """One published figure, and ours; `value` is the middle where a range is published."""

    document: str
    title: str
    id: str
    metric: str
    unit: str
    value: float | None
    published: str
    machine: str
    convention: str
    source: str
    ours: tuple[Ours, ...] = ()

    @property
    def name(self) -> str:
        """As a user types it: DOCUMENT/ROW."""
        return f"{self.document}/{self.id}"


def load(root: Path) -> tuple[FoundingRow, ...]:
    """The rows of a checkout, in the order of the file; none if it has no such file.

    Raises:
        ConfigurationError: The file, or one with our figures, is damaged.
    """
    file = root / FILE
    if not file.is_file():
        return ()
    measured: dict[tuple[str, str], dict[str, Ours]] = {}
    for each in _measured(root):
        ours = Ours(
            value=each.ours,
            machine=f"{each.machine} x{each.ranks}",
            words=each.how or each.reason or "",
        )
        measured.setdefault((each.document, each.row), {})[ours.machine] = ours
    try:
        documents = {
            name: _Document.model_validate(content)
            for name, content in yamlfile.parse(yamlfile.read_bytes(file), FILE).items()
        }
        return tuple(
            _row(name, document, _Published.model_validate({**document.defaults, **row}), measured)
            for name, document in documents.items()
            for row in document.rows
        )
    except ValidationError as error:
        raise yamlfile.problems(error, FILE) from error


def find(name: str, root: Path) -> FoundingRow:
    """The row of a name: DOCUMENT/ROW, or ROW if one document alone has it.

    Raises:
        NothingSelectedError: There is none, or there are several.
    """
    rows = load(root)
    found = [row for row in rows if name in {row.name, row.id}]
    if len(found) == 1:
        return found[0]
    if not rows:
        raise NothingSelectedError(
            "this checkout has no founding documents' figures",
            where=str(root / FILE),
            got="no such file",
            expected="the file with the published figures",
        )
    near = [row.name for row in rows if name in row.name][:5]
    raise NothingSelectedError(
        "no founding document has this row" if not found else "several founding documents have this row",
        where=str(root / FILE),
        got=name,
        expected="one of " + ", ".join([row.name for row in found] or near or [row.name for row in rows[:5]]),
    )


def _row(
    name: str,
    document: _Document,
    row: _Published,
    measured: Mapping[tuple[str, str], Mapping[str, Ours]],
) -> FoundingRow:
    value = sum(row.value) / 2 if isinstance(row.value, tuple) else row.value
    text = f"{row.value[0]:g} to {row.value[1]:g}" if isinstance(row.value, tuple) else f"{value or 0:g}"
    device = f"{row.device} x{row.count}" if row.device and row.count else row.device or "-"
    return FoundingRow(
        document=name,
        title=document.title,
        id=row.id,
        metric=row.metric,
        unit=row.unit,
        value=value,
        published="-" if value is None else text,
        machine=device + (f", {row.precision}" if row.precision else ""),
        convention=row.convention,
        source=row.source,
        ours=tuple(measured.get((name, row.id), {}).values()),
    )


def _measured(root: Path) -> Iterator[_Measured]:
    for path in sorted(path for pattern in MEASURED for path in root.glob(pattern)):
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            try:
                strictjson.check(line)
                yield _Measured.model_validate(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise ConfigurationError(
                    "a line of our figures for the founding documents is damaged",
                    where=f"{path}, line {number}",
                    got=str(error).split("\n", maxsplit=1)[0],
                    next_step="remove the line, and run trainers/tools/table.py with --out again",
                ) from error
