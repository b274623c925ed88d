"""Energy that this rank's device has used since its driver was loaded, from the vendor's library."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from world import World


def joules(world: World) -> float | None:
    """Joules by the device's own counter; None where no library tells (a CPU, or none is installed)."""
    if not world.gpu:
        return None
    return _amd(world) if torch.version.hip else _nvidia(world)


def _nvidia(world: World) -> float | None:
    try:
        import pynvml
    except ImportError:
        return None
    pynvml.nvmlInit()
    uuid = str(torch.cuda.get_device_properties(world.device).uuid)
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3


def _amd(world: World) -> float | None:
    try:
        import amdsmi
    except ImportError:
        return None
    amdsmi.amdsmi_init()
    properties = torch.cuda.get_device_properties(world.device)
    bus = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    handle = amdsmi.amdsmi_get_processor_handle_from_bdf("{:04x}:{:02x}:{:02x}.0".format(*bus))
    count = amdsmi.amdsmi_get_energy_count(handle)
    return count["energy_accumulator"] * count["counter_resolution"] / 1e6
