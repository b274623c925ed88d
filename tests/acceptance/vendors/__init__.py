"""What the checks may ask of a vendor's management library. In: a vendor's name. Out: a `Host`.

One module per vendor satisfies `Vendor`. Its `read` and `sample` run in a child process with a timeout only
(`vendors.child`), because a wedged driver hangs inside the library, where no Python timeout reaches.
A figure that cannot be read is an `Absence`, never a zero.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from vendors.absence import Absence, Reading, added, is_known

VendorName = Literal["amd", "nvidia", "cpu"]
__all__ = ["Absence", "Reading", "added", "is_known"]  # of vendors.absence, beside what is defined here
VENDORS: tuple[VendorName, ...] = ("amd", "nvidia", "cpu")


class VendorAbsentError(Exception):
    """The library, its driver or every device is missing; the message says which and what to look at."""


@dataclass(frozen=True, kw_only=True)
class PcieLink:
    """PCI Express as it is now and as the part can be. Links step down when idle: judge it under load."""

    generation: Reading = Absence.NOT_SUPPORTED
    width: Reading = Absence.NOT_SUPPORTED
    max_generation: Reading = Absence.NOT_SUPPORTED
    max_width: Reading = Absence.NOT_SUPPORTED
    replays: Reading = Absence.NOT_SUPPORTED


@dataclass(frozen=True, kw_only=True)
class Ecc:
    """Memory errors since the driver was loaded, and repairs that wait or failed (counts)."""

    enabled: Reading = Absence.NOT_SUPPORTED
    correctable: Reading = Absence.NOT_SUPPORTED
    uncorrectable: Reading = Absence.NOT_SUPPORTED
    pending: Reading = Absence.NOT_SUPPORTED  # rows or pages to be retired at the next reset
    failed: Reading = Absence.NOT_SUPPORTED  # repairs that could not be made
    retired: Reading = Absence.NOT_SUPPORTED  # pages or rows out of service


@dataclass(frozen=True, kw_only=True)
class Throttle:
    """Why the clocks are lower: `unfit` reasons void a figure, `normal` ones (a power cap) do not."""

    unfit: tuple[str, ...] = ()
    normal: tuple[str, ...] = ()
    # name to counter; any growth of an unfit one voids
    accumulators: Mapping[str, Reading] = field(default_factory=dict)
    # the raw word or "accumulators"; an Absence when nothing could be read
    reading: Reading = Absence.NOT_SUPPORTED


@dataclass(frozen=True, kw_only=True)
class Power:
    """Watts."""

    cap_w: Reading = Absence.NOT_SUPPORTED
    default_cap_w: Reading = Absence.NOT_SUPPORTED
    draw_w: Reading = Absence.NOT_SUPPORTED


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process that holds memory on a device; in a container its pid may be 0 or of another namespace."""

    pid: int
    name: Reading = Absence.NO_PERMISSION
    memory_bytes: Reading = Absence.NOT_SUPPORTED


@dataclass(frozen=True, kw_only=True)
class Device:
    """One physical device (a GCD on MI250, a GPU elsewhere) as the management library sees it."""

    index: int  # the library's order, which is the PCI bus order
    uuid: str  # stable over reboots; the key of leases together with `bdf`
    bdf: str  # "0000:1b:00.0", lower case: the key between torch and the library
    name: str  # the marketing name: shown, never used to identify
    arch: str  # "gfx942", "sm_90"; "" on cpu
    compute_units: Reading  # CUs or SMs
    memory_bytes: int
    memory_used_bytes: Reading = Absence.NOT_SUPPORTED
    pci_id: Reading = Absence.NOT_SUPPORTED  # "1002:74a1", "10de:2335", lower case
    firmware: Mapping[str, Reading] = field(default_factory=dict)  # name -> version
    # as in {"compute": "SPX", "memory": "NPS1"} or {"mig": "disabled"}
    partition: Mapping[str, Reading] = field(default_factory=dict)
    pcie: PcieLink = PcieLink()
    ecc: Ecc = Ecc()
    throttle: Throttle = Throttle()
    power: Power = Power()
    clock_mhz: Reading = Absence.NOT_SUPPORTED  # compute clock; the slowest one where there are several
    max_clock_mhz: Reading = Absence.NOT_SUPPORTED
    temperature_c: Reading = Absence.NOT_SUPPORTED
    processes: tuple[Process, ...] | Absence = ()
    numa_node: Reading = Absence.NOT_SUPPORTED
    # "none" when nothing is needed, else the action that the driver asks for
    recovery_action: Reading = Absence.NOT_SUPPORTED
    # "completed" when the switch fabric is up and healthy, else its state in words
    fabric: Reading = Absence.NOT_SUPPORTED


