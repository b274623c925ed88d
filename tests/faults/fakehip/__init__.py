"""A stand-in for AMD's HIP runtime and RCCL, for machines without a GPU. In: gcc. Out: two shared libraries.

An image has no compiler: there the libraries are those of `build/fakehip`, which this package makes on the
host: `python tests/faults/fakehip`.

It proves the side of the caller on AMD's code path: the names, argument orders, widths and handles of the
calls that this project makes through ctypes, and which devices the variables of a child show. It proves
nothing of AMD's own libraries, of torch on ROCm, or of a device.
"""

import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
MADE = HERE.parents[2] / "build" / "fakehip"
NAMES = ("libamdhip64.so.7", "librccl.so.1")  # as ROCm 7 names them
GCC = ("gcc", "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread")


def found(folder: Path) -> tuple[Path, Path] | None:
    """libamdhip64 and librccl: compiled into that folder, or made before; None without both."""
    if shutil.which("gcc"):
        return build(folder)
    hip, rccl = (MADE / name for name in NAMES)
    return (hip, rccl) if hip.exists() and rccl.exists() else None


def build(folder: Path) -> tuple[Path, Path]:
    """Compile libamdhip64 and librccl into that folder."""
    folder.mkdir(parents=True, exist_ok=True)
    hip, rccl = (folder / name for name in NAMES)
    make = [*GCC, "-Wl,-soname,libamdhip64.so.7", "-o", str(hip), str(HERE / "hip.c")]
    subprocess.run(make, check=True)
    more = ["-Wl,-rpath,$ORIGIN", "-o", str(rccl), str(HERE / "rccl.c"), str(hip)]
    subprocess.run([*GCC, *more], check=True)
    return hip, rccl
