"""Write a file whole or not at all.

In: a path and its bytes. Out: the file, which after a crash, a full disk or a power cut is either there and
whole, or as it was before.
"""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from stackcheck.errors import FileError

TEMPORARY = ".tmp-"  # how the name of an unfinished file begins
# What a full or failing disk, a quota, a limit, a read-only disk and a missing permission raise.
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG}
# What a file where a folder is expected raises, or a folder where a file is expected.
IN_THE_WAY = {errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENOTEMPTY}
UNUSABLE = NO_ROOM | IN_THE_WAY | {errno.ENAMETOOLONG, errno.ELOOP}
NEXT_STEP = "free disk space or fix the permissions, then run the same command again"
MOVE_AWAY = "move away the file or folder that is in the way, then run the same command again"


def file_error(error: OSError, path: Path | None = None, next_step: str = NEXT_STEP) -> FileError:
    """The error for a user: which file, and what the operating system said."""
    # Of a copy, `filename2` is the destination.
    where = path or error.filename2 or error.filename
    return FileError(
        "cannot read or write a file",
        where=str(where) if where else None,
        got=error.strerror or str(error),
        next_step=MOVE_AWAY if error.errno in IN_THE_WAY else next_step,
    )


@contextlib.contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """A temporary file beside a path, for the body to fill and rename; its errors are `FileError`s."""
    # Named before it exists: an interrupted write then knows which file to remove.
    temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)  # already renamed if all went well
    except OSError as error:
        raise file_error(error, path) from error


def write_atomically(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a file through a temporary file beside it; create its folder if it does not exist.

    Raises:
        FileError: The disk is full or read-only, or a permission is missing.
    """
    with unfinished(path) as temporary:
        with temporary.open("xb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename itself has to survive a power cut
        finally:
            os.close(folder)


def require_room(folder: Path, needed: int, what: str) -> None:
    """Raise `FileError` unless a folder has room for `needed` bytes of `what`."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise FileError(
            f"there is not enough room for {what}",
            where=str(folder),
            got=f"{free / 1e9:.2f} GB free",
            expected=f"{needed / 1e9:.2f} GB, without compression",
            next_step=NEXT_STEP,
        )
