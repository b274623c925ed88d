"""The folder of device leases: one for each host, shared by those who run stackcheck there.

In: a vendor. Out: the folder, which no container sees. tests/acceptance/harness/leases.py holds one lock for
each device there; outside stackcheck it uses the same folder. Only one group can write there, so that nobody
else on the host stops a run.
"""

from __future__ import annotations

import contextlib
import grp
import os
import stat
from pathlib import Path

from stackcheck.errors import ConfigurationError

FOLDER = Path("/tmp/stackcheck-leases")  # noqa: S108  # a link in its place is refused
GROUP = "stackcheck"  # of the people who share the devices of a host, where an administrator made it
MODE = 0o3770  # new files get the folder's group, and only their owner removes them


def group() -> int:
    """The group that may write to the folder: GROUP, else this user's own."""
    with contextlib.suppress(KeyError):
        return grp.getgrnam(GROUP).gr_gid
    return os.getegid()


def folders(vendor: str) -> tuple[Path, ...]:
    """The lease folder, which is made if it is missing; none for a CPU, which runs may share.

    Raises:
        ConfigurationError: Its path exists and is not a folder, or others own it.
    """
    if vendor == "cpu":
        return ()
    with contextlib.suppress(FileExistsError):
        FOLDER.mkdir(mode=0o700)
    try:
        folder = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigurationError(
            "the path of the device leases is not a directory that can be used",
            where=str(FOLDER),
            got="a symbolic link" if FOLDER.is_symlink() else error.strerror,
            expected="a directory, or nothing: it is made when it is missing",
            next_step=f"rm {FOLDER}",
        ) from None
    try:
        _close(folder)
    finally:
        os.close(folder)
    return (FOLDER,)


def _close(folder: int) -> None:
    """Let nobody but the group write there."""
    status = os.fstat(folder)
    if (stat.S_IMODE(status.st_mode), status.st_gid) == (MODE, group()):
        return
    try:
        os.fchown(folder, -1, group())
        os.fchmod(folder, MODE)  # last: a change of the group clears bits
    except PermissionError:
        raise ConfigurationError(
            "the folder of device leases belongs to another user",
            where=str(FOLDER),
            got=f"mode {stat.S_IMODE(status.st_mode):04o} of user {status.st_uid}, group {status.st_gid}",
            expected=f"mode {MODE:04o} of the group `{GROUP}`, in which you are",
            next_step=f"as root: groupadd -f {GROUP} && usermod -aG {GROUP} USER, then: rm -r {FOLDER}",
        ) from None
