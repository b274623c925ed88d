"""The libraries of an image, from a process that loads them. In: names, paths.
Out: versions, files, loader errors.

Nothing here needs a device, and `libraries` needs no torch.
"""

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import site
import sys
from pathlib import Path
from typing import Any

from vendors import software

# What a training job imports, in its order; each module may load libraries of its own.
MODULES = (
    "numpy", "torch", "torch.distributed", "triton", "flash_attn", "flash_attn.cute", "torchao",
    "transformers", "amdsmi", "pynvml", "psutil",
)  # fmt: skip


def import_path() -> list[str]:
    """The folders that this process imports from or takes .pth files from, as a user's Python has them."""
    own = {str(Path.cwd()), str(Path(__file__).resolve().parents[1])}
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [
        path
        for path in dict.fromkeys((*sys.path, *site.getsitepackages(), *user))
        if path and path not in own
    ]


def loaded() -> dict[str, Any]:
    """Versions as the loaded libraries report them, not by package metadata."""
    import torch

    has_nccl = torch.cuda._is_compiled() and torch.distributed.is_nccl_available()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "archs": (torch._C._cuda_getArchFlags() or "").split() if torch.cuda._is_compiled() else [],
        "collective": list(torch.cuda.nccl.version()) if has_nccl else None,
        "triton": _version_of("triton"),
        "flash_attn": _version_of("flash_attn"),
    }


def libraries(vendor: str) -> dict[str, Any]:
    """The files that a process has mapped after importing all modules, and the versions that they report.

    Without torch, which would load them, the vendor's libraries are loaded from the system's folders.
    """
    modules = [name for name in MODULES if _is_installed(name)]
    for name in modules:
        importlib.import_module(name)
    table = software.of(vendor).LIBRARIES
    if "torch" not in modules:
        for library in table:
            places = (sorted(Path(one).glob(f"{library.stem}.so*")) for one in software.of(vendor).FOLDERS)
            if there := [path for place in places for path in place]:
                ctypes.CDLL(str(there[0]), mode=os.RTLD_GLOBAL)
    files = _mapped()
    found = {
        library.name: [file for file in files if software.stem(file) == library.stem] for library in table
    }
    return {
        "modules": modules,
        "files": files,
        "libraries": {
            library.name: {"file": found[library.name][0], "version": _ask(library, found[library.name][0])}
            for library in table
            if found[library.name]
        },
    }


def import_error(module: str) -> str | None:
    """How a module that is on the path fails to import; None if it imports or is not there."""
    if not _is_installed(module):
        return None
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - whatever it raises ends whoever imports it
        return f"{type(error).__name__}: {error}"
    return None


def load_errors(paths: list[str], *, after_torch: bool = True) -> list[str]:
    """The loader's error for each file that cannot be loaded with every symbol resolved."""
    if after_torch:
        importlib.import_module("torch")
    errors = []
    for path in paths:
        # If loading a file ends the process, the last line of its output names the file.
        print("loading", path, file=sys.stderr, flush=True)
        try:
            ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as error:
            errors.append(f"{path}: {error}")
    return errors


def _mapped() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split(maxsplit=5)[5] for line in lines if "/" in line and ".so" in line})


def _ask(library: software.Library, file: str) -> list[int] | str | None:
    """The version; None if the library cannot report it; a text if it refused."""
    if library.version is None:
        return None
    try:
        return list(library.version(ctypes.CDLL(file)))
    except (OSError, AttributeError) as error:  # the call failed, or the function does not exist
        return f"{library.name} does not report its version: {error}"


def _is_installed(module: str) -> bool:
    if module == "flash_attn.cute":  # FlashAttention 2 has a folder of this name, without what it imports
        return bool([*importlib.metadata.distributions(name="flash-attn-4")])
    return importlib.util.find_spec(module.partition(".")[0]) is not None


def _version_of(module: str) -> str | None:
    if not _is_installed(module):
        return None
    loaded = importlib.import_module(module)
    # FlashAttention 4 is `flash_attn.cute` in a namespace without a version; its own `__version__` is 0.0.0.
    if module == "flash_attn" and not hasattr(loaded, "__version__"):
        importlib.import_module("flash_attn.cute")
        return importlib.metadata.version("flash-attn-4")
    return str(loaded.__version__)
