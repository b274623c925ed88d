"""A bytecode cache for images that were built without one. In: nothing. Out: a cache folder for this run.

Many images are built with PYTHONDONTWRITEBYTECODE. In them each of a run's many processes would compile
torch's modules again: 2 s at every start, 8 s where torch.compile is loaded. The folder belongs to this run
only, so nothing in it can be older than its source, and it is deleted when the run ends.
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
    """Whether this run has its own cache; its children see that in their environment."""
    return Path(sys.pycache_prefix or "").name.startswith(NAME)


def keep() -> None:
    """Cache bytecode from now on, if torch was installed without any."""
    found = importlib.util.find_spec("torch")
    cached = Path(importlib.util.cache_from_source(found.origin)) if found and found.origin else None
    if cached and not (is_kept() or sys.pycache_prefix or cached.exists()):
        folder = tempfile.mkdtemp(prefix=NAME)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ[VARIABLE] = sys.pycache_prefix = folder
    if is_kept():
        sys.dont_write_bytecode = False
