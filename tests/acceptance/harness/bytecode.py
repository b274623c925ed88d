"""Byte code of an environment that has none: a run keeps its own. In: nothing. Out: a folder for a run.

Many images are built with PYTHONDONTWRITEBYTECODE. There each of a run's many processes would compile torch's
modules anew: 2 s at every start, 8 s where torch.compile is loaded. The folder is of this run alone, so that
nothing in it is older than a source, and it goes with the run.
"""

import atexit
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

NAME = "stackcheck-bytecode-"
VARIABLE = "PYTHONPYCACHEPREFIX"


def is_kept() -> bool:
    """Whether this run keeps byte code of its own; its children know it by their environment."""
    return Path(sys.pycache_prefix or "").name.startswith(NAME)


def keep() -> None:
    """Keep byte code from now on, where torch was installed without any."""
    if not (is_kept() or sys.pycache_prefix or _has_byte_code("torch")):
        folder = tempfile.mkdtemp(prefix=NAME)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ[VARIABLE] = sys.pycache_prefix = folder
    if is_kept():
        sys.dont_write_bytecode = False


def _has_byte_code(name: str) -> bool:
    found = importlib.util.find_spec(name)
    return not (found and found.origin) or Path(importlib.util.cache_from_source(found.origin)).exists()
