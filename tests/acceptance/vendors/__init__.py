"""What checks may ask of a vendor's management library. In: a vendor's name. Out: a `Host`.

One module per vendor satisfies `Vendor`. Its `read` and `sample` run only in a child process with a timeout
(`vendors.child`), because a wedged driver hangs inside the library, where no Python timeout reaches.
A value that cannot be read is an `Absence`, never a zero.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeGuard, Union, cast, runtime_checkable

from vendors.drivers import Support

VendorName = Literal["amd", "nvidia", "cpu"]
VENDORS: tuple[VendorName, ...] = ("amd", "nvidia", "cpu")
FAILED = "the library answered "


class Absence(str):
    """Why a value could not be read: one of four reasons, or an error by the library's name for it.

    They are different facts, and each check decides what each of them means for it.
    """

    __slots__ = ()

    NOT_AVAILABLE: ClassVar["Absence"]  # the library answered N/A: this device has no such value
    NOT_SUPPORTED: ClassVar["Absence"]  # the library refuses the call, or its release lacks it
    NO_PERMISSION: ClassVar["Absence"]  # only a privileged process may read it
    ALL_ONES: ClassVar["Absence"]  # 0xFF..: the device did not answer, or nothing filled the field

    @classmethod
    def failed(cls, status: str) -> "Absence":
        """The library answered any other error."""
        return cls(f"{FAILED}{status}")

    @property
    def is_failure(self) -> bool:
        """Whether the device or the library should have answered and did not."""
        return self == Absence.ALL_ONES or self.startswith(FAILED)


Absence.NOT_AVAILABLE = Absence("N/A")
Absence.NOT_SUPPORTED = Absence("not supported")
Absence.NO_PERMISSION = Absence("no permission")
Absence.ALL_ONES = Absence("all ones")

# Python 3.10 evaluates this alias at import time, where only Union can join `Absence` and the built-ins.
Reading = Union[int, float, str, bool, Absence]  # noqa: UP007


def is_known(reading: Reading) -> TypeGuard[int | float | str | bool]:
    """Whether the reading is a value and not an absence."""
    return not isinstance(reading, Absence)


def added(*readings: Reading) -> Reading:
    """The sum of counts. Where one is absent the absence, and of several absences an error first."""
    absent = [reading for reading in readings if isinstance(reading, Absence)]
    if absent:
        return max(absent, key=lambda absence: absence.is_failure)
    return sum(int(reading) for reading in readings)


class VendorAbsentError(Exception):
    """The library, its driver or every device is missing; the message says which, and what to look at."""


@dataclass(frozen=True, kw_only=True)
class PcieLink:
    """The PCI Express link now, and the device's best. Idle links step down: judge them under load."""

    generation: Reading = Absence.NOT_SUPPORTED
    width: Reading = Absence.NOT_SUPPORTED
    max_generation: Reading = Absence.NOT_SUPPORTED
    max_width: Reading = Absence.NOT_SUPPORTED
    replays: Reading = Absence.NOT_SUPPORTED


@dataclass(frozen=True, kw_only=True)
class Ecc:
    """Counts of memory errors since the driver was loaded, and of repairs."""

    enabled: Reading = Absence.NOT_SUPPORTED
    correctable: Reading = Absence.NOT_SUPPORTED
    uncorrectable: Reading = Absence.NOT_SUPPORTED
    pending: Reading = Absence.NOT_SUPPORTED  # rows or pages that the next reset will retire
    failed: Reading = Absence.NOT_SUPPORTED  # repairs that failed
    retired: Reading = Absence.NOT_SUPPORTED  # pages or rows out of service


UNFIT_SHARE = 0.01  # of the time; less moves no figure by as much as its repeats differ


def is_unfit_share(grown: float, ticks: float) -> bool:
    """Return True if a reason to throttle held for too much of the time.

    Args:
        grown: By how much the reason's counter grew, in ticks.
        ticks: How many ticks passed. Where none did, or the clock ran backwards, any growth is too much.
    """
    return grown > 0 and grown >= UNFIT_SHARE * ticks


