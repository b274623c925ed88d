"""The trainers' own modules, which lie beside tests/. In: a module's name. Out: the module."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parents[3] / "trainers"


def module(name: str) -> ModuleType:
    """Imported as a trainer imports it: beside the modules that it is made of."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))  # its other modules have names that the suites have too
