"""Why a check is skipped, as facts that the host can confirm. In: a reason. Out: pytest's skip, typed.

A skip never counts as a pass. The host accepts a skip of a required check only if its own data confirm it:
the row in devices.json, the number of devices, or what the stack declares (stackcheck/suite/skips.py).
"""

from collections.abc import Mapping
from typing import Any, Literal, NoReturn

import pytest

Kind = Literal["not on this device", "not in this stack", "not readable here"]

# What a device model may lack; each row of devices.json lists under "lacks" what its model may not have.
FEATURES = (
    "gpu",  # a device with a driver, matrix units and memory of its own
    "link",  # a fast link between devices of one host
    "pcie",
    "partitions",
    "bf16",
    "fp16",
    "fp8",
    "tf32",
    "grouped product",
    "varlen_attn",
    *(f"attention: {name}" for name in ("math", "flash", "efficient", "cudnn")),
)


# pytest documents this exception as an attribute of a function, which is no class to a type checker.
class Skipped(pytest.skip.Exception):  # type: ignore[name-defined,misc]
    """A skip whose kind and facts go into result.json."""

    __module__ = "builtins"  # as pytest's own, so that reports begin with "Skipped: "

    def __init__(self, reason: str, kind: Kind, **needs: Any) -> None:
        super().__init__(reason)
        self.facts = {"kind": kind, "needs": needs}


def without_feature(feature: str, reason: str) -> NoReturn:
    """Skip: this device model does not have the feature."""
    if feature not in FEATURES:
        raise ValueError(f"{feature!r} is not one of {FEATURES}")
    raise Skipped(reason, "not on this device", feature=feature)


def without_devices(count: int, present: int) -> NoReturn:
    """Skip: the check needs more devices than there are."""
    raise Skipped(f"needs {count} devices, {present} visible", "not on this device", devices=count)


def without_memory(needed_gib: float, present_gib: float) -> NoReturn:
    """Skip: the check needs more memory on each device than the model has."""
    raise Skipped(
        f"needs {needed_gib:.1f} GiB of memory on each device, which has {present_gib:.1f} GiB",
        "not on this device",
        memory_gib=round(needed_gib, 1),
    )


def without_package(package: str, reason: str) -> NoReturn:
    """Skip: the stack does not declare this package, or this part of it."""
    raise Skipped(reason, "not in this stack", package=package)


def without_arch(arch: str, reason: str) -> NoReturn:
    """Skip: the stack does not declare this architecture, or its compiler has no backend for it."""
    raise Skipped(reason, "not in this stack", arch=arch)


def unreadable(reading: str, reason: str) -> NoReturn:
    """Skip: this machine does not give this reading."""
    raise Skipped(reason, "not readable here", reading=reading)


def if_lacking(lack: Mapping[str, Any] | None) -> None:
    """Skip for what a workload found absent: a feature or memory of the device, or a package of the stack."""
    if not lack:
        return
    if "memory_gib" in lack:
        without_memory(lack["memory_gib"], lack["present_gib"])
    if "feature" in lack:
        without_feature(lack["feature"], lack["reason"])
    without_package(lack["package"], lack["reason"])


def facts(raised: BaseException | None) -> dict[str, Any] | None:
    """Kind and facts of a skip; None for anything else, also for a skip without a kind."""
    return raised.facts if isinstance(raised, Skipped) else None
