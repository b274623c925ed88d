"""A file of thresholds: read, merged with proposals, judged by the suites' own lint, written on request.

In: tests/acceptance/thresholds/<vendor>/<model>.json. Out: entries, a unified diff, the file. What a metric
is, which unit it has and what an entry may say is known to tests/acceptance/harness/thresholds.py alone: the
tool never imports the suites, so it asks that module as a program (`python -m harness.bounds`).
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, FiniteFloat, JsonValue, ValidationError

from stackcheck.errors import ConfigurationError
from stackcheck.files.atomic import write_atomically
from stackcheck.suite import bounds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

Number = int | FiniteFloat  # an int stays one, so that reading and writing a file changes nothing
Conditions = dict[str, JsonValue]
Key = tuple[str, str]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Entry(_Part):
    """One bound, as the suites read it."""

    metric: str
    conditions: Conditions
    bound: Number
    unit: str
    direction: Literal["min", "max"]
    ceiling: Number
    source: str
    tolerance: str

    def key(self) -> Key:
        """What two entries of one file may not share."""
        return self.metric, json.dumps(self.conditions, sort_keys=True)

    def holds_for(self, metric: str, conditions: Mapping[str, JsonValue]) -> bool:
        """Whether the suites would look at this entry for such a figure."""
        same = (key in conditions and conditions[key] == value for key, value in self.conditions.items())
        return metric == self.metric and all(same)


class _File(_Part):
    thresholds: tuple[Entry, ...]


class MetricRule(_Part):
    """What the suites know of a metric: unit, which side is good, and the conditions that select a bound."""

    unit: str
    direction: Literal["min", "max"]
    conditions: tuple[str, ...]


class Rules(_Part):
    """The suites' answer: every metric, what hardware cannot exceed for each figure, problems of entries."""

    metrics: dict[str, MetricRule]
    ceilings: tuple[Number | None, ...]
    reached: tuple[bool, ...]  # whether a check judges each figure by a bound
    bounds: tuple[dict[str, JsonValue] | None, ...]  # of the committed thresholds, for each figure
    unmeasured: tuple[str, ...]  # of the committed thresholds, those that no figure measures
    lowest_share: FiniteFloat  # of its ceiling, below which a bound means nothing
    problems: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class File:
    """The thresholds of one device model; `text` is empty where there is no file yet."""

    path: Path
    text: str
    entries: tuple[Entry, ...]

    def holding(self, metric: str, conditions: Mapping[str, JsonValue]) -> Entry | None:
        """The entry that judges such a figure now: the one with the most conditions."""
        fitting = [entry for entry in self.entries if entry.holds_for(metric, conditions)]
        return max(fitting, key=lambda entry: len(entry.conditions), default=None)

    def merged(self, proposed: Sequence[Entry]) -> tuple[Entry, ...]:
        """Proposals in the place of entries with the same metric and conditions, the others at the end."""
        new = {entry.key(): entry for entry in proposed}
        kept = [new.pop(entry.key(), entry) for entry in self.entries]
        return (*kept, *new.values())

    def diff(self, proposed: Sequence[Entry]) -> str:
        """What writing the proposals would change, as a unified diff."""
        old, new = (text.splitlines(keepends=True) for text in (self.text, written(self.merged(proposed))))
        return "".join(difflib.unified_diff(old, new, f"a/{self.path.name}", f"b/{self.path.name}", n=0))


def load(root: Path, vendor: str, model: str) -> File:
    """The committed thresholds of a device model.

    Raises:
        ConfigurationError: The file is there and is not a file of thresholds.
    """
    path = root / "tests" / "acceptance" / "thresholds" / vendor / f"{model}.json"
    if not path.exists():
        return File(path=path, text="", entries=())
    text = path.read_text(encoding="utf-8")
    try:
        return File(path=path, text=text, entries=_File.model_validate_json(text).thresholds)
    except ValidationError as error:
        raise ConfigurationError(
            "this is no file of thresholds", where=str(path), got=str(error.errors(include_url=False)[0])
        ) from error


def ask(
    root: Path,
    model: str,
    *,
    entries: Sequence[Entry] = (),
    figures: Sequence[tuple[str, Conditions]] = (),
) -> Rules:
    """What the suites' own rules say of entries and figures of a device model.

    Raises:
        ConfigurationError: The checkout has no suites, or devices.json does not know the model.
    """
    asked: dict[str, Any] = {
        "model": model,
        "entries": [entry.model_dump() for entry in entries],
        "figures": [{"metric": metric, "conditions": conditions} for metric, conditions in figures],
    }
    return Rules.model_validate_json(bounds.ask_suites(root, asked))


def require_clean(root: Path, model: str, entries: Sequence[Entry], where: Path) -> None:
    """Refuse entries that the suites would refuse.

    Raises:
        ConfigurationError: With every problem that the lint names.
    """
    problems = ask(root, model, entries=entries).problems
    if problems:
        raise ConfigurationError(
            "the lint of thresholds refuses these entries, so nothing was written",
            where=str(where),
            got="; ".join(problems),
            expected="no problem",
        )


def write(file: File, proposed: Sequence[Entry]) -> None:
    """Replace the file by itself merged with the proposals; lint it before."""
    write_atomically(file.path, [written(file.merged(proposed)).encode()])


def written(entries: Sequence[Entry]) -> str:
    """The text of a file: one entry a line, so that a change is one line of a diff."""
    lines = (" " + json.dumps(entry.model_dump(), ensure_ascii=False) for entry in entries)
    return '{"thresholds": [\n' + ",\n".join(lines) + "\n]}\n"
