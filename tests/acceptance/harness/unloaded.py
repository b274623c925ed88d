"""Names of packages that the controller does not load. In: an import of torch. Out: names that stand for it.

The controller of a run collects the checks, names functions of `workloads`, and judges what children answer.
A name that it only passes on or builds a class on is enough for that. A name that it would compute with,
compare or branch on is an error. In an image it has no torch. On a bare machine each worker of pytest-xdist
would load it, for 10 s beside the process that loads it for the children (H100, 16 cores).
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any, NoReturn

PACKAGES = ("torch", "triton", "numpy")


class _Kind(type):
    """The class of names. A class of a workload may be built on one."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _name(f"{cls.__name__}.{name}")

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        # A decorator leaves the function that it decorates.
        if len(arguments) == 1 and not options and isinstance(arguments[0], types.FunctionType):
            return arguments[0]
        return _name(f"{cls.__name__}()")

    def __or__(cls, other: object) -> Any:
        return cls

    def __ror__(cls, other: object) -> Any:
        return cls

    def __getitem__(cls, key: object) -> Any:
        return cls

    def _refuse(cls, *_: object) -> NoReturn:
        raise TypeError(f"{cls.__name__} is not loaded in the controller of a run, so it has no value there")

    __bool__ = __lt__ = __gt__ = __le__ = __ge__ = __float__ = __int__ = __iter__ = __len__ = _refuse


def _name(words: str) -> Any:
    return _Kind(words, (), {})


class _Module(types.ModuleType):
    __path__ = []  # noqa: RUF012  # as import wants it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _name(f"{self.__name__}.{name}")


_NONE = _Module("none")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        del path, target
        top = fullname.partition(".")[0]
        if top not in PACKAGES or not isinstance(sys.modules.get(top, _NONE), _Module):
            return None  # not ours, or loaded in truth, as in a fork of a process that has torch
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def install() -> None:
    """Let imports of these packages give names."""
    sys.meta_path.insert(0, _Finder())


def remove() -> None:
    """Let imports find packages or fail again, in a fork that has torch and lacks another one."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for name in [name for name, module in sys.modules.items() if isinstance(module, _Module)]:
        del sys.modules[name]


def is_installed(module: str) -> bool:
    """Whether Python finds a top-level module, also one that is not loaded here."""
    return any(finder.find_spec(module, None) for finder in sys.meta_path if not isinstance(finder, _Finder))
