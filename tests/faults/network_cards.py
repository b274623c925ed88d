"""A fabricated /sys/class/infiniband, as the kernel lays it out. In: what differs. Out: a folder.

The layout: Documentation/ABI/stable/sysfs-class-infiniband of the kernel; the texts are those that its
drivers/infiniband/core/sysfs.c writes (`4: ACTIVE`, `400 Gb/sec (4X NDR)`).
"""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CARDS = 4
COUNTERS = ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors")
COUNTERS += ("local_link_integrity_errors", "excessive_buffer_overrun_errors")
PORT: Mapping[str, Any] = {
    "state": "4: ACTIVE",
    "phys_state": "5: LinkUp",
    "rate": "400 Gb/sec (4X NDR)",
    "link_layer": "InfiniBand",
    "mtu": 4092,
    "width": 16,
    "speed": "32.0 GT/s PCIe",
    "slot_width": 16,
    "slot_speed": "32.0 GT/s PCIe",
    "driver": "mlx5_core",
    "errors": {},
}
_times: list[int] = []  # how often this process has read


def root(one: Mapping[str, Any] | None = None, *, cards: int = CARDS, **each: Any) -> Path:
    """A /sys with equal cards; `one` is what differs on the last of them."""
    top = Path(tempfile.mkdtemp(dir=os.environ.get("STACKCHECK_FAKE_FOLDER")))
    for number in range(cards):
        _card(top, number, {**PORT, **each, **((one or {}) if number == cards - 1 else {})})
    return top


def growing(late: Mapping[str, Any], **each: Any) -> Path:
    """A healthy /sys at the first reading of a process, and one whose last card differs at the next."""
    _times.append(1)
    return root(late if len(_times) > 1 else None, **each)


def _card(top: Path, number: int, has: Mapping[str, Any]) -> None:
    if has.get("gone"):
        return
    slot = top / f"devices/pci0000:{number:02x}"
    device = slot / f"0000:{0x40 + number:02x}:00.0"
    name = f"mlx5_{number}"
    port = device / "infiniband" / name / "ports/1"
    files = {port / key: has[key] for key in ("state", "phys_state", "rate", "link_layer")}
    files |= {port / "counters" / counter: has["errors"].get(counter, 0) for counter in COUNTERS}
    files |= {device / "vendor": "0x15b3", device / "device": has.get("device", "0x1021")}
    files |= {device / "net" / f"ib{number}" / "mtu": has["mtu"]}
    files |= {device / "current_link_width": has["width"], device / "current_link_speed": has["speed"]}
    files |= {device / "max_link_width": 16, device / "max_link_speed": "32.0 GT/s PCIe"}
    files |= {slot / "max_link_width": has["slot_width"], slot / "max_link_speed": has["slot_speed"]}
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="utf-8")
    driver = top / "bus/pci/drivers" / has["driver"]
    driver.mkdir(parents=True, exist_ok=True)
    (device / "driver").symlink_to(driver)
    if has.get("virtual"):
        (device / "physfn").symlink_to(slot)
    (device / "infiniband" / name / "device").symlink_to(device)
    cards = top / "class/infiniband"
    cards.mkdir(parents=True, exist_ok=True)
    (cards / name).symlink_to(device / "infiniband" / name)
