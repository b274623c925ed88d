"""Write a file whole or not at all.

In: a path and its bytes. Out: the file, which after a crash, a full disk or a power cut is either there and
whole, or as it was before.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

from stackcheck.oci import RegistryError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from stackcheck.errors import StackcheckError

TEMPORARY = ".tmp-"  # how the name of an unfinished file begins
MEND = "make room or mend the permissions, then run the same command again"


class DiskError(RegistryError):
    """A file of a store could not be written: no fault of what was to be stored."""


def write_atomically(
    path: Path, chunks: Iterable[bytes], *, failure: type[StackcheckError] = DiskError
) -> None:
    """Write a file by way of a temporary one beside it; raises `failure` where that fails."""
    # Named before it is there: who is interrupted while the file is made still knows what to take away.
    temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
                os.fchmod(file.fileno(), 0o644)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)  # gone already where all went well
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename itself has to survive a power cut
        finally:
            os.close(folder)
    except OSError as error:
        raise failure(
            "a file could not be written", where=str(path), got=error.strerror, next_step=MEND
        ) from error
