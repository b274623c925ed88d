"""What an image holds, seen from a process that has loaded it. In: paths. Out: versions, files and loader
errors.
"""

import ctypes
import importlib
import importlib.util
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

SHARED_ONCE = (
    "libnccl.so",
    "librccl.so",
    "libtriton.so",
    "libcudart.so",
    "libamdhip64.so",
    "libtorch_cpu.so",
)


def loaded() -> dict[str, Any]:
    """Versions as the loaded libraries tell them, not as package metadata does."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "archs": (torch._C._cuda_getArchFlags() or "").split() if torch.cuda._is_compiled() else [],
        "collective": _collective(),
        "dnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
        "triton": _version_of("triton"),
        "flash_attn": _version_of("flash_attn"),
    }


def mapped() -> dict[str, list[str]]:
    """Files of libraries that must be there once, among those this process has mapped."""
    importlib.import_module("torch.distributed")
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = {line.split(maxsplit=5)[5] for line in lines if "/" in line}
    return {name: sorted(file for file in files if Path(file).name.startswith(name)) for name in SHARED_ONCE}


def load_errors(paths: list[str]) -> list[str]:
    """The loader's complaint for each file that cannot be loaded with every symbol resolved, after torch."""
    errors = []
    for path in paths:
        print(
            "loading", path, file=sys.stderr, flush=True
        )  # the last line names the file that ends the process
        try:
            ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as error:
            errors.append(f"{path}: {error}")
    return errors


def _collective() -> list[int] | None:
    if not torch.cuda._is_compiled() or not torch.distributed.is_nccl_available():
        return None
    return list(torch.cuda.nccl.version())


def _version_of(module: str) -> str | None:
    if importlib.util.find_spec(module) is None:
        return None
    return str(importlib.import_module(module).__version__)
