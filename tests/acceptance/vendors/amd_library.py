"""AMD's `amdsmi` module, any release from 6.1 on. In: the name of a call, its arguments.
Out: its answer, or an `Absence`.

Calls and enumerations are found by name in the installed module. No literal value is compared, because ROCm
7.0 renumbered the link types.
"""

import functools
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vendors import Absence, Reading, VendorAbsentError, is_known

# Where packages put the module if it is not on Python's path: ROCm's, then ROCm's as Python packages (from
# 7.14 on), then Debian 13's.
MODULE_FOLDERS = (
    "/opt/rocm/share/amd_smi",
    f"{sysconfig.get_path('platlib')}/_rocm_sdk_core/share/amd_smi",
    "/usr/share/amd_smi",
)
COUNTER_ONES = (0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)  # newer drivers count in 64 bits what older ones count in 32
ALL_ONES = (0xFFFF, *COUNTER_ONES)
# A status of the library -> what it means for one value. Any other status is an absence under its own name,
# because real devices refuse single values with many statuses (ROCm/rocm-systems#11468).
ABSENCES = {
    "AMDSMI_STATUS_NOT_SUPPORTED": Absence.NOT_SUPPORTED,
    "AMDSMI_STATUS_NOT_YET_IMPLEMENTED": Absence.NOT_SUPPORTED,
    "AMDSMI_STATUS_NO_PERM": Absence.NO_PERMISSION,
    "AMDSMI_STATUS_NO_DATA": Absence.NOT_AVAILABLE,
    "AMDSMI_STATUS_NOT_FOUND": Absence.NOT_AVAILABLE,
}
# The device, its driver or the library is gone, and with it every other value: these are raised.
GONE = (
    "AMDSMI_STATUS_INIT_ERROR", "AMDSMI_STATUS_NOT_INIT", "AMDSMI_STATUS_FAIL_LOAD_MODULE",
    "AMDSMI_STATUS_FAIL_LOAD_SYMBOL", "AMDSMI_STATUS_DRIVER_NOT_LOADED", "AMDSMI_STATUS_AMDGPU_RESTART_ERR",
    "AMDSMI_STATUS_TIMEOUT",
)  # fmt: skip


@functools.cache
def open_library() -> Any:
    """The module, initialised once per child. Raises `VendorAbsentError` if it cannot be opened."""
    smi = _import()
    try:
        smi.amdsmi_init()
    except smi.AmdSmiException as error:
        raise VendorAbsentError(f"amdsmi_init: {words(error)}") from error
    return smi


def ask(smi: Any, call: str, *arguments: object) -> Any:
    """The library's answer to a call, or an `Absence`."""
    function = getattr(smi, call, None)
    if function is None:
        return Absence.NOT_SUPPORTED  # this release does not have it
    return answer(smi, function, *arguments)


def demand(smi: Any, call: str, *arguments: object) -> Any:
    """The answer to a call that every device must answer. Raises `LookupError` if it does not."""
    found = ask(smi, call, *arguments)
    if is_known(found):
        return found
    raise LookupError(f"{call}: {found}")


def answer(smi: Any, function: Callable[..., Any], *arguments: object) -> Any:
    """As `ask`, for a function that was already found."""
    try:
        with warnings.catch_warnings():
            # Deprecated calls are made only where the newer call does not exist.
            warnings.simplefilter("ignore", DeprecationWarning)
            return function(*arguments)
    except smi.AmdSmiLibraryException as error:
        status = _status(smi, error.get_error_code())
        if status in GONE:
            raise
        return ABSENCES.get(status, Absence.failed(status))


def _status(smi: Any, code: int) -> str:
    """The name of an error code."""
    names = (name for name in vars(smi.amdsmi_wrapper) if name.startswith("AMDSMI_STATUS_"))
    found = (name for name in names if getattr(smi.amdsmi_wrapper, name) == code)
    return next(found, f"status {code}")


def reading(value: object, ones: tuple[int, ...] = ALL_ONES) -> Reading:
    """One value, or the `Absence` that the library's answer means; `ones` are its type's largest values."""
    if isinstance(value, Absence):
        return value
    if value is None or value in ("", "N/A"):
        return Absence.NOT_AVAILABLE
    if isinstance(value, int) and not isinstance(value, bool) and value in ones:
        return Absence.ALL_ONES
    return value if isinstance(value, int | float | str | bool) else str(value)


def field(answer: Any, *names: str, ones: tuple[int, ...] = ALL_ONES) -> Reading:
    """The first of these keys that the answer has; releases rename their keys."""
    if isinstance(answer, Absence):
        return answer
    for name in names:
        if name in answer:
            return reading(answer[name], ones)
    return Absence.NOT_SUPPORTED


def counter(answer: Any, name: str) -> Reading:
    """As `field`, for a count of 32 bits or more: 65,535 is one like any other."""
    return field(answer, name, ones=COUNTER_ONES)


def member(smi: Any, *names: str) -> Any:
    """An enumeration's value by the names that releases gave it ("Class.MEMBER"); None if no name exists."""
    for name in names:
        family, _, one = name.partition(".")
        value = getattr(getattr(smi, family, None), one, None)
        if value is not None:
            return value
    return None


def version(smi: Any) -> str:
    """The library's version. Until ROCm 6.4 it begins with a year ("24.5.2"), later not ("27.1.0")."""
    answer = ask(smi, "amdsmi_get_lib_version")
    if isinstance(answer, Absence):
        return "of unknown version"
    parts = [answer[name] for name in ("year", "major", "minor", "release") if name in answer]
    return ".".join(map(str, parts[:3]))


def words(error: Exception) -> str:
    """The library's error text on one line."""
    return " ".join(str(error).split())


def rows(answer: Any) -> Iterator[Mapping[str, Any]]:
    """The rows of a list; none if the answer is an absence or a sentence (6.1.1: "No bad pages found.")."""
    return iter(()) if isinstance(answer, Absence | str) else iter(answer)


def _import() -> Any:
    sys.path += [folder for folder in MODULE_FOLDERS if Path(folder).is_dir() and folder not in sys.path]
    try:
        import amdsmi
    except ImportError as error:
        raise VendorAbsentError(
            "the amdsmi module is not installed: use the one that comes with libamd_smi"
            f" ({' or '.join(MODULE_FOLDERS)}); the package index has the module alone"
        ) from error
    # The module loads libamd_smi.so and looks up its functions while it is imported.
    except AttributeError as error:  # such as PyPI's module 7.0.2 with the libraries 6.1.2 and 10.1
        raise VendorAbsentError(
            f"the amdsmi module and libamd_smi.so have different releases: {words(error)}"
        ) from error
    except (OSError, KeyError) as error:
        raise VendorAbsentError(f"libamd_smi.so cannot be loaded: {words(error)}") from error
    return amdsmi
