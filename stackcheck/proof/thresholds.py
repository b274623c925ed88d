"""Read and write the thresholds of a device model, by the rules of the suites.

In: tests/acceptance/thresholds/<vendor>/<model>.json and proposed entries. Out: entries, a unified diff, the
new file. Only tests/acceptance/harness/thresholds.py knows the metrics, their units and the rules of an
entry. The tool never imports the suites, so it runs those rules as a program (`python -m harness.bounds`).
"""

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, FiniteFloat, JsonValue, ValidationError

from stackcheck.errors import ConfigurationError
from stackcheck.files.atomic import write_atomically
from stackcheck.files.border import Closed, Open, first_problem
from stackcheck.suite import bounds

Number = int | FiniteFloat  # an int stays one, so that reading and writing a file changes nothing
Conditions = dict[str, JsonValue]
Key = tuple[str, str]


class Entry(Closed):
    """One bound, as the suites read it: `class` in the file, a keyword of Python, is `kind` here."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, validate_by_name=True, validate_by_alias=True)
    metric: str
    conditions: Conditions
    bound: Number
    unit: str
    direction: Literal["min", "max"]
    ceiling: Number
    source: str
    tolerance: str
    kind: Literal["measured", "published", "derived"] = Field(alias="class")
    basis: dict[str, JsonValue]

    def as_json(self) -> dict[str, Any]:
        """The entry with the names of the file."""
        return self.model_dump(by_alias=True)

    def key(self) -> Key:
        """What must be different in any two entries of a file: metric and conditions."""
        return self.metric, json.dumps(self.conditions, sort_keys=True)

    def holds_for(self, metric: str, conditions: Mapping[str, JsonValue]) -> bool:
        """Whether this entry applies to a metric with these conditions, by the suites' own rule."""
        same = (key in conditions and conditions[key] == value for key, value in self.conditions.items())
        return metric == self.metric and all(same)


class _FileContent(Closed, strict=True, allow_inf_nan=False):
    thresholds: tuple[Entry, ...]


class MetricRule(Closed, strict=True, allow_inf_nan=False):
    """A metric of the suites: its unit, the direction of its bound, and the conditions that select one."""

    unit: str
    direction: Literal["min", "max"]
    conditions: tuple[str, ...]


class Rules(Open, strict=True, allow_inf_nan=False):
    """The suites' answer about entries and figures; what it says of a run is for verdicts.

    Attributes:
        ceilings: What the hardware cannot exceed, for each figure asked about; null if not known.
    """

    metrics: dict[str, MetricRule]  # every metric by name
    ceilings: tuple[Number | None, ...]
    reached: tuple[bool, ...]  # whether a check compares the figure with a bound, for each figure asked about
    lowest_share: FiniteFloat  # the share of its ceiling below which a bound is useless
    problems: tuple[str, ...]  # what is wrong with the entries asked about; empty if nothing is


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThresholdsFile:
    """The thresholds of one device model; `text` is empty if there is no file yet."""

    path: Path
    text: str
    entries: tuple[Entry, ...]

    def holding(self, metric: str, conditions: Mapping[str, JsonValue]) -> Entry | None:
        """The entry that applies to a metric with these conditions: of several, the most specific one."""
        fitting = [entry for entry in self.entries if entry.holds_for(metric, conditions)]
        return max(fitting, key=lambda entry: len(entry.conditions), default=None)

    def merged(self, proposed: Sequence[Entry]) -> tuple[Entry, ...]:
        """All entries, where a proposal replaces the entry with its key, and new ones stand at the end."""
        new = {entry.key(): entry for entry in proposed}
        kept = [new.pop(entry.key(), entry) for entry in self.entries]
        return (*kept, *new.values())

    def diff(self, proposed: Sequence[Entry]) -> str:
        """The change that `write` would make, as a unified diff."""
        old, new = (text.splitlines(keepends=True) for text in (self.text, as_text(self.merged(proposed))))
        return "".join(difflib.unified_diff(old, new, f"a/{self.path.name}", f"b/{self.path.name}", n=0))


def load_thresholds(root: Path, vendor: str, model: str) -> ThresholdsFile:
    """The committed thresholds of a device model.

    Raises:
        ConfigurationError: The file exists and is not a valid thresholds file.
    """
    path = root / "tests" / "acceptance" / "thresholds" / vendor / f"{model}.json"
    if not path.exists():
        return ThresholdsFile(path=path, text="", entries=())
    text = path.read_text(encoding="utf-8")
    try:
        return ThresholdsFile(path=path, text=text, entries=_FileContent.model_validate_json(text).thresholds)
    except ValidationError as error:
        raise ConfigurationError(
            "the thresholds file is not valid",
            where=str(path),
            got=first_problem(error),
            expected='{"thresholds": [...]}, each entry with the fields of a committed one',
            next_step=f"restore the committed file: git checkout {path}",
        ) from error


def ask_suites(
    root: Path, model: str, *, entries: Sequence[Entry] = (), figures: Sequence[tuple[str, Conditions]] = ()
) -> Rules:
    """Ask the suites' own rules about entries and figures of a device model."""
    asked: dict[str, Any] = {
        "model": model,
        "entries": [entry.as_json() for entry in entries],
        "figures": [{"metric": metric, "conditions": conditions} for metric, conditions in figures],
    }
    return Rules.model_validate_json(bounds.ask_suites(root, asked))


def require_clean(root: Path, model: str, entries: Sequence[Entry], where: Path) -> None:
    """Refuse entries that the suites' lint refuses; `where` names them in the message.

    Raises:
        ConfigurationError: With every problem that the lint finds.
    """
    problems = ask_suites(root, model, entries=entries).problems
    if problems:
        raise ConfigurationError(
            "the lint of thresholds refuses these entries; nothing was written",
            where=str(where),
            got="; ".join(problems),
            expected="entries without a problem",
            next_step="correct the entries, or measure again: stackcheck test IMAGE --tier standard",
        )


def write(file: ThresholdsFile, proposed: Sequence[Entry]) -> None:
    """Write the merged entries. Call `require_clean` before."""
    write_atomically(file.path, [as_text(file.merged(proposed)).encode()])


def as_text(entries: Sequence[Entry]) -> str:
    """The text of a thresholds file, with one line for each entry, so that a change is one line of a diff."""
    lines = (" " + json.dumps(entry.as_json(), ensure_ascii=False) for entry in entries)
    return '{"thresholds": [\n' + ",\n".join(lines) + "\n]}\n"
