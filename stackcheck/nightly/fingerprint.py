"""What a night is about: the state of this host that can change what an image does on it.

In: the host, as `vendors/` reads it. Out: a `Fingerprint`, which is kept as JSON, and the differences between
two in words.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from stackcheck import vendors
from stackcheck.files.border import Closed
from stackcheck.vendors import Nvls, Vendor
from stackcheck.vendors.kernel_module import DriverModule

OF_HOST = ("vendor", "driver", "kernel", "partition", "nvls")
OF_DEVICES = {"model": "devices", "firmware": "firmware", "power_cap_w": "power cap in W"}


class DeviceState(Closed):
    """One device; its id is the hash of its UUID."""

    model: str
    id: str
    firmware: str | None
    power_cap_w: float | None


class Fingerprint(Closed):
    """A host's state. Two that are equal need no second validation."""

    vendor: Vendor
    devices: tuple[DeviceState, ...]
    driver: str | None
    srcversion: str | None  # of the driver's loaded module, as a kernel's own modules have no version
    kernel: str
    partition: str | None
    nvls: Nvls

    @property
    def device_model(self) -> str:
        """The one model of the host's devices; several models are named together and match no certificate."""
        return " + ".join(sorted({device.model for device in self.devices})) or "no device"

    def words(self) -> str:
        """The host in one phrase, for a person."""
        driver = f"driver {self.driver}" if self.driver else "no driver"
        return f"{self.device_model} x{len(self.devices)}, {driver}, kernel {self.kernel}"


def of_host(host: vendors.Host, module: DriverModule | None) -> Fingerprint:
    """The fingerprint of a host and of the module that its driver is."""
    return Fingerprint(
        vendor=host.vendor,
        devices=tuple(
            DeviceState(
                model=device.model, id=device.id, firmware=device.firmware, power_cap_w=device.power_cap_w
            )
            for device in host.devices
        ),
        driver=host.driver,
        srcversion=module.loaded.srcversion if module and module.loaded else None,
        kernel=host.kernel,
        partition=host.partition,
        nvls=host.nvls,
    )


def changes(before: Fingerprint, now: Fingerprint) -> tuple[str, ...]:
    """What changed on this host, one phrase each; empty if nothing did."""
    found = list(configuration_changes(before.model_dump(), now.model_dump()))
    if before.srcversion != now.srcversion and before.driver == now.driver:
        found.append(f"srcversion of the driver {_shown(before.srcversion)} -> {_shown(now.srcversion)}")
    replaced = {device.id for device in now.devices} - {device.id for device in before.devices}
    if replaced:
        found.append(f"{len(replaced)} devices are new in this host")
    return tuple(found)


def configuration_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """How two hosts differ in what a certificate is about; which node it is does not count."""
    for name in OF_HOST:
        if before[name] != now[name]:
            yield f"{name} {_shown(before[name])} -> {_shown(now[name])}"
    for name, words in OF_DEVICES.items():
        old, new = (Counter(_shown(device[name]) for device in host["devices"]) for host in (before, now))
        if old != new:
            yield f"{words} {_counted(old)} -> {_counted(new)}"


def _counted(values: Counter[str]) -> str:
    return " and ".join(f"{value} x{count}" for value, count in sorted(values.items())) or "no device"


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if value not in {None, ""} else "none"
