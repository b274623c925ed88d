"""SHA-256 of a file of this host. In: a path. Out: 64 hexadecimal digits."""

import hashlib
from pathlib import Path


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits, without `sha256:`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
