"""nvidia-ml-py, releases 12 and 13. In: a call. Out: its answer, or an `Absence`.

A call that the installed release or the driver does not have is an `Absence`, and so is an error of one
value, under the error's name. An error that means that the GPU, its driver or the library is gone is raised.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vendors import Absence, Reading, VendorAbsentError

ALL_ONES = (0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)
# The GPU, its driver or the library is gone, and with it every other value.
GONE = (
    "NVML_ERROR_UNINITIALIZED", "NVML_ERROR_DRIVER_NOT_LOADED", "NVML_ERROR_TIMEOUT",
    "NVML_ERROR_LIBRARY_NOT_FOUND", "NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH",
)  # fmt: skip


@functools.cache
def open_library() -> Any:
    """The library, initialised once per child. Raises `VendorAbsentError` if it cannot be opened."""
    try:
        import pynvml
    except ImportError as error:
        raise VendorAbsentError("nvidia-ml-py is not installed (pip install nvidia-ml-py)") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise VendorAbsentError(f"NVML: {error}") from error
    return pynvml


def version(nvml: Any) -> str:
    """The release, by the folder that its installer made beside it.

    Each child reads it, and importlib.metadata would take each 40 ms of a processor to load.
    """
    made = sorted(Path(nvml.__file__).parent.glob("nvidia_ml_py-*.*-info"))
    return made[-1].stem.partition("-")[2] if made else "of unknown version"


def ask(nvml: Any, function: Callable[..., Any] | str, *arguments: object) -> Any:
    """The library's answer to a call, or an `Absence`."""
    call = getattr(nvml, function, None) if isinstance(function, str) else function
    if call is None:
        return Absence.NOT_SUPPORTED
    try:
        answer = call(*arguments)
    except nvml.NVMLError as error:
        return _absence(nvml, error)
    return reading(answer)


def _absence(nvml: Any, error: Any) -> Absence:
    known = {
        nvml.NVML_ERROR_NOT_SUPPORTED: Absence.NOT_SUPPORTED,
        nvml.NVML_ERROR_FUNCTION_NOT_FOUND: Absence.NOT_SUPPORTED,
        nvml.NVML_ERROR_NO_PERMISSION: Absence.NO_PERMISSION,
        nvml.NVML_ERROR_NOT_FOUND: Absence.NOT_AVAILABLE,
        nvml.NVML_ERROR_NO_DATA: Absence.NOT_AVAILABLE,  # seen while processes began and ended
        nvml.NVML_ERROR_INVALID_ARGUMENT: Absence.NOT_AVAILABLE,  # a link number beyond the last
    }
    if error.value in {getattr(nvml, name, None) for name in GONE}:
        raise error
    return known.get(error.value, Absence.failed(_name(nvml, error.value)))


def _name(nvml: Any, code: int) -> str:
    names = (name for name in dir(nvml) if name.startswith("NVML_ERROR_") and getattr(nvml, name) == code)
    return next(names, f"NVML error {code}")


def reading(answer: Any) -> Any:
    """An answer as a value or an `Absence`; structures and lists pass unchanged."""
    if isinstance(answer, bytes):
        answer = answer.decode()
    if answer == "N/A":
        return Absence.NOT_AVAILABLE
    return Absence.ALL_ONES if isinstance(answer, int) and answer in ALL_ONES else answer


def text(nvml: Any, function: Callable[..., Any] | str, *arguments: object) -> Reading:
    """The answer to a call as text."""
    answer = ask(nvml, function, *arguments)
    return answer if isinstance(answer, Absence) else str(answer)
