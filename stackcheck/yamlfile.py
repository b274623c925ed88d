"""Read a small hand-written YAML file without its traps.

In: a path. Out: nested dicts and lists of *text*. Every scalar stays text, so `3.10` is never the number 3.1
and no tag runs code; the models that read the result turn text into numbers where they want numbers.
Refused: aliases (the stuff of YAML bombs), duplicate keys, big files, deep nesting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from stackcheck.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from pydantic import ValidationError

# Ten times the size of the largest file this project reads.
MAX_BYTES = 250_000
MAX_DEPTH = 20
# What follows the first problems says little more, and a wrong axis breaks every combination.
MAX_PROBLEMS = 50

# The C parser is some ten times faster; PyYAML can be installed without it.
_Base: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


class _TextLoader(_Base):  # type: ignore[misc]  # chosen at run time
    """A loader that leaves scalars as text and refuses a key that stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node, its keys unique."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key.value, str) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value[:80]!r} stands twice", key.start_mark
                )
            seen.add(str(key.value))
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping


def read(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigurationError: The file is absent, not UTF-8, too big, not YAML, or not a mapping.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"{path.name} cannot be read", where=str(path), got=error.strerror or str(error)
        ) from error
    return parse(data, path.name)


def parse(data: bytes, name: str) -> dict[str, Any]:
    """The mapping in YAML text, as `read`; `name` stands in messages."""
    if len(data) > MAX_BYTES:
        raise ConfigurationError(
            f"{name} is too big", got=f"{len(data)} bytes", expected=f"at most {MAX_BYTES}"
        )
    try:
        text = data.decode("utf-8")
        _check_events(text, name)
        value = yaml.load(text, Loader=_TextLoader)  # noqa: S506  # _TextLoader builds text, dicts and lists only
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{name} is not UTF-8", where=f"{name}, byte {error.start}") from error
    except yaml.MarkedYAMLError as error:
        raise ConfigurationError(
            f"{name} is not usable YAML", where=_place(error, name), got=error.problem
        ) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigurationError(f"{name} is not usable YAML", got=str(error).splitlines()[0]) from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"{name} is not a mapping", expected="`key: value` lines at the top level")
    return value


def _check_events(text: str, name: str) -> None:
    """Refuse aliases and deep nesting before anything is built."""
    depth = 0
    for event in yaml.parse(text, Loader=_TextLoader):
        if isinstance(event, yaml.AliasEvent):
            place = f"{name}, line {event.start_mark.line + 1}" if event.start_mark else name
            raise ConfigurationError(
                f"{name} uses a YAML alias", where=place, expected="the value written out"
            )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise ConfigurationError(f"{name} is nested too deeply", expected=f"at most {MAX_DEPTH} levels")


def _place(error: yaml.MarkedYAMLError, name: str) -> str:
    mark = error.problem_mark
    return name if mark is None else f"{name}, line {mark.line + 1}, column {mark.column + 1}"


def problems(error: ValidationError, name: str, *, drop: Iterable[str] = ()) -> ConfigurationError:
    """One line a problem, each with its place: `matrix.yaml: stacks[3].torch: …`."""
    dropped = set(drop)
    lines = []
    for problem in error.errors(include_url=False, include_context=False):
        place = ""
        for part in problem["loc"]:
            if part not in dropped:
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
