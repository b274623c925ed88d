"""nvidia-ml-py: opened, asked, its ways of saying nothing told apart. In: a call. Out: its answer.

Names are those of nvidia-ml-py 12 and 13; a call that the installed release or the driver lacks is an
`Absence`, and an error that is no absence (a lost GPU, a broken driver) is raised.
"""

import functools
from collections.abc import Callable
from typing import Any

from vendors import Absence, Reading, VendorAbsentError

ALL_ONES = (0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)


@functools.cache
def open_library() -> Any:
    """The library, initialised once per child; NVML needs no closing before its process ends."""
    try:
        import pynvml
    except ImportError as error:
        raise VendorAbsentError("nvidia-ml-py is not installed (pip install nvidia-ml-py)") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise VendorAbsentError(f"NVML: {error}") from error
    return pynvml


def ask(nvml: Any, function: Callable[..., Any] | str, *arguments: object) -> Any:
    """The answer of one call, or why there is none."""
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
        nvml.NVML_ERROR_NO_DATA: Absence.NOT_AVAILABLE,  # as seen while processes began and ended
        nvml.NVML_ERROR_INVALID_ARGUMENT: Absence.NOT_AVAILABLE,  # as for a link number that the part lacks
    }
    if error.value in known:
        return known[error.value]
    raise error  # the GPU is lost, needs a reset, or the driver is broken: never an ordinary absence


def reading(answer: Any) -> Any:
    if isinstance(answer, bytes):
        answer = answer.decode()
    if answer == "N/A":
        return Absence.NOT_AVAILABLE
    return Absence.ALL_ONES if isinstance(answer, int) and answer in ALL_ONES else answer


def text(nvml: Any, function: Callable[..., Any] | str, *arguments: object) -> Reading:
    answer = ask(nvml, function, *arguments)
    return answer if isinstance(answer, Absence) else str(answer)
