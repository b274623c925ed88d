"""One NVIDIA GPU as NVML reports it. In: the opened library and a handle. Out: a `Device`, a `Sample`.

Reason bits and field numbers: NVML API reference, "Clocks Event Reasons" and "Field Value Enums".
"""

from pathlib import Path
from typing import Any

from vendors import Absence, Device, Ecc, PcieLink, Power, Process, Reading, Sample, Throttle
from vendors.nvidia_library import ask, reading, text
from vendors.nvidia_links import fabric

# Bits of the clocks-event reasons. Every healthy H100 and H200 is at its power cap during a GEMM.
UNFIT_REASONS = {
    0x08: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
NORMAL_REASONS = {0x01: "idle", 0x02: "application clocks", 0x04: "software power cap", 0x10: "sync boost"}
RECOVERY_ACTIONS = {0: "none", 1: "reset", 2: "reboot", 3: "drain peer-to-peer", 4: "drain and reset"}


def device(nvml: Any, handle: Any, index: int) -> Device:
    """Everything about one GPU."""
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    pci = nvml.nvmlDeviceGetPciInfo(handle)
    capability = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    mig = ask(nvml, "nvmlDeviceGetMigMode", handle)
    return Device(
        index=index,
        uuid=str(reading(nvml.nvmlDeviceGetUUID(handle))),
        bdf=_bdf(str(reading(pci.busId))),
        name=str(reading(nvml.nvmlDeviceGetName(handle))),
        arch=f"sm_{capability[0]}{capability[1]}",
        compute_units=_multiprocessors(nvml, handle, tuple(capability)),
        memory_bytes=memory.total,
        memory_used_bytes=memory.used,
        pci_id=f"{pci.pciDeviceId & 0xFFFF:04x}:{pci.pciDeviceId >> 16:04x}",
        firmware=_firmware(nvml, handle),
        partition={"mig": mig if isinstance(mig, Absence) else "enabled" if mig[0] else "disabled"},
        pcie=_pcie(nvml, handle),
        ecc=_ecc(nvml, handle),
        throttle=_throttle(nvml, handle),
        power=_power(nvml, handle),
        clock_mhz=ask(nvml, "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
        temperature_c=ask(nvml, "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
        processes=_processes(nvml, handle),
        numa_node=_numa_node(_bdf(str(reading(pci.busId)))),
        recovery_action=_recovery(nvml, handle),
        fabric=fabric(nvml, handle),
    )


def _bdf(bus_id: str) -> str:
    """The PCI address: NVML writes eight digits of domain, the kernel and torch write four."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _multiprocessors(nvml: Any, handle: Any, capability: tuple[int, ...]) -> Reading:
    """NVML counts CUDA cores.
    A multiprocessor has 64 of them on sm_70, sm_75 and sm_80, and 128 elsewhere.
    """
    cores = ask(nvml, "nvmlDeviceGetNumGpuCores", handle)
    if isinstance(cores, Absence):
        return cores
    return int(cores) // (64 if capability in {(7, 0), (7, 5), (8, 0)} else 128)


def _firmware(nvml: Any, handle: Any) -> dict[str, Reading]:
    return {
        "vbios": text(nvml, "nvmlDeviceGetVbiosVersion", handle),
        "inforom": text(nvml, "nvmlDeviceGetInforomImageVersion", handle),
        "gsp": text(nvml, "nvmlDeviceGetGspFirmwareVersion", handle),
    }


def _pcie(nvml: Any, handle: Any) -> PcieLink:
    return PcieLink(
        generation=ask(nvml, "nvmlDeviceGetCurrPcieLinkGeneration", handle),
        width=ask(nvml, "nvmlDeviceGetCurrPcieLinkWidth", handle),
        max_generation=ask(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle),
        max_width=ask(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle),
        replays=ask(nvml, "nvmlDeviceGetPcieReplayCounter", handle),
    )


def _ecc(nvml: Any, handle: Any) -> Ecc:
    mode = ask(nvml, "nvmlDeviceGetEccMode", handle)
    rows = ask(nvml, "nvmlDeviceGetRemappedRows", handle)
    remapped = [rows] * 4 if isinstance(rows, Absence) else list(rows)
    kinds = (nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
    volatile = nvml.NVML_VOLATILE_ECC
    counts = [ask(nvml, "nvmlDeviceGetTotalEccErrors", handle, kind, volatile) for kind in kinds]
    return Ecc(
        enabled=mode if isinstance(mode, Absence) else bool(mode[0]),
        correctable=counts[0],
        uncorrectable=counts[1],
        pending=remapped[2],
        failed=remapped[3],
        retired=remapped[1] if isinstance(remapped[1], Absence) else int(remapped[0]) + int(remapped[1]),
    )


def _throttle(nvml: Any, handle: Any) -> Throttle:
    call = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    word = ask(nvml, call or "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    if isinstance(word, Absence):
        return Throttle(reading=word)
    return Throttle(
        unfit=tuple(name for bit, name in UNFIT_REASONS.items() if word & bit),
        normal=tuple(name for bit, name in NORMAL_REASONS.items() if word & bit),
        reading=f"{word:#x}",
    )


def _power(nvml: Any, handle: Any) -> Power:
    return Power(
        cap_w=_watts(ask(nvml, "nvmlDeviceGetEnforcedPowerLimit", handle)),
        default_cap_w=_watts(ask(nvml, "nvmlDeviceGetPowerManagementDefaultLimit", handle)),
        draw_w=_watts(ask(nvml, "nvmlDeviceGetPowerUsage", handle)),
    )


def _watts(milliwatts: Reading) -> Reading:
    return milliwatts if isinstance(milliwatts, Absence) else float(milliwatts) / 1000


def _processes(nvml: Any, handle: Any) -> tuple[Process, ...] | Absence:
    found = ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle)
    if isinstance(found, Absence):
        return found
    return tuple(
        Process(
            pid=process.pid,
            name=text(nvml, "nvmlSystemGetProcessName", process.pid),
            memory_bytes=Absence.NO_PERMISSION if process.usedGpuMemory is None else process.usedGpuMemory,
        )
        for process in found
    )


def _numa_node(bdf: str) -> Reading:
    """The device's NUMA node from sysfs, which every driver release has; -1 if the firmware gave none."""
    try:
        node = int(Path(f"/sys/bus/pci/devices/{bdf}/numa_node").read_text())
    except OSError:
        return Absence.NOT_AVAILABLE
    return node if node >= 0 else Absence.NOT_AVAILABLE


def _recovery(nvml: Any, handle: Any) -> Reading:
    field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    if field is None:
        return Absence.NOT_SUPPORTED
    values = ask(nvml, "nvmlDeviceGetFieldValues", handle, [field])
    if isinstance(values, Absence):
        return values
    if values[0].nvmlReturn != nvml.NVML_SUCCESS:
        return Absence.NOT_SUPPORTED
    action = int(values[0].value.uiVal)
    return RECOVERY_ACTIONS.get(action, f"action {action}")


def sample(nvml: Any, handle: Any, index: int) -> Sample:
    """What changes under load."""
    return Sample(
        index=index,
        clock_mhz=ask(nvml, "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
        power_w=_watts(ask(nvml, "nvmlDeviceGetPowerUsage", handle)),
        temperature_c=ask(nvml, "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
        throttle=_throttle(nvml, handle),
    )
