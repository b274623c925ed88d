"""The folder of locks that says who uses which device: one a host, for every user and container.

In: a vendor. Out: what a container has to mount. tests/acceptance/harness/leases.py keeps the locks, on the
bare machine in the same folder.
"""

from __future__ import annotations

from pathlib import Path

from stackcheck.engine.container import Mount
from stackcheck.errors import ConfigurationError

FOLDER = Path("/tmp/stackcheck-leases")  # noqa: S108  # opened to all, and never followed through a link


def mounts(vendor: str) -> tuple[Mount, ...]:
    """The mount of the folder, made where it is not there; none for a processor, which many may share."""
    if vendor == "cpu":
        return ()
    try:
        FOLDER.mkdir()
        FOLDER.chmod(0o1777)  # mkdir's mode is narrowed by the umask
    except FileExistsError:
        if FOLDER.is_symlink() or not FOLDER.is_dir():
            raise ConfigurationError(
                "the folder of device locks is none", where=str(FOLDER), next_step=f"rm {FOLDER}"
            ) from None
    return (Mount(source=FOLDER, target="/stackcheck/leases", read_only=False),)
