"""How output looks. In: rows, facts, messages, errors. Out: results on stdout, the rest on stderr."""

import contextlib
import errno
import io
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TextIO, TypeGuard, cast

from stackcheck.errors import StackcheckError
from stackcheck.files.atomic import file_error

STYLES = {"bad": "1;31", "good": "1;32", "remark": "33", "head": "1"}
GOOD, BAD = (
    frozenset({"PASSED", "VERIFIED", "passed", "ok"}),
    frozenset({"FAILED", "REVOKED", "failed", "missing"}),
)
LONG_BYTES = 10_000_000  # a copy of less is over before its bar is read
volume = {"quiet": False, "verbose": False}  # what -q and -v before the verb asked for


def shown(text: str, *, lines: bool = False) -> str:
    r"""A text as a terminal may get it: characters that are not printable are written out (\x1b).

    Tags, media types, names of packages and lines of containers are foreign: with control characters they
    could rewrite what the terminal shows, or forge a line. With `lines`, line breaks and tabs stay.
    """
    kept = "\n\t" if lines else ""
    return "".join(char if char.isprintable() or char in kept else _escaped(char) for char in text)


class Printable(io.TextIOBase):
    """A stream for text alone: it escapes each character that controls a terminal.

    A reader that ends early, as `head` does, stops no work and changes no exit code. A program that `run`
    starts writes to `buffer`, past this: it may draw what it likes.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.written = False
        self.buffer = getattr(stream, "buffer", None)

    @property
    def encoding(self) -> str:  # type: ignore[override]  # the stubs have a plain attribute
        """The encoding of the wrapped stream; a library that finds none would write past this wrapper."""
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]  # as above
        """How the stream itself handles what it cannot encode."""
        return self._stream.errors

    def write(self, text: str) -> int:
        """Write a text as `shown` has it."""
        if not isinstance(text, str):
            raise TypeError(f"a text was expected, not {type(text).__name__}")
        self.write_styled(shown(text, lines=True))
        return len(text)

    def write_styled(self, text: str) -> None:
        """Write a coloured text, whose foreign parts went through `shown` before."""
        self.written = True
        with self._to_nobody():
            self._stream.write(text)

    def flush(self) -> None:
        """Flush the stream itself."""
        with self._to_nobody():
            self._stream.flush()

    @contextlib.contextmanager
    def _to_nobody(self) -> Iterator[None]:
        """Throw away what comes after a failure; it is an error unless a pipe's reader has ended."""
        try:
            yield
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if error.errno != errno.EPIPE:
                raise file_error(error, Path(self._stream.name)) from error

    def fileno(self) -> int:
        """The descriptor of the stream itself."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Whether the stream itself is a terminal."""
        return self._stream.isatty()


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def _has_colour(stream: object) -> bool:
    """Whether to print colour: on a terminal, unless NO_COLOR is set (no-color.org)."""
    told = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return isinstance(stream, Printable) and stream.isatty() and not told


def print_styled(word: str, style: str, rest: str = "", *, file: TextIO | Printable | None = None) -> None:
    """Write a line that begins with a word in colour."""
    stream = file or sys.stdout
    if isinstance(stream, Printable) and _has_colour(stream):
        stream.write_styled(f"\x1b[{STYLES[style]}m{shown(word)}\x1b[0m{shown(rest, lines=True)}\n")
    else:
        stream.write(f"{word}{rest}\n")


def counted(number: int, noun: str) -> str:
    """`1 image`, `2 images`: a number with its noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def print_error(error: Exception) -> None:
    """Write an error to stderr, with the lines of its details."""
    print_styled("error:", "bad", f" {shown(str(error), lines=True)}", file=sys.stderr)
    if isinstance(error, StackcheckError) and not error.next_step:
        print(f"  next: {error.usual_step}", file=sys.stderr)
    if volume["verbose"]:
        print("".join(traceback.format_exception(error)), end="", file=sys.stderr)


def print_json_error(error: StackcheckError) -> None:
    """Write an error to stdout, as the only document of a verb that was asked for JSON."""
    details = {name: getattr(error, name) for name in ("what", "where", "got", "expected")}
    step = error.next_step or error.usual_step
    print_json({"error": {**details, "next": step, "exit_code": error.exit_code}})


def print_note(text: str) -> None:
    """Write what the user should know, although the command succeeded, to stderr."""
    if not volume["quiet"]:
        print_styled("note:", "remark", f" {shown(text)}", file=sys.stderr)


def print_json(value: object) -> None:
    """Write one JSON document to stdout."""
    json.dump(value, sys.stdout, indent=2, sort_keys=False)
    sys.stdout.write("\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write an aligned table to stdout: plain in a log and a README, as wide as a terminal in one."""
    rows = [tuple(map(shown, row)) for row in rows]
    if isinstance(sys.stdout, Printable) and sys.stdout.isatty():
        sys.stdout.write_styled(_fitted(columns, rows, colour=_has_colour(sys.stdout)))
        return
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    for row in (columns, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _fitted(columns: Sequence[str], rows: Sequence[Sequence[str]], *, colour: bool) -> str:
    """The table for a terminal: what is too wide for it goes on in the next line of its column."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, name in enumerate(columns):
        table.add_column(Text(name), overflow="fold", no_wrap=index == 0)  # the first one is copied
    for row in rows:
        style = {cell: "green" for cell in row if cell in GOOD} | {cell: "red" for cell in row if cell in BAD}
        table.add_row(*(Text(cell, style=style.get(cell, "")) for cell in row))
    width = shutil.get_terminal_size().columns
    into = io.StringIO()
    console = Console(
        file=into,
        width=width,
        force_terminal=colour,
        color_system="standard" if colour else None,
        highlight=False,
    )
    console.print(table)
    return "".join(f"{line.rstrip()}\n" for line in into.getvalue().splitlines())


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
        if not (self._quiet or volume["quiet"]):
            print(f"[{time.monotonic() - self._start:6.1f} s] {shown(message)}", file=sys.stderr, flush=True)

    def copying(self, chunks: Iterator[bytes], size_bytes: int) -> Iterator[bytes]:
        """Pass the bytes of a copy on; a terminal shows a bar while it lasts, if the copy is a long one."""
        if self._quiet or volume["quiet"] or size_bytes < LONG_BYTES or not _may_draw(sys.stderr):
            yield from chunks
            return
        from rich import progress
        from rich.console import Console

        columns = (progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn())
        console = Console(file=cast("IO[str]", _Drawing(sys.stderr)), force_terminal=True, highlight=False)
        with progress.Progress(
            *columns, progress.TimeRemainingColumn(), console=console, transient=True
        ) as bar:
            task = bar.add_task("", total=size_bytes)
            for chunk in chunks:
                yield chunk
                bar.advance(task, len(chunk))


def _may_draw(stream: object) -> TypeGuard[Printable]:
    """Whether a line can be drawn anew: a dumb terminal cannot move its cursor."""
    return isinstance(stream, Printable) and stream.isatty() and os.environ.get("TERM") != "dumb"


class _Drawing(io.TextIOBase):
    """A stream for what this program draws itself; no foreign text goes through it."""

    def __init__(self, stream: Printable) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write_styled(text)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


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
