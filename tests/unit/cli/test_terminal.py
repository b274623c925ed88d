"""Colour, width and how much is said: on a terminal, in a file, with NO_COLOR, -q, -v, at a late signal."""

import io
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stackcheck.cli import output
from stackcheck.cli.output import Printable, Progress, print_error, print_note, print_styled, print_table
from stackcheck.errors import ConfigurationError
from waits import run_program

SGR = re.compile(r"\x1b\[[0-9;]*m")
ROWS = [("cuda13.0-torch2.13.0-py3.12-debian12", "FAILED", "a reason that is longer than a terminal " * 4)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def everything() -> None:
    print_styled("VERIFIED", "good", "  x")
    print_table(("stack", "verdict", "why"), ROWS)
    print_note("a remark")
    print_error(ConfigurationError("wrong"))


@pytest.fixture
def printed(monkeypatch) -> Callable[[io.StringIO], str]:
    """What `everything` writes to a stream."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")

    def into(stream: io.StringIO) -> str:
        monkeypatch.setattr("sys.stdout", Printable(stream))
        monkeypatch.setattr("sys.stderr", Printable(stream))
        everything()
        return stream.getvalue()

    return into


def test_only_a_terminal_has_colour(printed):
    coloured = printed(Terminal())
    assert "\x1b[1;32mVERIFIED\x1b[0m" in coloured
    assert "\x1b[1;31merror:\x1b[0m" in coloured
    assert not SGR.search(printed(io.StringIO()))


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_user_can_refuse_colour(printed, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert "\x1b" not in printed(Terminal())


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_a_table_is_as_wide_as_the_terminal_and_loses_nothing(printed, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    lines = printed(Terminal()).splitlines()
    assert max(map(len, lines)) <= columns
    assert any(line.startswith(ROWS[0][0]) for line in lines), "the name of a stack is copied from its line"
    words = " ".join(lines).split()
    assert all(words.count(word) >= ROWS[0][2].split().count(word) for word in ("reason", "longer"))


def test_foreign_text_cannot_steer_the_terminal_in_a_coloured_line_either(printed):
    printed(stream := Terminal())
    stream.truncate(0)
    print_table(("a",), [("\x1b]0;owned\x07",)])
    print_styled("\x1b[2J", "good", "\x1b[2J")
    assert not re.search(r"\x1b(?!\[[0-9;]*m)|\x07", stream.getvalue())


def test_quiet_keeps_results_and_errors_and_verbose_says_where(printed, monkeypatch):
    monkeypatch.setitem(output.volume, "quiet", True)
    text = printed(io.StringIO())
    Progress()("a step")
    assert "remark" not in text
    assert {"VERIFIED", "error:"} <= {*text.split()}
    assert "Traceback" not in text
    monkeypatch.setitem(output.volume, "verbose", True)
    try:
        raise ConfigurationError("wrong")
    except ConfigurationError as error:
        monkeypatch.setattr("sys.stderr", stream := io.StringIO())
        print_error(error)
    assert "test_terminal.py" in stream.getvalue()


CHUNKS = [bytes(4_000_000)] * 5


def copied(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, *, quiet: bool = False) -> str:
    """What a terminal gets of a copy of 20 MB whose bytes all arrive."""
    monkeypatch.setattr("sys.stderr", Printable(stream))
    passed = list(Progress(quiet=quiet).copying(iter(CHUNKS), 20_000_000))
    assert passed == CHUNKS
    return stream.getvalue()


def test_a_long_copy_has_a_bar_that_goes_away(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    drawn = copied(Terminal(), monkeypatch)
    assert "/20.0 MB" in SGR.sub("", drawn)
    assert "\\x1b" not in drawn, "the terminal draws it; nothing of it is written out"
    assert drawn.rstrip().endswith(("\x1b[2K", "\x1b[?25h")), "its line is cleared"


def test_a_bar_is_for_a_terminal_a_long_copy_and_who_wants_to_see_it(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert copied(io.StringIO(), monkeypatch) == ""
    assert copied(Terminal(), monkeypatch, quiet=True) == ""
    monkeypatch.setitem(output.volume, "quiet", True)
    assert copied(Terminal(), monkeypatch) == ""
    monkeypatch.setitem(output.volume, "quiet", False)
    monkeypatch.setattr(output, "LONG_BYTES", 20_000_001)
    assert copied(Terminal(), monkeypatch) == ""
    monkeypatch.setattr(output, "LONG_BYTES", 1)
    monkeypatch.setenv("TERM", "dumb")
    assert copied(Terminal(), monkeypatch) == ""


def test_an_error_in_a_copy_ends_its_bar_and_stays_the_error(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", Printable(terminal))

    def broken() -> Iterator[bytes]:
        yield CHUNKS[0]
        raise ConfigurationError("cut off")

    with pytest.raises(ConfigurationError, match="cut off"):
        list(Progress().copying(broken(), 20_000_000))
    assert "\x1b[?25h" in terminal.getvalue(), "the cursor is there again"


ROOT = Path(__file__).resolve().parents[3]
LATE = "import atexit, os; from stackcheck.cli import main; atexit.register(os.kill, os.getpid(), {}); main()"
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
ENDINGS = [("list", ""), ("nope", "no such command"), ("lock nope", "next:")]


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(("verb", "said"), ENDINGS)
def test_a_signal_to_an_interpreter_that_ends_is_no_traceback(verb, said, number):
    command = [sys.executable, "-c", LATE.format(int(number)), *verb.split()]
    done = run_program(
        command,
        cwd=ROOT,
        timeout=60,
        preexec_fn=lambda: [signal.signal(known, signal.SIG_DFL) for known in SIGNALS],
    )
    assert done.returncode == -number
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert bool(done.stderr) == bool(said)
