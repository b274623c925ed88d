"""Why a machine is unfit. In: a kind and words. Out: the outcome `invalid`, with facts for the host.

`invalid` says: this run tells nothing about the image. So each of its findings names a state of the machine
that the check's evidence shows. What comes from the image (a file, a variable, a library that is slow or does
not answer) is a failure. The host reads the same evidence and turns `invalid` without it into FAILED
(stackcheck/suite/machine.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

import pytest

Kind = Literal[
    "throttled",
    "shared",  # a process that is not ours holds memory of the device
    "memory errors",
    "power cap",  # below the default
    "clocks",  # held down by a setting
    "partition",
    "firmware",  # not the same on every device
    "link",  # down, or with errors
    "fabric",  # of the switches
    "recovery",  # the driver asks for a reset or reboot
    "pcie",  # the link to the host is narrower or slower than device and slot can
    "driver fault",  # reported by the driver, of the hardware: an Xid, a reset
    "short memory",
    "missing device",  # on the bus, and in no list
    "nic",  # a port for RDMA is down, slower than its mates, or counts errors
    "gpudirect",  # network cards cannot reach the memory of GPUs
    "no answer",  # the device did not answer its driver
]


@dataclass(frozen=True)
class Unfit:
    """One state of the machine that makes a check say nothing about the image.

    Attributes:
        kind: What is wrong.
        words: The same in a sentence, for the reader.
        device: The device's index; None for a link, or for the whole machine.
    """

    kind: Kind
    words: str
    device: int | None = None


# pytest documents this exception as an attribute of a function, which is no class to a type checker.
class InvalidRun(pytest.fail.Exception):  # type: ignore[name-defined,misc]
    """The machine was unfit, so the check says nothing about the image."""

    def __init__(self, found: Sequence[Unfit], about: str = "") -> None:
        words = "; ".join(dict.fromkeys(one.words for one in found))
        super().__init__("\n".join(filter(None, (words, about))), pytrace=False)
        self.found = tuple(dict.fromkeys(found))


def invalid(found: Sequence[Unfit], about: str = "") -> NoReturn:
    """End the check as `invalid`: neither passed nor failed.

    Args:
        found: The states of the machine.
        about: What the check saw on this machine: a figure below its bound.
    """
    raise InvalidRun(found, about)
