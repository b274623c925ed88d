"""What this host sees of its devices by itself, to hold an image's claims about the machine to.

In: sysfs, the vendor's module. Out: `Seen`. The kernel shows the PCI Express links and every GPU on the bus;
an idle link may run at a lower speed, but keeps its width. How long each device was busy is the driver's own
counter, read while an image runs: a child that claims work on a device which did nothing is seen.
"""

import contextlib
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stackcheck import vendors
from stackcheck.vendors import Host
from stackcheck.vendors.kernel_module import text

SYS = Path("/sys")
ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}  # GT/s of a lane
# Vendor and PCI classes of GPUs: 3D controller; processing accelerator, other display controller.
GPUS = {"nvidia": ("0x10de", ("0x0302",)), "amd": ("0x1002", ("0x1200", "0x0380"))}
PERIOD_S = 0.5
JOIN_S = 5.0  # a driver that hangs must not hold the run


@dataclass(frozen=True, kw_only=True)
class HostLink:
    """The slowest link between a device and its processor: lanes, generation, and what all of it can."""

    width: int
    generation: int
    max_generation: int


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What this host sees after a run.

    Attributes:
        links: Of each device the link to its processor; None where the kernel does not show it.
        busy_s: Device id -> the seconds that it worked during the run, by its driver; None: not read.
    """

    links: tuple[HostLink | None, ...] = ()
    memory_bytes: tuple[int, ...] = ()  # of each device
    unlisted: tuple[str, ...] = ()  # PCI addresses of GPUs on the bus that the driver does not list
    gone: tuple[str, ...] = ()  # ids of devices that were there when the run began
    busy_s: Mapping[str, float | None] = field(default_factory=dict)


def look(host: Host, busy_s: Mapping[str, float | None] | None = None) -> Seen:
    """What this host sees now of the devices that it had when a run began, and what it saw meanwhile."""
    if not host.devices:
        return Seen()
    backend = vendors.module(host.vendor)
    now = {device.id for device in backend.devices()}
    addresses = backend.addresses()
    return Seen(
        links=tuple(_link(addresses.get(device.id)) for device in host.devices),
        memory_bytes=tuple(device.memory_bytes for device in host.devices),
        unlisted=tuple(address for address in _gpus(host.vendor) if address not in addresses.values()),
        gone=tuple(device.id for device in host.devices if device.id not in now),
        busy_s=busy_s or {},
    )


def _gpus(vendor: str) -> list[str]:
    """The PCI addresses of a vendor's GPUs."""
    maker, classes = GPUS.get(vendor, ("", ()))
    found = sorted(one for one in (SYS / "bus/pci/devices").glob("*") if _text(one / "vendor") == maker)
    return [one.name for one in found if _text(one / "class").startswith(classes)]


def _link(address: str | None) -> HostLink | None:
    """The link of a device, by every port between it and its processor."""
    device = (SYS / "bus/pci/devices" / address).resolve() if address else SYS
    ports = [folder for folder in (device, *device.parents) if ADDRESS.fullmatch(folder.name)]
    widths = [int(width) for port in ports if (width := _text(port / "current_link_width")).isdigit()]
    speeds, most = (_generations(ports, name) for name in ("current_link_speed", "max_link_speed"))
    if not (widths and speeds and most):
        return None
    return HostLink(width=min(widths), generation=min(speeds), max_generation=min(most))


def _generations(ports: Sequence[Path], name: str) -> list[int]:
    speeds = [_text(port / name).split(" ")[0] for port in ports]
    return [GENERATIONS[speed] for speed in speeds if speed in GENERATIONS]


def _text(path: Path) -> str:
    return text(path) or ""


@contextlib.contextmanager
def watched(host: Host) -> Iterator[dict[str, float | None]]:
    """Device id -> the seconds that it was busy; complete when the body has ended. Empty for a processor."""
    found: dict[str, float | None] = {}
    if host.vendor == "cpu":
        yield found
        return
    found.update((device.id, None) for device in host.devices)
    done = threading.Event()
    thread = threading.Thread(target=_add_up, args=(host, found, done), daemon=True)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join(JOIN_S)


def _add_up(host: Host, found: dict[str, float | None], done: threading.Event) -> None:
    """Add up what the driver says. A time without an answer counts as busy: it refuses no healthy image."""
    backend, last = vendors.module(host.vendor), time.monotonic()
    missed = dict.fromkeys(found, 0.0)
    while not done.wait(PERIOD_S):
        try:
            shares = backend.busy()
        except (OSError, RuntimeError, ValueError):
            shares = {}
        now = time.monotonic()
        for name, seconds in found.items():
            share = shares.get(name)
            if share is None:
                missed[name] += now - last
            else:
                found[name] = (seconds or 0.0) + share * (now - last) + missed[name]
                missed[name] = 0.0
        last = now
    for name, seconds in found.items():
        found[name] = None if seconds is None else seconds + missed[name]
