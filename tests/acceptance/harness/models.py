"""Which product a device is. In: a `Device` and devices.json. Out: its row, or the row that somebody has to
add.

By PCI id: products of one chip differ in power, links and clocks, and no other figure tells them apart. Where
AMD's library tells no PCI id, by architecture, compute units and memory; never by the marketing name, which
on ROCm depends on a file of ids that containers often lack.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vendors import Device, VendorName, is_known

TABLE = Path(__file__).resolve().parent.parent / "devices.json"
MEMORY_TOLERANCE = 0.08  # drivers and ECC keep a few per cent; 192 and 256 GB stay apart


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
    if len(fitting) == 1:
        return fitting[0]
    found = ", ".join(candidate["model"] for candidate in fitting) or "no row"
    raise UnknownDeviceError(
        f"device {device.index} ({device.name!r}) fits {found} of devices.json; add a row with its sources:\n"
        + json.dumps(_observed(vendor, device))
    )


def _fits(candidate: Mapping[str, Any], device: Device) -> bool:
    memory = candidate["memory_bytes"]
    close = abs(device.memory_bytes - memory) <= MEMORY_TOLERANCE * memory
    if not close or candidate["arch"] != device.arch:
        return False
    if is_known(device.pci_id):
        return device.pci_id in candidate["pci_ids"]
    return candidate["vendor"] == "amd" and device.compute_units in (candidate["compute_units"], "N/A")


def _observed(vendor: VendorName, device: Device) -> dict[str, Any]:
    return {
        "model": "?",
        "vendor": vendor,
        "arch": device.arch,
        "compute_units": device.compute_units,
        "memory_bytes": device.memory_bytes,
        "pci_ids": [device.pci_id],
    }
