"""Which folder a command works in. In: where it was started. Out: a checkout, or the user's data folder.

The suites, rules, templates and bounds travel with the tool (`shipping.py`), so that no verb that only reads
them needs a checkout. What such a verb leaves (histories, results) stays in the user's data folder.

One builder at a time works in a checkout: the second waits for `build/.lock`, held through the kernel's file
lock, which ends with the process however it ends.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

from stackcheck.errors import ConfigurationError, FileError
from stackcheck.files import users
from stackcheck.files.atomic import UNUSABLE, file_error

MARK, RULES = "matrix.yaml", "images/compat.yaml"
PARTS = (MARK, "images", "tests", "trainers")
PACKAGE = Path(__file__).resolve().parents[1]


def above(start: Path) -> Path | None:
    """The nearest folder from `start` upwards with a matrix or its rules; `start` itself stays as given."""
    folders = (start, *start.resolve().parents)
    return next((one for one in folders if any((one / mark).is_file() for mark in (MARK, RULES))), None)


def shipped() -> Path:
    """The suites, rules and templates of this tool: in the wheel, or around the package in its checkout.

    Raises:
        ConfigurationError: The installation has none.
    """
    for folder in (PACKAGE / "checkout", PACKAGE.parent):
        if all((folder / part).exists() for part in PARTS):
            return folder
    raise ConfigurationError(
        "this installation of stackcheck has no matrix, suites and rules of its own",
        where=str(PACKAGE / "checkout"),
        expected=", ".join(PARTS),
        next_step="install the wheel that `make wheel` writes, or work in a checkout",
    )


def users_own() -> Path:
    """The user's data folder, as a checkout: links to what this tool ships, and `build/` of its own.

    Raises:
        ConfigurationError: As `shipped`.
        FileError: The folder cannot be written.
    """
    folder = users.folder("XDG_DATA_HOME") / "stackcheck"
    source = shipped()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for part in PARTS:
            _link(folder / part, source / part)
    except OSError as error:
        raise FileError(
            "the user's data folder cannot be written",
            where=str(folder),
            got=error.strerror,
            next_step="choose another one: XDG_DATA_HOME=FOLDER stackcheck …",
        ) from error
    return folder


def _link(path: Path, source: Path) -> None:
    """Link to the installed version, whichever an earlier one was; another command may do it meanwhile."""
    if path.is_symlink() and path.readlink() == source:
        return
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.symlink_to(source)
    new.replace(path)


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
