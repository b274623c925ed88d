"""One builder at a time in a checkout: the second waits and says for whom.

In: the checkout and what the caller is about to do. Out: `build/.lock`, held through the kernel's file lock,
which ends with the process however it ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from typing import TYPE_CHECKING

from stackcheck.durable import MEND
from stackcheck.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from io import FileIO
    from pathlib import Path


@contextlib.contextmanager
def exclusive(root: Path, what: str, report: Callable[[str], None]) -> Iterator[None]:
    """Hold the checkout's lock while the body runs; not to be taken twice by one process.

    Args:
        root: The checkout.
        what: What the holder does, as the one who waits reads it.
        report: Told once when there is somebody to wait for.

    Raises:
        ConfigurationError: The disk that `build/` is on was full, now or while the body ran.
    """
    path = root / "build" / ".lock"
    with _room(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+", buffering=0) as file, _held(file, path, what, report):
            yield


@contextlib.contextmanager
def _held(file: FileIO, path: Path, what: str, report: Callable[[str], None]) -> Iterator[None]:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = path.read_text(encoding="utf-8").strip() or "another process"
        report(f"waiting for {holder}, which works in this checkout ({path})")
        fcntl.flock(file, fcntl.LOCK_EX)
    file.truncate(0)
    with contextlib.suppress(OSError):  # on a full disk whoever waits reads "another process"
        file.write(f"{what} (pid {os.getpid()})\n".encode())
    try:
        yield
    finally:
        file.truncate(0)


@contextlib.contextmanager
def _room(folder: Path) -> Iterator[None]:
    """A disk that is full or read-only, met anywhere below, is the user's to mend and no defect."""
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EROFS}:
            raise
        raise ConfigurationError(
            "a file could not be written",
            where=str(error.filename2 or error.filename or folder),  # of a copy, where it was to go
            got=error.strerror,
            next_step=MEND,
        ) from error
