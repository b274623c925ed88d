"""The `cpu` vendor's software. In: a file.
Out: nothing, as there is no vendor library, device code or compiler.
"""

from collections.abc import Iterable
from pathlib import Path

from vendors.software import Compiler, Library

LIBRARIES: tuple[Library, ...] = ()
COMPILER: Compiler | None = None
FOLDERS: tuple[str, ...] = ()
VARIABLES: tuple[str, ...] = ("OMP_", "MKL_", "KMP_", "GLOO_")
SMI: str | None = None
CODE_SECTIONS: tuple[str, ...] = ()
FOREIGN: dict[str, str] = {}
TOLERATED: dict[str, str] = {}


def architectures(path: Path) -> frozenset[str]:
    """None: a CPU runs the file's own code."""
    del path
    return frozenset()


def covers(arch: str, compiled: Iterable[str]) -> bool:
    """Whether the code is for this architecture; a CPU has no device code."""
    return arch in compiled