@dataclass(frozen=True, kw_only=True)
class Link:
    """The best path between two devices, `a` < `b` by index."""

    a: int
    b: int
    kind: Reading  # "xgmi", "nvlink", "pcie", or an Absence
    # links of that kind that are up, or "up"/"down" where they are not counted
    active: Reading = Absence.NOT_SUPPORTED
    # faults of both ends: since the driver's start, or where reading sets them to zero since the last reading
    errors: Reading = Absence.NOT_SUPPORTED
    errors_cleared: bool = False
    replays: Reading = Absence.NOT_SUPPORTED  # packets sent again: time lost, no data
    p2p: Reading = Absence.NOT_SUPPORTED  # True when the library says that each may read the other's memory


@dataclass(frozen=True, kw_only=True)
class Host:
    """Everything that was read in one go."""

    vendor: VendorName
    library: str  # "nvidia-ml-py 13.580", "amdsmi 26.2"
    driver: Reading  # "580.159.04", "6.12.12"
    # newest CUDA the driver serves, or the host's ROCm release
    driver_runtime: Reading = Absence.NOT_SUPPORTED
    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    # addresses of devices that were given to us and held by the driver, and that the library does not list
    unlisted: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One device at one moment; sampled ten times a second beside a performance check."""

    index: int
    clock_mhz: Reading
    power_w: Reading
    temperature_c: Reading
    throttle: Throttle


@dataclass(frozen=True, kw_only=True)
class Event:
    """A fault that the driver reported while somebody listened."""

    index: int  # of the device, in the library's order; -1 where the report names none
    what: str  # "Xid 79: the GPU has fallen off the bus"


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """Something that a container or machine must offer before any device can work."""

    name: str
    ok: bool
    got: str
    expected: str
    next_step: str


@runtime_checkable
class Vendor(Protocol):
    """The names that every vendor module has."""

    NAME: VendorName
    VISIBILITY: str  # the variable that limits a child to some devices; "" on cpu
    PEER_LINK: str  # the kind that every pair of a healthy machine has: "xgmi", "nvlink", ""
    FOREIGN_RUNTIMES: tuple[str, ...]  # libraries of other vendors: what links them is not for this one
    REFERENCE_PARTITION: Mapping[
        str, str
    ]  # what training figures assume: {"compute": "SPX", "memory": "NPS1"}

    @staticmethod
    def read() -> Host:
        """Open the library, read everything, close it. Child process only. Raises `VendorAbsentError`."""

    @staticmethod
    def read_devices() -> Host:
        """The same, where a vendor can leave out the links: what is read around every check."""

    @staticmethod
    def sample(indices: Sequence[int]) -> tuple[Sample, ...]:
        """Read what moves under load. Child only; the library stays open between calls of one child."""

    @staticmethod
    def listen() -> Iterator[Event | None] | Absence:
        """Faults that the driver reports from now on; None about once a second without one. Child only.

        An Absence where the part or the release cannot tell.
        """

    @staticmethod
    def child_environment(devices: Sequence[Device]) -> dict[str, str]:
        """Variables that show a child exactly these devices, in this order."""

    @staticmethod
    def requirements() -> tuple[Requirement, ...]:
        """Device nodes and their permissions, /dev/shm, locked memory: files only, no library."""

    @staticmethod
    def torch_runtime() -> str | None:
        """`torch.version.hip` or `.cuda`: which vendor this torch was built for; None when another's."""

    @staticmethod
    def torch_uuid(told: str) -> str:
        """The library's id of a device in what torch prints as its UUID."""

    @staticmethod
    def driver_problem(host: Host, runtime_version: str) -> str | None:
        """Why this driver is outside the runtime's support window (with the rule's source), or None."""


def module(name: str) -> Vendor:
    """The vendor module of that name."""
    if name not in VENDORS:
        raise ValueError(f"no vendor {name!r}: expected one of {', '.join(VENDORS)}")
    loaded: Vendor = importlib.import_module(f"vendors.{name}")  # type: ignore[assignment]
    return loaded
