"""The options of train.py in a file of TOML.

In: a file. Out: words of a command line; and back, the options of a run as such a file.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from errors import RefusedError

if TYPE_CHECKING:
    from options import Options

NAME = "options.toml"  # beside a checkpoint


def words(path: Path, parser: argparse.ArgumentParser) -> list[str]:
    """The flags that a file says, each key one of them without its dashes.

    Raises:
        RefusedError: The file cannot be read, or has a key or a kind of value that no flag has.
    """
    flags = {action.dest: action for action in parser._actions if action.dest not in {"help", "config"}}  # noqa: SLF001
    found = []
    for key, value in _read(path).items():
        action = flags.get(key.replace("-", "_"))
        if action is None:
            near = difflib.get_close_matches(key.replace("-", "_"), flags, n=1)
            hint = [f"did you mean {name.replace('_', '-')}?" for name in near]
            meant = (hint or ["expected a flag without its dashes;"])[0]
            raise RefusedError(f"{path}: unknown key {key}; {meant} --help names each option")
        flag, toggle = (
            f"--{action.dest.replace('_', '-')}",
            isinstance(action, argparse.BooleanOptionalAction),
        )
        if toggle != isinstance(value, bool) or not isinstance(value, bool | int | float | str):
            expected = "true or false" if toggle else "a number or a string"
            raise RefusedError(f"{path}: {key} = {value!r}: expected {expected}")
        found.append((flag if value else f"--no-{flag[2:]}") if toggle else f"{flag}={value}")
    return found


def _read(path: Path) -> dict[str, Any]:
    for name in ("tomllib", "tomli"):  # Python 3.10 has none of its own
        try:
            toml = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        try:
            read: dict[str, Any] = toml.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RefusedError(f"--config {path}: {error}; give a file of TOML") from error
        return read
    raise RefusedError("--config needs Python 3.11 or newer, or tomli; pip install tomli")


def text(options: Options, settled: dict[str, Any]) -> str:
    """The file of this run, with what was settled in place of what was left open."""
    values = {**vars(options), **{name: settled[name] for name in settled if hasattr(options, name)}}
    del values["config"]
    if options.warmup >= options.last_step:
        del values["warmup"]  # the default of a short run, which would be refused if it was asked for
    return "".join(
        f"{name.replace('_', '-')} = {_value(value)}\n" for name, value in values.items() if value is not None
    )


def _value(value: object) -> str:
    if isinstance(value, Path | str):
        return json.dumps(str(value), ensure_ascii=False)
    return str(value).lower()
