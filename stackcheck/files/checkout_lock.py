"""One builder at a time in a checkout: the second waits, and reports for which process.

In: the checkout and what the caller is about to do. Out: `build/.lock`, held through the kernel's file lock,
which ends with the process however it ends.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

from stackcheck.files.atomic import UNUSABLE, file_error


@contextlib.contextmanager
def exclusive(root: Path, what: str, report: Callable[[str], None]) -> Iterator[None]:
    """Hold the checkout's lock while the body runs; not to be taken twice by one process.

    Raises:
        FileError: The disk of `build/` is full or read-only, and the error itself names no file.
    """
    path = root / "build" / ".lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("ab+", buffering=0) as file, _held(file, path, what, report):
            yield
    except OSError as error:  # a write to an open file names no path
        if error.filename or error.errno not in UNUSABLE:
            raise
        raise file_error(error, path.parent) from error


@contextlib.contextmanager
def _held(file: FileIO, path: Path, what: str, report: Callable[[str], None]) -> Iterator[None]:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = path.read_text(encoding="utf-8", errors="replace").strip() or "another process"
        report(f"waiting for {holder}, which works in this checkout ({path})")
        fcntl.flock(file, fcntl.LOCK_EX)
    file.truncate(0)
    with contextlib.suppress(OSError):  # on a full disk a process that waits shows "another process"
        file.write(f"{what} (pid {os.getpid()})\n".encode())
    try:
        yield
    finally:
        file.truncate(0)
