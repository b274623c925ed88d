"""The energy that a rank's device has used since its driver was loaded. In: a world. Out: joules, or why not.

NVIDIA's library is on Python's path. AMD's module lies beside libamd_smi.so, and not on the path: torch
imports what it finds under that name while it is imported itself, and ends where the library is of another
release (pytorch#188724). So it is found here by its place, after torch, and the path is as before then.
"""

from __future__ import annotations

import importlib
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from world import World

# As tests/acceptance/vendors/amd_library.py has them; a test holds the two equal.
AMD_FOLDERS = (
    "/opt/rocm/share/amd_smi",
    f"{sysconfig.get_path('platlib')}/_rocm_sdk_core/share/amd_smi",
    "/usr/share/amd_smi",
)


def joules(world: World) -> float | str:
    """The device's counter in joules, or in words why it is not readable."""
    if not world.gpu:
        return "a CPU has no counter of its own"
    properties = torch.cuda.get_device_properties(world.device)
    if not torch.version.hip:
        return of_nvidia(str(properties.uuid))
    if not hasattr(properties, "pci_bus_id"):  # torch 2.6 on ROCm
        return "this torch does not give the device's PCI address"
    place = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    return of_amd("{:04x}:{:02x}:{:02x}.0".format(*place))


def used(before: float | str | None, after: float | str) -> float | str:
    """The difference of two readings, or the reason why it is missing."""
    for reading in (before, after):
        if isinstance(reading, str):
            return reading
    return "no step was timed" if before is None else float(after) - float(before)


def of_nvidia(uuid: str) -> float | str:
    """In millijoules since the driver was loaded (nvmlDeviceGetTotalEnergyConsumption)."""
    try:
        import pynvml
    except ImportError:
        return "pynvml (nvidia-ml-py) is not installed"
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
    except pynvml.NVMLError as error:
        return f"NVML: {error}"


def of_amd(bdf: str) -> float | str:
    """A counter and its resolution in microjoules (amdsmi_get_energy_count, which no virtual machine has).

    The counter is called `power` up to release 6.1, and `energy_accumulator` after it.
    """
    try:
        amdsmi = _amdsmi()
    except (ImportError, AttributeError, OSError, KeyError) as error:
        return f"amdsmi: {type(error).__name__}: {error}"
    try:
        amdsmi.amdsmi_init()
        count = amdsmi.amdsmi_get_energy_count(amdsmi.amdsmi_get_processor_handle_from_bdf(bdf))
    except amdsmi.AmdSmiException as error:
        return f"amdsmi: {' '.join(str(error).split())}"
    counter = count["energy_accumulator"] if "energy_accumulator" in count else count["power"]
    return float(counter * count["counter_resolution"]) / 1e6


def _amdsmi() -> Any:
    before = list(sys.path)
    sys.path += [folder for folder in AMD_FOLDERS if Path(folder).is_dir()]
    try:
        return importlib.import_module("amdsmi")
    finally:
        sys.path[:] = before
