"""What is wrong with the paths of a device: to its host, and to other devices. In: readings. Out: `Unfit`s.

A path that is narrower or slower than it should be, or that counts errors, explains a slow copy, and is the
machine's. A copy that is slow over a clean path is a failure.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from harness.readings import known, of
from harness.thresholds import OLDER_SLOT
from harness.unfit import Unfit
from vendors import Absence, Device, Host, Link, PcieLink, Reading, is_known


def shared_generation(link: PcieLink, row: Mapping[str, Any]) -> int:
    """The PCIe generation that a link has to run at: the device model's, or that of an older slot."""
    own = int(row["pcie"]["generation"])
    return min(own, link.max_generation) if isinstance(link.max_generation, int) else own


def older_slot(devices: Sequence[Device], row: Mapping[str, Any]) -> dict[str, int]:
    """The condition of host copies where a slot is older than the devices; none elsewhere."""
    shared = min(shared_generation(device.pcie, row) for device in devices)
    return {OLDER_SLOT: shared} if shared < row["pcie"]["generation"] else {}


def busiest(readings: Sequence[Host], device: Device) -> PcieLink:
    """The link at its best: some readings were taken before the copy began. Skips if it is unread."""
    links = [of(host, device).pcie for host in readings]
    return replace(
        links[-1],
        generation=_most([link.generation for link in links], "PCIe generation"),
        width=_most([link.width for link in links], "PCIe width"),
    )


def too_little(index: int, link: PcieLink, row: Mapping[str, Any]) -> Iterator[Unfit]:
    """A link under load with fewer lanes than the device model has, or slower than device and slot can."""
    for name, least in (("width", row["pcie"]["width"]), ("generation", shared_generation(link, row))):
        got = getattr(link, name)
        if not got >= least:
            yield Unfit("pcie", f"device {index}: PCIe {name} {got}, expected at least {least}", index)


def bad_links(early: Host, late: Host, is_bad: Callable[[Link], bool]) -> Iterator[Unfit]:
    """Links between devices that are down or of a wrong kind, or that counted errors or sent packets again.

    Args:
        early: The machine before the copies.
        late: The machine after them.
        is_bad: Whether a link is of a wrong kind, or has too few lanes.
    """
    before = {(link.a, link.b): link for link in early.links}
    for link in late.links:
        if is_bad(link):
            yield Unfit("link", f"devices {link.a}-{link.b}: {link.kind}, {link.active} active")
        for name in ("errors", "replays"):
            first = 0 if link.errors_cleared and name == "errors" else getattr(before[link.a, link.b], name)
            last = getattr(link, name)
            if is_known(first) and is_known(last) and int(last) > int(first):
                yield Unfit("link", f"devices {link.a}-{link.b}: {name} grew from {first} to {last}")


def _most(readings: Sequence[Reading], what: str) -> int:
    """The highest reading.
    It ignores a speed that no generation has, such as the "0 MT/s" of a link that sleeps.
    """
    numbers = [reading for reading in readings if isinstance(reading, int)]
    last = readings[-1]
    if not numbers and isinstance(last, str) and not isinstance(last, Absence):
        pytest.fail(f"{what}: {last}, expected a generation of PCI Express", pytrace=False)
    return max(numbers) if numbers else int(known(last, what))
