"""A figure, or why it is not there.

"N/A", not supported, no permission, all-ones and an error of the library's are different facts, and a check
decides what each of them means for it.
"""

from typing import ClassVar, TypeGuard, Union


class Absence(str):
    """Why a figure is not there: one of four ways of saying nothing, or an error under the library's name."""

    __slots__ = ()

    NOT_AVAILABLE: ClassVar["Absence"]  # the library answered N/A: this part has nothing of the kind
    NOT_SUPPORTED: ClassVar["Absence"]  # the call itself is refused, or the library's release lacks it
    NO_PERMISSION: ClassVar["Absence"]  # a privileged reader would see it
    ALL_ONES: ClassVar["Absence"]  # 0xFF..: the device did not answer, or the field was never filled

    @classmethod
    def failed(cls, status: str) -> "Absence":
        """The library answered an error that is none of the four."""
        return cls(f"{FAILED}{status}")

    @property
    def is_failure(self) -> bool:
        """Whether the device or the library should have answered and did not."""
        return self == Absence.ALL_ONES or self.startswith(FAILED)


FAILED = "the library answered "
Absence.NOT_AVAILABLE = Absence("N/A")
Absence.NOT_SUPPORTED = Absence("not supported")
Absence.NO_PERMISSION = Absence("no permission")
Absence.ALL_ONES = Absence("all ones")


# Python 3.10 evaluates this alias at import time, where `Absence` and the built-ins join through Union alone.
Reading = Union[int, float, str, bool, Absence]  # noqa: UP007


def is_known(reading: Reading) -> TypeGuard[int | float | str | bool]:
    """Whether the reading is a value and not an absence."""
    return not isinstance(reading, Absence)


def added(*readings: Reading) -> Reading:
    """The sum of counts, or why there is none: an error before what is merely not there."""
    absent = [reading for reading in readings if isinstance(reading, Absence)]
    if absent:
        return max(absent, key=lambda absence: absence.is_failure)
    return sum(int(reading) for reading in readings)
