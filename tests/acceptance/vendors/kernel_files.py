"""The kernel's own files. In: /sys, or a file's text. Out: PCI devices and their drivers, sets of numbers."""

import re
from pathlib import Path

PASSED_THROUGH = "vfio-pci"  # the driver of a device that was passed through to a virtual machine on purpose


def drivers(root: Path, vendor: str, classes: tuple[str, ...]) -> dict[str, str]:
    """PCI address -> driver ("" without one) of a vendor's devices of these classes, in bus order.

    Args:
        root: Where /sys is mounted.
        vendor: The PCI vendor id, such as "0x10de".
        classes: Prefixes of the PCI class, such as "0x0302".
    """
    found = {}
    for device in sorted((root / "bus/pci/devices").glob("*")):
        if text(device / "vendor") == vendor and text(device / "class").startswith(classes):
            driver = device / "driver"
            found[device.name] = driver.resolve().name if driver.exists() else ""
    return found


def text(path: Path) -> str:
    """The content of a kernel file; "" if the file does not exist."""
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""


def numbers(listed: str) -> set[int]:
    """The numbers in a list of CPUs or NUMA nodes, such as "0-3,8"; an empty set for empty text."""
    pairs = [part.partition("-") for part in listed.strip().split(",") if part]
    return {number for low, _, high in pairs for number in range(int(low), int(high or low) + 1)}


DMA_BUF_SINCE = (5, 12)  # the first kernel whose RDMA can register a dma-buf (ib_umem_dmabuf_get)


def release(root: Path) -> tuple[int, int]:
    """The kernel's release (major, minor); (0, 0) if no file has it."""
    found = re.match(r"(\d+)\.(\d+)", text(root / "proc/sys/kernel/osrelease"))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def has_options(root: Path, *names: str) -> bool | None:
    """Whether the running kernel was built with all of these options; None if no file lists its options."""
    configuration = text(root / "boot" / f"config-{text(root / 'proc/sys/kernel/osrelease')}")
    return all(f"\n{name}=y\n" in f"\n{configuration}\n" for name in names) if configuration else None
