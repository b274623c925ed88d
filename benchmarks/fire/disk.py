"""A disk that is full, that fails, or that the process dies at, at its n-th call for one folder.

In: a folder, a number, and what happens then. Out: how many calls there were. Calls are those that open,
sync, rename, remove or make a file there: what a power cut, a full disk and a bad block can hit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KILL = "SIGKILL"
WAYS = (KILL, "ENOSPC", "EIO")
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir")  # sys.addaudithook's names, with the path first


@dataclass
class Calls:
    """The calls of one attempt, and at which of them it fails."""

    folder: str
    at: int
    how: str
    count: int = 0

    def met(self, *, reads: bool) -> None:
        """Count one, and fail if it is the one. A full disk can still be read."""
        self.count += not (reads and self.how == "ENOSPC")
        if self.count == self.at and not (reads and self.how == "ENOSPC"):
            self.at = 0
            if self.how == KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            number = getattr(errno, self.how)
            raise OSError(number, os.strerror(number))


_now: list[Calls] = []
_hooked: list[bool] = []


@contextlib.contextmanager
def failing(folder: Path, *, at: int, how: str) -> Iterator[Calls]:
    """In the body the n-th call for this folder fails; 0: none does, they are only counted."""
    if not _hooked:
        sys.addaudithook(_hook)  # cannot be taken back
        _hooked.append(True)
    calls = Calls(str(folder), at, how)
    _now[:] = [calls]
    try:
        with mock.patch.object(os, "fsync", side_effect=lambda _file: calls.met(reads=False)):
            yield calls
    finally:
        _now.clear()


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _now and event in EVENTS and str(arguments[0]).startswith(_now[0].folder):
        writes = event != "open" or arguments[2] & (os.O_WRONLY | os.O_RDWR)
        _now[0].met(reads=not writes)