@dataclass(frozen=True, kw_only=True)
class Throttle:
    """Why the clocks are low. `unfit` reasons invalidate a measurement; `normal` ones (power cap) do not."""

    unfit: tuple[str, ...] = ()
    normal: tuple[str, ...] = ()
    # name -> counter of an unfit reason, in the unit of `ticks`: how long the reason held
    accumulators: Mapping[str, Reading] = field(default_factory=dict)
    ticks: Reading = Absence.NOT_SUPPORTED  # the firmware's own count of all time
    # where the reasons come from: the raw bits or "accumulators"; an Absence if nothing could be read
    reading: Reading = Absence.NOT_SUPPORTED


@dataclass(frozen=True, kw_only=True)
class Power:
    """Watts."""

    cap_w: Reading = Absence.NOT_SUPPORTED
    default_cap_w: Reading = Absence.NOT_SUPPORTED
    draw_w: Reading = Absence.NOT_SUPPORTED


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process that holds memory on a device. In a container its pid may be 0 or of another namespace."""

    pid: int
    name: Reading = Absence.NO_PERMISSION
    memory_bytes: Reading = Absence.NOT_SUPPORTED


@dataclass(frozen=True, kw_only=True)
class Device:
    """One physical device (a GCD on MI250, a GPU elsewhere) as the management library sees it."""

    index: int  # in the library's order, which is PCI bus order
    uuid: str  # stable over reboots; leases are keyed by it and `bdf`
    bdf: str  # PCI address, "0000:1b:00.0", lower case: the key between torch and the library
    name: str  # the marketing name: for display, never for identification
    arch: str  # "gfx942", "sm_90"; "" on cpu
    compute_units: Reading  # CUs or SMs
    memory_bytes: int
    memory_used_bytes: Reading = Absence.NOT_SUPPORTED
    part: int = 0  # the number of this partition of its GPU; 0 of a whole GPU
    pci_id: Reading = Absence.NOT_SUPPORTED  # "1002:74a1", "10de:2335", lower case
    firmware: Mapping[str, Reading] = field(default_factory=dict)  # name -> version
    # such as {"compute": "SPX", "memory": "NPS1"} or {"mig": "disabled"}
    partition: Mapping[str, Reading] = field(default_factory=dict)
    pcie: PcieLink = PcieLink()
    ecc: Ecc = Ecc()
    throttle: Throttle = Throttle()
    power: Power = Power()
    clock_mhz: Reading = Absence.NOT_SUPPORTED  # compute clock; of several the slowest
    temperature_c: Reading = Absence.NOT_SUPPORTED
    processes: tuple[Process, ...] | Absence = ()
    numa_node: Reading = Absence.NOT_SUPPORTED
    # "none", or the action that the driver asks for
    recovery_action: Reading = Absence.NOT_SUPPORTED
    # "completed" if the switch fabric is up and healthy, else its state in words
    fabric: Reading = Absence.NOT_SUPPORTED


@dataclass(frozen=True, kw_only=True)
class Link:
    """The best path between two devices, `a` < `b` by index."""

    a: int
    b: int
    kind: Reading  # "xgmi", "nvlink", "pcie", or an Absence
    # how many links of that kind are up; "up" or "down" where the library does not count them
    active: Reading = Absence.NOT_SUPPORTED
    # how many links join the two: 1, 2 or 4 between the dies of an MI250 node
    links: Reading = Absence.NOT_SUPPORTED
    # errors of both ends since the driver started; where reading resets them, since the last reading
    errors: Reading = Absence.NOT_SUPPORTED
    errors_cleared: bool = False
    replays: Reading = Absence.NOT_SUPPORTED  # packets that were sent again: that costs time, no data is lost
    # True if the library says that each device may read the other's memory
    p2p: Reading = Absence.NOT_SUPPORTED


@dataclass(frozen=True, kw_only=True)
class Host:
    """The whole machine at one moment."""

    vendor: VendorName
    library: str  # "nvidia-ml-py 13.580", "amdsmi 26.2"
    driver: Reading  # "580.159.04", "6.12.12"
    # the newest CUDA release that the driver supports, or the host's ROCm release
    driver_runtime: Reading = Absence.NOT_SUPPORTED
    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    # PCI addresses of devices that we were given and the library does not list: lost, or without a driver
    unlisted: tuple[str, ...] = ()
    nics: Mapping[str, Any] = field(default_factory=dict)  # ports for RDMA, as harness.nics reads them


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One device at one moment, read ten times a second while a performance check runs."""

    index: int
    clock_mhz: Reading
    power_w: Reading
    temperature_c: Reading
    throttle: Throttle


