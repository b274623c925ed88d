"""What an image's files were when it was built here: the wheels of its lock, and the base below them.

In: `build/<name>/`, the digests of the image's inputs. Out: path -> SHA-256 sums. A wheel counts if the lock
has its hash; the lock and the root file system count if image.json has their digests. What is not kept any
more vouches for nothing, and contradicts nothing.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
from typing import TYPE_CHECKING

from stackcheck.oci import filesystem
from stackcheck.oci.filesystem import Hashing
from stackcheck.suite import records

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_MOVED = re.compile(r"[^/]+\.data/(purelib|platlib)/")  # pip puts these beside the rest
_BASE = "rootfs.tar"


def known(folder: Path, inputs: Mapping[str, str]) -> dict[str, set[str]]:
    """The sums of files by their absolute paths; of files of wheels by those below site-packages."""
    found: dict[str, set[str]] = {}
    digests, context = frozenset(inputs.values()), folder / "context"
    for path in sorted(context.glob("*.lock")):
        if _digest(path) in digests:
            locked = frozenset(_HASH.findall(path.read_text(encoding="utf-8")))
            _add(found, _of_wheels(sorted(folder.glob("wheelhouse/wheels/*.whl")), locked))
    base = context / _BASE
    if base.is_file() and _digest(base) in digests:
        tree = filesystem.read_tar(base, _wanted)
        _add(
            found,
            ((path, dict(entry.sums)["sha256"]) for path, entry in tree.entries.items() if entry.sums),
        )
    return found


def _wanted(path: str) -> Hashing:
    return Hashing(sums=() if path.endswith(".pyc") else ("sha256",))


def _of_wheels(wheels: Iterable[Path], locked: frozenset[str]) -> Iterable[tuple[str, str]]:
    for path in wheels:
        if _digest(path).removeprefix("sha256:") in locked:
            with zipfile.ZipFile(path) as archive:
                names = [name for name in archive.namelist() if name.endswith(records.RECORD)]
                for name in names:
                    for row, digest in records.rows(archive.read(name)):
                        yield _MOVED.sub("", row), digest


def _add(found: dict[str, set[str]], pairs: Iterable[tuple[str, str]]) -> None:
    for name, digest in pairs:
        found.setdefault(name, set()).add(digest)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
