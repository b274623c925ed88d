"""On Python's path of a fabricated host: what AMD's module of an older release does not tell.

In: $FAKEAMD_WITHOUT, names of functions, and $FAKEAMD_WITHOUT_KEYS, "call:key" of an answer at any depth.
Out: a module `amdsmi` without them, in every process.
"""

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

LACKING, KEYS = (
    [name for name in os.environ.get(variable, "").split(",") if name]
    for variable in ("FAKEAMD_WITHOUT", "FAKEAMD_WITHOUT_KEYS")
)


class Finder:
    """Finds the real module, and takes functions and keys away once it is loaded."""

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
            for call, keys in _keys().items():
                setattr(module, call, _silent(getattr(module, call), keys))

        spec.loader.exec_module = shortened
        return spec


def _keys() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for entry in KEYS:
        call, _, key = entry.partition(":")
        found.setdefault(call, set()).add(key)
    return found


def _silent(function: Callable[..., Any], keys: set[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        return _without(function(*arguments), keys)

    return call


def _without(answer: Any, keys: set[str]) -> Any:
    if isinstance(answer, list):
        return [_without(one, keys) for one in answer]
    if isinstance(answer, dict):
        return {name: _without(value, keys) for name, value in answer.items() if name not in keys}
    return answer


if LACKING or KEYS:
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
