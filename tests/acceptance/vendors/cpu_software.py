"""The `cpu` vendor's software: no library of its own, no device code, no compiler."""

from collections.abc import Iterable
from pathlib import Path

from vendors.software import Compiler, Library

LIBRARIES: tuple[Library, ...] = ()
COMPILER: Compiler | None = None
FOLDERS: tuple[str, ...] = ()


def architectures(path: Path) -> frozenset[str]:
    """A CPU runs what the file itself is."""
    del path
    return frozenset()


def covers(arch: str, compiled: Iterable[str]) -> bool:
    """There is no device code to choose from."""
    return arch in compiled
