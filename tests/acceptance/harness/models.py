"""The device model of a device. In: a `Device` and devices.json. Out: its row, or the row to add.

The PCI id decides: products with the same chip differ in power, links and clocks, and only the PCI id tells
them apart. Where two products share one (740c is MI250X or MI250), the compute units do. A GPU in partitions
is a device model of its own, of which each partition is one device. Where AMD's library gives no PCI id,
architecture, compute units and memory decide. The marketing name never does: on ROCm it comes from a file of
ids that containers often lack.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vendors import Absence, Device, VendorName, is_known

TABLE = Path(__file__).resolve().parent.parent / "devices.json"
WHOLE = {"compute": "SPX", "memory": "NPS1"}  # an AMD GPU that is one device
MEMORY_TOLERANCE = 0.08  # drivers and ECC reserve a few per cent; 192 and 256 GB remain distinct


class UnknownDeviceError(Exception):
    """No row of devices.json fits; the message holds the row to add."""


@functools.cache
def table() -> tuple[Mapping[str, Any], ...]:
    """The rows of devices.json."""
    return tuple(json.loads(TABLE.read_text(encoding="utf-8"))["devices"])


def row(model: str) -> Mapping[str, Any]:
    """The row of a model. Raises `UnknownDeviceError`."""
    for candidate in table():
        if candidate["model"] == model:
            return candidate
    raise UnknownDeviceError(f"devices.json has no row for {model}")


def identify(vendor: VendorName, device: Device) -> Mapping[str, Any]:
    """The row of a device. Raises `UnknownDeviceError`."""
    if vendor == "cpu":
        return row("CPU")
    fitting = [
        candidate for candidate in table() if candidate["vendor"] == vendor and _fits(candidate, device)
    ]
    if len(fitting) > 1:  # one PCI id for two products
        fitting = [candidate for candidate in fitting if candidate["compute_units"] == device.compute_units]
    if len(fitting) == 1:
        return fitting[0]
    if not is_known_arch(device):
        raise UnknownDeviceError(uncertifiable(vendor, device))
    found = ", ".join(candidate["model"] for candidate in fitting) or "no row"
    names = ("arch", "compute_units", "memory_bytes")
    seen = {"model": "?", "vendor": vendor, **{name: getattr(device, name) for name in names}}
    seen |= {"pci_ids": [device.pci_id], "partition": dict(device.partition)}
    raise UnknownDeviceError(
        f"device {device.index} ({device.name!r}) fits {found} of devices.json, expected one row; "
        "add a row with its sources:\n" + json.dumps(seen)
    )


def short_of_memory(device: Device) -> Mapping[str, Any] | None:
    """The row of a device that is one product in all but its memory, of which it has too little."""
    fitting = [
        candidate
        for candidate in table()
        if device.pci_id in candidate["pci_ids"]
        and device.compute_units == candidate["compute_units"]
        and device.memory_bytes < candidate["memory_bytes"]
        and _is_partitioned_so(candidate, device)
    ]
    return fitting[0] if len(fitting) == 1 else None


def is_known_arch(device: Device) -> bool:
    """Whether any row has the device's architecture."""
    return any(candidate["arch"] == device.arch for candidate in table())


def uncertifiable(vendor: VendorName, device: Device) -> str:
    """Why a device of an architecture that no row has cannot be certified: consumer and workstation cards."""
    known = sorted({candidate["arch"] for candidate in table() if candidate["vendor"] == vendor})
    return (
        f"not certifiable: device {device.index} ({device.name!r}) is {device.arch}, and devices.json has"
        f" {', '.join(known)} only; its checks of correctness tell something, and no figure of it is judged"
    )


def partitioning(device: Device) -> str:
    """How a device is partitioned, "CPX/NPS4"; empty for a whole GPU, and where it cannot be read."""
    modes = {name: device.partition.get(name, Absence.NOT_AVAILABLE) for name in WHOLE}
    known = {name: str(mode) for name, mode in modes.items() if is_known(mode)}
    return "/".join(known.values()) if any(mode != WHOLE[name] for name, mode in known.items()) else ""


def _fits(candidate: Mapping[str, Any], device: Device) -> bool:
    memory = candidate["memory_bytes"]
    close = abs(device.memory_bytes - memory) <= MEMORY_TOLERANCE * memory
    if not close or candidate["arch"] != device.arch or not _is_partitioned_so(candidate, device):
        return False
    if is_known(device.pci_id):
        return device.pci_id in candidate["pci_ids"]
    return candidate["vendor"] == "amd" and device.compute_units in (candidate["compute_units"], "N/A")


def _is_partitioned_so(candidate: Mapping[str, Any], device: Device) -> bool:
    """Whether a row of devices.json fits the device's partitions, as far as these can be read."""
    wanted = candidate.get("partition", WHOLE)
    read = {name: device.partition.get(name, Absence.NOT_AVAILABLE) for name in wanted}
    return all(mode == wanted[name] for name, mode in read.items() if is_known(mode))
