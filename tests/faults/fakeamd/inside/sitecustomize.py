"""On Python's path of a fabricated host: calls that AMD's module of this host does not have.

In: $FAKEAMD_WITHOUT, names of functions. Out: a module `amdsmi` without them, in every process.
"""

import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

LACKING = [name for name in os.environ.get("FAKEAMD_WITHOUT", "").split(",") if name]


class Finder:
    """Finds the real module, and takes the functions away once it is loaded."""

    def find_spec(self, name: str, *_: object) -> Any:
        if name != "amdsmi":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def shortened(module: ModuleType) -> None:
            execute(module)
            for lacking in LACKING:
                delattr(module, lacking)

        spec.loader.exec_module = shortened
        return spec


if LACKING:
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
