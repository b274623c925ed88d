"""A stand-in for AMD's HIP runtime and RCCL, for machines without a GPU. In: gcc. Out: two shared libraries.

It proves the side of the caller on AMD's code path: the names, argument orders, widths and handles of the
calls that this project makes through ctypes, and which devices the variables of a child show. It proves
nothing of AMD's own libraries, of torch on ROCm, or of a device.
"""

import subprocess
from pathlib import Path

HERE = Path(__file__).parent
GCC = ("gcc", "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread")


def build(folder: Path) -> tuple[Path, Path]:
    """libamdhip64 and librccl in that folder, named as ROCm 7 names them."""
    hip, rccl = folder / "libamdhip64.so.7", folder / "librccl.so.1"
    make = [*GCC, "-Wl,-soname,libamdhip64.so.7", "-o", str(hip), str(HERE / "hip.c")]
    subprocess.run(make, check=True)
    more = ["-Wl,-rpath,$ORIGIN", "-o", str(rccl), str(HERE / "rccl.c"), str(hip)]
    subprocess.run([*GCC, *more], check=True)
    return hip, rccl
