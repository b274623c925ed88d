"""Read a small hand-written YAML file without its traps.

In: a path. Out: nested dicts and lists of *text*. Every scalar stays text, so `3.10` is never the number 3.1
and no tag runs code; the models that read the result turn text into numbers where they want numbers.
Refused: aliases (YAML bombs are made of them), duplicate keys, big files, deep nesting.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from stackcheck.errors import ConfigurationError
from stackcheck.files.border import AModel

# Ten times the size of the largest file this project reads.
MAX_BYTES = 250_000
MAX_DEPTH = 20
# A wrong axis breaks every combination: the first problems are enough to find it.
MAX_PROBLEMS = 50

# The C parser is some ten times faster; PyYAML can be installed without it.
_Parser: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


def load_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigurationError: The file is absent, not UTF-8, too big, not YAML, or not a mapping.
    """
    return parse(read_bytes(path), path.name)


def read_bytes(path: Path) -> bytes:
    """The bytes of a file that `parse` takes, for a caller that also needs their digest."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"{path.name} cannot be read", where=str(path), got=error.strerror or str(error)
        ) from error


def parse(data: bytes, name: str) -> dict[str, Any]:
    """The mapping in YAML text, as `load`; `name` is for messages."""
    if len(data) > MAX_BYTES:
        raise ConfigurationError(
            f"{name} is too big", got=f"{len(data)} bytes", expected=f"at most {MAX_BYTES}"
        )
    try:
        value = _document(yaml.parse(data.decode("utf-8"), Loader=_Parser), name)
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{name} is not UTF-8", where=f"{name}, byte {error.start}") from error
    except yaml.MarkedYAMLError as error:
        raise ConfigurationError(
            f"{name} is not usable YAML", where=_place(error.problem_mark, name), got=error.problem
        ) from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{name} is not usable YAML", got=str(error).splitlines()[0]) from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"{name} is not a mapping", expected="`key: value` lines at the top level")
    return value


def _document(events: Iterator[yaml.Event], name: str) -> object:
    """What the one document of a file holds; None where it holds nothing.

    Built from the parser's events in one pass: PyYAML's loaders would take three, and follow aliases.
    """
    value = None
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent):
            if value is not None:
                raise _unusable("a second document begins here", event, name)
            value = _value(next(events), events, name, 1)
    return value


def _value(event: yaml.Event, events: Iterator[yaml.Event], name: str, depth: int) -> object:
    """The text, list or mapping that begins with an event."""
    if getattr(event, "anchor", None) is not None:  # an alias names its anchor in the same place
        raise _unusable("an anchor or an alias", event, name, expected="the value written out")
    if isinstance(event, yaml.ScalarEvent):
        return event.value
    if depth > MAX_DEPTH:
        raise _unusable("nested too deeply", event, name, expected=f"at most {MAX_DEPTH} levels")
    if isinstance(event, yaml.SequenceStartEvent):
        return [_value(item, events, name, depth + 1) for item in _until(yaml.SequenceEndEvent, events)]
    mapping: dict[str, object] = {}
    for begins in _until(yaml.MappingEndEvent, events):
        key = _value(begins, events, name, depth + 1)
        if not isinstance(key, str):
            raise _unusable("a key that is not text", begins, name)
        if key in mapping:
            raise _unusable(f"duplicate key {key[:80]!r}", begins, name)
        mapping[key] = _value(next(events), events, name, depth + 1)
    return mapping


def _until(end: type[yaml.Event], events: Iterator[yaml.Event]) -> Iterator[yaml.Event]:
    """The first event of each value in a collection; the reader of a value takes its other events."""
    for event in events:
        if isinstance(event, end):
            return
        yield event


def _unusable(got: str, event: yaml.Event, name: str, *, expected: str | None = None) -> ConfigurationError:
    where = _place(event.start_mark, name)
    return ConfigurationError(f"{name} is not usable YAML", where=where, got=got, expected=expected)


def _place(mark: Any, name: str) -> str:  # each of PyYAML's two parsers has a mark of its own
    return name if mark is None else f"{name}, line {mark.line + 1}, column {mark.column + 1}"


def validated(kind: type[AModel], value: Mapping[str, Any], name: str) -> AModel:
    """The model of a mapping; raises `ConfigurationError` with one line a problem if it does not fit."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise problems(error, name) from error


def problems(error: ValidationError, name: str) -> ConfigurationError:
    """One line a problem, each with its place: `matrix.yaml: stacks[3].torch: …`."""
    lines = []
    for problem in error.errors(include_url=False, include_context=False):
        place = ""
        for part in problem["loc"]:
            place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else str(part)
        got = "" if problem["type"] == "missing" else f" (got {str(problem['input'])[:80]!r})"
        lines.append(f"{name}: {place or 'file'}: {problem['msg']}{got}")
    return refused(lines)


def refused(lines: Iterable[str], *, next_step: str | None = None) -> ConfigurationError:
    """The error about a file: a line for each of the first problems, and how many follow."""
    found = list(dict.fromkeys(lines))
    shown = found[:MAX_PROBLEMS]
    if len(found) > MAX_PROBLEMS:
        shown.append(f"and {len(found) - MAX_PROBLEMS} more")
    return ConfigurationError("\n".join(shown), next_step=next_step)


def without_inputs(error: ValidationError, path: Path, next_step: str) -> ConfigurationError:
    """One line a problem; what was given may hold a password, so it is not shown."""
    lines = [
        f"{path.name}: {'.'.join(map(_shown, problem['loc']))}: {problem['msg']}"
        for problem in error.errors(include_url=False, include_context=False, include_input=False)
    ]
    return ConfigurationError("\n".join(dict.fromkeys(lines)), where=str(path), next_step=next_step)


def _shown(part: object) -> str:
    """A part of a place in a file, without the login that a key may hold by mistake."""
    text = str(part)
    return text if "@" not in text else text.rpartition("@")[2]
