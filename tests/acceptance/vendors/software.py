"""What a vendor's software consists of, seen without a device. In: a vendor's name. Out: `Software`.

One module a vendor, `<vendor>_software.py`, has the tables: which libraries a torch of that vendor loads, how
each tells its own version, where device code lies and for which architectures it is.
"""

import ctypes
import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from vendors import VENDORS

Version = tuple[int, ...]

# Two copies of one of these in a process have two states: two sets of threads, two registries, two heaps.
COMMON_ONCE: Mapping[str, tuple[str, ...]] = {
    "the C++ runtime": ("libstdc++", "libc++"),
    "an OpenMP runtime": ("libgomp", "libiomp5", "libomp"),
    "torch": ("libtorch_cpu",),
    "torch for Python": ("libtorch_python",),
    "Triton": ("libtriton",),
    "LLVM": ("libLLVM",),
}
# What wheels that vendor their libraries add to a file's name (auditwheel): libgomp-a34b3233.so.1.
_ADDED = re.compile(r"(-[0-9a-f]{8})?\.so($|\.[0-9.]*$)")


@dataclass(frozen=True, kw_only=True)
class Library:
    """A library of the vendor's.

    Attributes:
        name: As its makers call it.
        stem: Its file's name up to `.so`.
        version: Asks the loaded library; None where it cannot tell.
        wheels: Patterns of the distributions whose version is the library's own.
        declared: Which entry of the image's declaration names its version.
        needed: Whether every torch of this vendor loads it.
        device_code: Whether its own file, or a part of it, holds code for each architecture.
        kernels: Patterns of files that hold kernels of one `{arch}`, from the library's folder on; one of
            them has to match.
        parts: Stems of libraries that it opens by itself and that lie beside it.
    """

    name: str
    stem: str
    version: Callable[[ctypes.CDLL], Version] | None = None
    wheels: tuple[str, ...] = ()
    declared: Literal["collective", "runtime"] | None = None
    needed: bool = False
    device_code: bool = False
    kernels: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """The vendor's compiler, where an image has one.

    Attributes:
        program: Its name.
        folders: Where it lies when it is not on the PATH.
        source: One line of device code.
        suffix: Of the source's file.
        options: For `{arch}`, `{source}` and `{output}`; the output is what `architectures` reads.
        archs: What is tried besides the declared architectures, and recorded.
    """

    program: str
    folders: tuple[str, ...]
    source: str
    suffix: str
    options: tuple[str, ...]
    archs: tuple[str, ...] = field(default=())


class Software(Protocol):
    """The names that every `<vendor>_software` module has."""

    LIBRARIES: tuple[Library, ...]
    COMPILER: Compiler | None
    FOLDERS: tuple[str, ...]  # where libraries lie that no wheel brought

    @staticmethod
    def architectures(path: Path) -> frozenset[str]:
        """The architectures that a file holds machine code for; empty when it holds none."""

    @staticmethod
    def covers(arch: str, compiled: Iterable[str]) -> bool:
        """Whether machine code for `compiled` runs on `arch`."""


def of(vendor: str) -> Software:
    """The software of that vendor."""
    loaded: Software = importlib.import_module(f"vendors.{vendor}_software")  # type: ignore[assignment]
    return loaded


def once() -> dict[str, tuple[str, ...]]:
    """What may be in a process once: a name, and the stems of the files that are that thing."""
    libraries = (library for vendor in VENDORS for library in of(vendor).LIBRARIES)
    return {**COMMON_ONCE, **{library.name: (library.stem,) for library in libraries}}


def stem(path: str) -> str:
    """A library's name without what linkers and packagers add: libgomp for libgomp-a34b3233.so.1."""
    return _ADDED.sub("", Path(path).name)


def ask(function: "ctypes._NamedFuncPointer", *arguments: object) -> None:
    """Call a C function that answers 0 when it could. Raises `OSError` with its code otherwise."""
    code = function(*arguments)
    if code:
        raise OSError(f"{function.__name__} answered {code}")


def number(library: ctypes.CDLL, function: str) -> int:
    """What a C function `int f(int *)` writes."""
    value = ctypes.c_int()
    ask(library[function], ctypes.byref(value))
    return value.value


def nccl(library: ctypes.CDLL) -> Version:
    """NCCL's and RCCL's own: 22907 is 2.29.7, and up to 2.8 it was 2708 for 2.7.8."""
    code = number(library, "ncclGetVersion")
    step = 10_000 if code >= 10_000 else 1_000
    return (code // step, code % step // 100, code % 100)
