"""Waits with a limit. In: a program, its pipe, or a state. Out: what it printed, its next line, or nothing.

When the limit is over, the error says what was waited for and what the program wrote so far. The limit is
for what hangs, so it is long enough for a busy machine. tests/unit/repository/test_waits.py holds the tests
to it.
"""

import queue
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, AnyStr, TypeVar

LIMIT_S = 600.0
T = TypeVar("T")


class WaitedTooLongError(AssertionError):
    """What a test waited for did not come."""


def _nothing() -> str:
    return ""


def until(
    ready: Callable[[], object], what: str, *, said: Callable[[], str] = _nothing, limit_s: float = LIMIT_S
) -> None:
    """Look again and again, until it is ready."""
    end = time.monotonic() + limit_s
    while not ready():
        if time.monotonic() > end:
            raise WaitedTooLongError(f"{what}: not within {limit_s:g} s; so far:\n{said()}")
        time.sleep(0.02)


def answer(
    read: Callable[[], T], what: str, *, said: Callable[[], str] = _nothing, limit_s: float = LIMIT_S
) -> T:
    """What a call returns that may wait for ever."""
    found: queue.Queue[T] = queue.Queue()
    threading.Thread(target=lambda: found.put(read()), daemon=True).start()
    try:
        return found.get(timeout=limit_s)
    except queue.Empty:
        raise WaitedTooLongError(f"{what}: not within {limit_s:g} s; so far:\n{said()}") from None


def line(
    pipe: IO[AnyStr] | None,
    what: str = "a line of the program",
    *,
    said: Callable[[], str] = _nothing,
    limit_s: float = LIMIT_S,
) -> AnyStr:
    """The next line of a program; empty at its end."""
    assert pipe is not None
    return answer(pipe.readline, what, said=said, limit_s=limit_s)


def run_program(
    command: Sequence[str | Path], *, check: bool = False, timeout: float = 6 * LIMIT_S, **more: Any
) -> subprocess.CompletedProcess[str]:
    """A program that has ended, with what it printed; its exit code is for the test to judge."""
    return subprocess.run(command, capture_output=True, text=True, check=check, timeout=timeout, **more)
