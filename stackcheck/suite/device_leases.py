"""The folder of device leases: one for each host, shared by all users and containers.

In: a vendor. Out: the mount that a container needs. tests/acceptance/harness/leases.py holds one lock for
each device there; outside a container it uses the same folder.
"""

from __future__ import annotations

from pathlib import Path

from stackcheck.engine.container import Mount
from stackcheck.errors import ConfigurationError

FOLDER = Path("/tmp/stackcheck-leases")  # noqa: S108  # open to all users, and a link in its place is refused


def mounts(vendor: str) -> tuple[Mount, ...]:
    """The mount of the lease folder, which is made if it is missing; none for a CPU, which runs may share.

    Raises:
        ConfigurationError: Its path exists and is not a folder.
    """
    if vendor == "cpu":
        return ()
    try:
        FOLDER.mkdir()
        FOLDER.chmod(0o1777)  # mkdir's mode is narrowed by the umask
    except FileExistsError:
        if FOLDER.is_symlink() or not FOLDER.is_dir():
            raise ConfigurationError(
                "the path of the device leases is not a directory",
                where=str(FOLDER),
                got="a symbolic link" if FOLDER.is_symlink() else "a file",
                expected="a directory, or nothing: it is made when it is missing",
                next_step=f"rm {FOLDER}",
            ) from None
    return (Mount(source=FOLDER, target="/stackcheck/leases", read_only=False),)
