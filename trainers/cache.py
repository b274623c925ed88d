"""Files that are made once on a host from others: unpacked shards, tokenized texts, the corpus.

In: what a file is made from, and how. Out: its path. Several ranks may ask at once: one makes it, the others
wait for its lock. A name depends on the sources, so a changed source is a new file.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VARIABLE = "STACKCHECK_DATA_CACHE"


def root() -> Path:
    """The folder of all such files: $STACKCHECK_DATA_CACHE, or a folder under the user's cache."""
    named = os.environ.get(VARIABLE)
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(named or home + "/stackcheck-trainers")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RefusedError(
            f"{folder}: cannot be made ({error.strerror}); name one that can with ${VARIABLE}"
        ) from error
    return folder


def key(*facts: object) -> str:
    """A name for what follows from these facts."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


def seen(path: Path) -> tuple[str, int, int]:
    """Facts about a source that change when the source changes."""
    state = path.stat()
    return str(path.resolve()), state.st_size, state.st_mtime_ns


@contextmanager
def making(name: str) -> Iterator[Path]:
    """The folder of this name, locked: no other process writes there at the same time."""
    folder = root() / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def file(source: Path, name: str, make: Callable[[], bytes]) -> Path:
    """The file that `make` makes from a source: made now, or by an earlier call."""
    with making(key("file", seen(source))) as folder:
        made = folder / name
        if not made.exists():
            partial = made.with_suffix(".partial")
            partial.write_bytes(make())
            partial.rename(made)
        return made
