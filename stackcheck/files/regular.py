"""Read a file that somebody else may have written.

In: a path in a folder that a container, another user or a download wrote to. Out: the bytes of a regular
file, or an `OSError`: reading a pipe could block, and a device never ends.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path, *, follow: bool = True) -> BinaryIO:
    """Open a regular file; with `follow`, also through a link."""
    link = 0 if follow else os.O_NOFOLLOW
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | link)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def read_regular(path: Path, limit: int, *, follow: bool = True) -> bytes:
    """At most `limit` bytes of a regular file."""
    with open_regular(path, follow=follow) as file:
        return file.read(limit)
