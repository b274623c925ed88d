"""How results and progress look. In: rows, facts, messages. Out: results on stdout, progress on stderr."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def print_json(value: object) -> None:
    """Write one JSON document to stdout."""
    json.dump(value, sys.stdout, indent=2, sort_keys=False)
    sys.stdout.write("\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a plain aligned table to stdout; it looks the same in a terminal, a log and a README."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    for row in (columns, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_facts(facts: Mapping[str, str]) -> None:
    """Write `name  value` lines to stdout."""
    width = max((len(name) for name in facts), default=0)
    for name, value in facts.items():
        print(f"{name.ljust(width)}  {value}")


class Progress:
    """Writes each step to stderr as a plain line with the seconds since the start."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._start = time.monotonic()

    def __call__(self, message: str) -> None:
        """Report one step."""
        if not self._quiet:
            print(f"[{time.monotonic() - self._start:6.1f} s] {message}", file=sys.stderr, flush=True)
