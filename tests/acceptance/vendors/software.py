"""The libraries and the compiler of a vendor, which need no device. In: a vendor's name. Out: its `Software`.

Each vendor has a module `<vendor>_software.py` with the tables: which libraries torch loads, how each reports
its version, where its device code is and for which architectures.
"""

import ctypes
import importlib
import importlib.machinery
import re
import runpy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, cast

from vendors import VENDORS

Version = tuple[int, ...]

# Two copies of one of these in a process have separate state: two sets of threads, registries or heaps.
COMMON_ONCE: Mapping[str, tuple[str, ...]] = {
    "the C++ runtime": ("libstdc++", "libc++"), "an OpenMP runtime": ("libgomp", "libiomp5", "libomp"),
    "torch": ("libtorch_cpu",), "torch for Python": ("libtorch_python",), "Triton": ("libtriton",),
    "LLVM": ("libLLVM",),
}  # fmt: skip
GPU_VENDORS = tuple(name for name in VENDORS if name != "cpu")
# What every program for a vendor's devices is linked to, and torch's own libraries of its builds.
RUNTIMES: Mapping[str, frozenset[str]] = {
    "amd": frozenset({"libamdhip64", "libhiprtc", "libhipblas", "libtorch_hip", "libc10_hip"}),
    "nvidia": frozenset({"libcuda", "libcudart", "libnvrtc", "libcublas", "libtorch_cuda", "libc10_cuda"}),
    "cpu": frozenset(),
}
# What auditwheel adds to the name of a library inside a wheel: libgomp-a34b3233.so.1.
_ADDED = re.compile(r"(-[0-9a-f]{8})?\.so($|\.[0-9.]*$)")


def torch_version() -> Mapping[str, object]:
    """What torch/version.py says: `cuda`, `hip` and `rocm` are None or a release. torch itself is not loaded.

    Raises:
        ModuleNotFoundError: torch is not installed.
    """
    found = importlib.machinery.PathFinder.find_spec("torch")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("torch is not installed")
    return runpy.run_path(str(Path(found.origin).with_name("version.py")))


@dataclass(frozen=True, kw_only=True)
class Library:
    """One of the vendor's libraries.

    Attributes:
        name: The vendor's name for it.
        stem: Its file name up to `.so`.
        version: Asks the loaded library for its version; None if the library cannot report it.
        wheels: Patterns of the distributions that have the library's own version.
        declared: The entry of the image's declaration that has its version.
        needed: Whether every torch of this vendor loads it.
        device_code: Whether its file, or one of its parts, holds code for each architecture.
        kernels: Patterns of files with kernels for one `{arch}`, relative to the library's folder; one of
            them must match.
        parts: Stems of libraries beside it that it opens itself.
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
    """The vendor's compiler; an image need not have it.

    Attributes:
        program: Its name.
        folders: Where to look if it is not on the PATH.
        source: One line of device code.
        suffix: The suffix of the source file.
        options: With `{arch}`, `{source}` and `{output}`; `architectures` reads the output.
        archs: Architectures that are tried and recorded besides the declared ones.
    """

    program: str
    folders: tuple[str, ...]
    source: str
    suffix: str
    options: tuple[str, ...]
    archs: tuple[str, ...] = field(default=())


class Software(Protocol):
    """What every `<vendor>_software` module defines."""

    LIBRARIES: tuple[Library, ...]
    COMPILER: Compiler | None
    FOLDERS: tuple[str, ...]  # where libraries are that do not come in a wheel
    VARIABLES: tuple[str, ...]  # how the names of variables begin that change speed or collectives
    SMI: str | None  # the module of the vendor's management library, which torch imports if it is on the path
    CODE_SECTIONS: tuple[str, ...]  # ELF sections that hold device code for this vendor
    FOREIGN: Mapping[str, str]  # pattern of a package's name -> why it cannot work on this vendor
    TOLERATED: Mapping[str, str]  # pattern -> why a package may have parts for another vendor alone

    @staticmethod
    def architectures(path: Path) -> frozenset[str]:
        """The architectures for which a file holds machine code; empty if it holds none."""

    @staticmethod
    def covers(arch: str, compiled: Iterable[str]) -> bool:
        """Whether machine code for `compiled` runs on `arch`."""


def of(vendor: str) -> Software:
    """The software of that vendor."""
    return cast("Software", importlib.import_module(f"vendors.{vendor}_software"))


def runtimes(vendor: str) -> frozenset[str]:
    """Stems of the libraries that are this vendor's own."""
    return frozenset(library.stem for library in of(vendor).LIBRARIES) | RUNTIMES[vendor]


def once() -> dict[str, tuple[str, ...]]:
    """What a process may load only once: a name -> the stems of the files that provide it."""
    libraries = (library for vendor in VENDORS for library in of(vendor).LIBRARIES)
    return {**COMMON_ONCE, **{library.name: (library.stem,) for library in libraries}}


def stem(path: str) -> str:
    """A library's name without the additions of linkers and packagers: libgomp for libgomp-a34b3233.so.1."""
    return _ADDED.sub("", Path(path).name)


def ask(function: "ctypes._NamedFuncPointer", *arguments: object) -> None:
    """Call a C function that returns 0 on success. Raises `OSError` with any other return code."""
    code = function(*arguments)
    if code:
        raise OSError(f"{function.__name__} returned {code}")


def number(library: ctypes.CDLL, function: str) -> int:
    """The number that a C function `int f(int *)` writes."""
    value = ctypes.c_int()
    ask(library[function], ctypes.byref(value))
    return value.value


def nccl(library: ctypes.CDLL) -> Version:
    """The version of NCCL or RCCL: 22907 is 2.29.7; up to 2.8, 2708 was 2.7.8."""
    code = number(library, "ncclGetVersion")
    step = 10_000 if code >= 10_000 else 1_000
    return (code // step, code % step // 100, code % 100)
