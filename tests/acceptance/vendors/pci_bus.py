"""The PCI bus as the kernel shows it. In: /sys. Out: addresses of devices, and the driver that holds each."""

from pathlib import Path

HANDED_ON = "vfio-pci"  # the driver of what is given to a virtual machine on purpose


def drivers(root: Path, vendor: str, classes: tuple[str, ...]) -> dict[str, str]:
    """Address -> driver, or "", of a vendor's devices of these classes, in the order of the bus.

    Args:
        root: Where /sys is.
        vendor: As in "0x10de".
        classes: How the class begins, as in "0x0302".
    """
    found = {}
    for device in sorted((root / "bus/pci/devices").glob("*")):
        if text(device / "vendor") == vendor and text(device / "class").startswith(classes):
            driver = device / "driver"
            found[device.name] = driver.resolve().name if driver.exists() else ""
    return found


def text(path: Path) -> str:
    """What one of the kernel's files says; "" where there is none."""
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""
