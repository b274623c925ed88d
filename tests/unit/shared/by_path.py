"""A program of this repository as a module. In: its file, and a name of its own for it. Out: the module."""

import importlib.util
import sys
from pathlib import Path
from typing import Any


def module_at(path: Path, name: str) -> Any:
    """Run the file under that name, anew each time."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
