"""How output looks. In: rows, facts, messages, errors. Out: results on stdout, the rest on stderr."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def shown(text: str, *, lines: bool = False) -> str:
    r"""A text as a terminal may get it: characters that are not printable are written out (\x1b).

    Tags, media types, names of packages and lines of containers are foreign: with control characters they
    could rewrite what the terminal shows, or forge a line. With `lines`, line breaks and tabs stay.
    """
    kept = "\n\t" if lines else ""
    return "".join(char if char.isprintable() or char in kept else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def print_error(error: Exception) -> None:
    """Write an error to stderr, with the lines of its details."""
    print(f"error: {shown(str(error), lines=True)}", file=sys.stderr)


def print_note(text: str) -> None:
    """Write what the user should know, although the command succeeded, to stderr."""
    print(f"note: {shown(text)}", file=sys.stderr)


def print_json(value: object) -> None:
    """Write one JSON document to stdout."""
    json.dump(value, sys.stdout, indent=2, sort_keys=False)
    sys.stdout.write("\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a plain aligned table to stdout; it looks the same in a terminal, a log and a README."""
    rows = [tuple(map(shown, row)) for row in rows]
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    for row in (columns, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_facts(facts: Mapping[str, str]) -> None:
    """Write `name  value` lines to stdout."""
    width = max((len(name) for name in facts), default=0)
    for name, value in facts.items():
        print(f"{name.ljust(width)}  {shown(str(value))}")


class Progress:
    """Writes each step to stderr as a plain line with the seconds since the start."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._start = time.monotonic()

    def __call__(self, message: str) -> None:
        """Report one step."""
        if not self._quiet:
            print(f"[{time.monotonic() - self._start:6.1f} s] {shown(message)}", file=sys.stderr, flush=True)