@dataclass(frozen=True, kw_only=True)
class Event:
    """A fault that the driver reported while we listened."""

    index: int  # of the device, in the library's order; -1 if the report names no device
    what: str  # "Xid 79: the GPU has fallen off the bus"
    machine: bool = False  # whether only hardware or driver cause it, and no program


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """What a container or machine must provide before any device can work."""

    name: str
    ok: bool
    got: str
    expected: str
    next_step: str


@runtime_checkable
class Vendor(Protocol):
    """What every vendor module defines."""

    NAME: VendorName
    VISIBILITY: str  # the environment variable that shows a child only some devices; "" on cpu
    # the kind of link between every pair of devices of a healthy machine: "xgmi", "nvlink", ""
    PEER_LINK: str
    # libraries of other vendors: a file that links one of them is not meant for this vendor
    FOREIGN_RUNTIMES: tuple[str, ...]
    # The factor on time limits, which were set on H200. A limit only has to tell a hang from slow work.
    TIME_LIMIT_FACTOR: float
    # the partitioning that the thresholds assume: {"compute": "SPX", "memory": "NPS1"}
    REFERENCE_PARTITION: Mapping[str, str]

    @staticmethod
    def read() -> Host:
        """Open the library and read everything. Only in a child process. Raises `VendorAbsentError`."""

    @staticmethod
    def read_devices() -> Host:
        """The same without links, where the vendor can leave them out. Read before and after every check."""

    @staticmethod
    def sample(indices: Sequence[int]) -> tuple[Sample, ...]:
        """Read what changes under load. Only in a child process; it keeps the library open between calls."""

    @staticmethod
    def listen() -> Iterator[Event | None] | Absence:
        """Faults that the driver reports from now on, and None about once a second. Only in a child process.

        Returns an Absence if the device or the library release cannot report faults.
        """

    @staticmethod
    def child_environment(devices: Sequence[Device]) -> dict[str, str]:
        """Variables that show a child exactly these devices, in this order."""

    @staticmethod
    def requirements() -> tuple[Requirement, ...]:
        """Device nodes and their permissions, /dev/shm, locked memory. Reads files only, no library."""

    @staticmethod
    def torch_runtime() -> str | None:
        """The ROCm, HIP or CUDA release that torch was built with; None if for another vendor."""

    @staticmethod
    def is_release(found: str, declared: str) -> bool:
        """Whether what `torch_runtime` answers is the declared release, to its last number."""

    @staticmethod
    def torch_uuid(printed: str) -> str:
        """The library's id of a device, from the UUID that torch prints for it."""

    @staticmethod
    def gpudirect(root: Path) -> Mapping[str, bool | None]:
        """Each way in which a network card can reach the memory of GPUs, and whether the host has it.

        None: the files below `root` do not say it, as in a container.
        """

    @staticmethod
    def driver_support(host: Host, runtime_version: str) -> Support:
        """What the documents say about the driver and the runtime that torch was built with."""


def module(name: str) -> Vendor:
    """The vendor module of that name."""
    if name not in VENDORS:
        raise ValueError(f"unknown vendor {name!r}: expected one of {', '.join(VENDORS)}")
    return cast("Vendor", importlib.import_module(f"vendors.{name}"))
