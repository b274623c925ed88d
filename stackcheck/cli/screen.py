"""Tables that fit the terminal. In: columns and rows. Out: a table on stdout, its long cells cut."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

from stackcheck.cli.output import print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

GAP, LEAST = 2, 8  # between columns, as `print_table` has it; what a cell keeps at least


def print_fitted(columns: Sequence[str], rows: Sequence[Sequence[str]], keep: str = "") -> None:
    """Write a table to stdout; in a terminal the widest columns but `keep` are cut until a row is one line.

    A file or a pipe gets every character, as scripts and `grep` need them.
    """
    if sys.stdout.isatty():
        rows = fitted(columns, rows, shutil.get_terminal_size().columns, keep)
    print_table(columns, rows)


def fitted(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, keep: str = ""
) -> list[tuple[str, ...]]:
    """The rows with their cells cut (`…`) so that a line has at most `width` characters, if that can be."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    free = {i for i, name in enumerate(columns) if name != keep}
    while sum(widths) + GAP * (len(widths) - 1) > width:
        widest = max(free, key=lambda i: widths[i] - max(LEAST, len(columns[i])), default=None)
        if widest is None or widths[widest] <= max(LEAST, len(columns[widest])):
            break
        widths[widest] -= 1
    return [tuple(map(_cut, row, widths)) for row in rows]


def _cut(cell: str, width: int) -> str:
    return cell if len(cell) <= width else f"{cell[: width - 1]}…"
