"""Write a file whole or not at all.

In: a path and its bytes. Out: the file, which after a crash, a full disk or a power cut is either there and
whole, or as it was before.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from stackcheck.oci import RegistryError

if TYPE_CHECKING:
    from collections.abc import Iterable


def write_atomically(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a file by way of a temporary one beside it; raises `RegistryError` where that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".tmp-", delete=False) as file:
            try:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
                os.fchmod(file.fileno(), 0o644)
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename itself has to survive a power cut
        finally:
            os.close(folder)
    except OSError as error:
        raise RegistryError(
            "a file of the layout could not be written",
            where=str(path),
            got=error.strerror,
            next_step="make room or mend the permissions, then run the same command again",
        ) from error
