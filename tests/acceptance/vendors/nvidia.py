"""NVIDIA through nvidia-ml-py. In: NVML, in a child process. Out: `Host` and `Sample`s of plain, typed
readings.

Names are those of nvidia-ml-py 12 and 13; a call that the installed release or the driver lacks is an
`Absence`. Reason bits and field numbers: NVML API reference, "Clocks Event Reasons" and "Field Value
Enums".
"""

import functools
import importlib.metadata
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vendors import (
    Absence,
    Device,
    Ecc,
    Host,
    Link,
    PcieLink,
    Power,
    Process,
    Reading,
    Requirement,
    Sample,
    Throttle,
    VendorAbsentError,
    VendorName,
    is_known,
)
from vendors.container import device_node, locked_memory, shared_memory

NAME: VendorName = "nvidia"
VISIBILITY = "CUDA_VISIBLE_DEVICES"
PEER_LINK = "nvlink"
FOREIGN_RUNTIMES = ("libamdhip64", "librccl", "libhsa-runtime64")
REFERENCE_PARTITION: Mapping[str, str] = {"mig": "disabled"}

# Bits of the clocks-event reasons. A power cap is how a GEMM runs on every healthy H100 and H200.
UNFIT_REASONS = {
    0x08: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
NORMAL_REASONS = {0x01: "idle", 0x02: "application clocks", 0x04: "software power cap", 0x10: "sync boost"}
ALL_ONES = (0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)
FABRIC_STATES = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}
RECOVERY_ACTIONS = {0: "none", 1: "reset", 2: "reboot", 3: "drain peer-to-peer", 4: "drain and reset"}
MAX_LINKS = 18
SHM_BYTES, MEMLOCK_BYTES = 8 << 30, 32 << 30  # the defaults of AMD's preflight serve both vendors

# CUDA release -> first driver branch that serves it (CUDA release notes, table of minor-version
# compatibility).
DRIVER_WINDOW = {11: 450, 12: 525, 13: 580}
WINDOW_SOURCE = "CUDA toolkit release notes, minor-version compatibility"


def read() -> Host:
    """Everything NVML tells of the visible devices."""
    host, nvml = read_devices(), _open()
    shown = [device.index for device in host.devices]
    ends = {index: _end(nvml, nvml.nvmlDeviceGetHandleByIndex(index)) for index in shown}
    links = [_link(nvml, ends, a, b) for number, a in enumerate(shown) for b in shown[number + 1 :]]
    return replace(host, links=tuple(links))


def read_devices() -> Host:
    """The same without links, which take a hundred calls a pair: seen, 0.44 s on four linked H200s."""
    nvml = _open()
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    every = [_device(nvml, handle, index) for index, handle in enumerate(handles)]
    shown = _visible(every)
    return Host(
        vendor=NAME,
        library=f"nvidia-ml-py {_library_version()}",
        driver=_text(nvml, nvml.nvmlSystemGetDriverVersion),
        driver_runtime=_cuda_of_driver(nvml),
        devices=tuple(shown),
    )


def sample(indices: Sequence[int]) -> tuple[Sample, ...]:
    """Clock, power, temperature and throttle reasons of some devices now."""
    nvml = _open()
    return tuple(_sample(nvml, nvml.nvmlDeviceGetHandleByIndex(index), index) for index in indices)


def child_environment(devices: Sequence[Device]) -> dict[str, str]:
    """By UUID, which no renumbering can mistake; an empty list hides every GPU."""
    return {VISIBILITY: ",".join(device.uuid for device in devices), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def requirements() -> tuple[Requirement, ...]:
    """The control nodes and each GPU's, shared memory, locked memory."""
    start = "start the container with --gpus all, or pass /dev/nvidia* as --device"
    gpus = sorted(path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    nodes = (Path("/dev/nvidiactl"), Path("/dev/nvidia-uvm"), *gpus)
    return (
        *(device_node(path, start) for path in nodes),
        shared_memory(SHM_BYTES),
        locked_memory(MEMLOCK_BYTES),
    )


def torch_runtime() -> str | None:
    """The CUDA release that torch was built with."""
    import torch

    return torch.version.cuda


def driver_problem(host: Host, runtime_version: str) -> str | None:
    """CUDA's minor-version compatibility: a driver branch serves every later minor of its major."""
    major = int(runtime_version.split(".", maxsplit=1)[0])
    least = DRIVER_WINDOW.get(major)
    if least is None:
        return (
            f"no driver window is known for CUDA {runtime_version}: add it with its source ({WINDOW_SOURCE})"
        )
    if not is_known(host.driver):
        return f"the driver's version cannot be read: {host.driver}"
    if int(str(host.driver).split(".")[0]) < least:
        return (
            f"driver {host.driver} is older than {least}, as CUDA {runtime_version} needs ({WINDOW_SOURCE})"
        )
    return None


@functools.cache
def _open() -> Any:
    """The library, initialised once per child; NVML needs no closing before its process ends."""
    try:
        import pynvml
    except ImportError as error:
        raise VendorAbsentError("nvidia-ml-py is not installed (pip install nvidia-ml-py)") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise VendorAbsentError(f"NVML: {error}") from error
    return pynvml


def _get(nvml: Any, function: Callable[..., Any] | str, *arguments: object) -> Any:
    """The answer of one call, or why there is none."""
    call = getattr(nvml, function, None) if isinstance(function, str) else function
    if call is None:
        return Absence.NOT_SUPPORTED
    try:
        answer = call(*arguments)
    except nvml.NVMLError as error:
        return _absence(nvml, error)
    return _reading(answer)


def _absence(nvml: Any, error: Any) -> Absence:
    known = {
        nvml.NVML_ERROR_NOT_SUPPORTED: Absence.NOT_SUPPORTED,
        nvml.NVML_ERROR_FUNCTION_NOT_FOUND: Absence.NOT_SUPPORTED,
        nvml.NVML_ERROR_NO_PERMISSION: Absence.NO_PERMISSION,
        nvml.NVML_ERROR_NOT_FOUND: Absence.NOT_AVAILABLE,
        nvml.NVML_ERROR_INVALID_ARGUMENT: Absence.NOT_AVAILABLE,  # as for a link number that the part lacks
    }
    if error.value in known:
        return known[error.value]
    raise error  # the GPU is lost, needs a reset, or the driver is broken: never an ordinary absence


def _reading(answer: Any) -> Any:
    if isinstance(answer, bytes):
        answer = answer.decode()
    if answer == "N/A":
        return Absence.NOT_AVAILABLE
    return Absence.ALL_ONES if isinstance(answer, int) and answer in ALL_ONES else answer


def _text(nvml: Any, function: Callable[..., Any] | str, *arguments: object) -> Reading:
    answer = _get(nvml, function, *arguments)
    return answer if isinstance(answer, Absence) else str(answer)


def _device(nvml: Any, handle: Any, index: int) -> Device:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    pci = nvml.nvmlDeviceGetPciInfo(handle)
    capability = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Device(
        index=index,
        uuid=str(_reading(nvml.nvmlDeviceGetUUID(handle))),
        bdf=_bdf(str(_reading(pci.busId))),
        name=str(_reading(nvml.nvmlDeviceGetName(handle))),
        arch=f"sm_{capability[0]}{capability[1]}",
        compute_units=_multiprocessors(nvml, handle),
        memory_bytes=memory.total,
        memory_used_bytes=memory.used,
        pci_id=f"{pci.pciDeviceId & 0xFFFF:04x}:{pci.pciDeviceId >> 16:04x}",
        firmware=_firmware(nvml, handle),
        partition={"mig": _mig(nvml, handle)},
        pcie=_pcie(nvml, handle),
        ecc=_ecc(nvml, handle),
        throttle=_throttle(nvml, handle),
        power=_power(nvml, handle),
        clock_mhz=_get(nvml, "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
        max_clock_mhz=_get(nvml, "nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM),
        temperature_c=_get(nvml, "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
        processes=_processes(nvml, handle),
        numa_node=_numa_node(_bdf(str(_reading(pci.busId)))),
        recovery_action=_recovery(nvml, handle),
        fabric=_fabric(nvml, handle),
    )


def _bdf(bus_id: str) -> str:
    """NVML writes eight digits of domain, the kernel and torch four."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _multiprocessors(nvml: Any, handle: Any) -> Reading:
    """NVML counts CUDA cores; 128 of them make a multiprocessor from Ampere's sm_86 on, and 64 on sm_80."""
    cores = _get(nvml, "nvmlDeviceGetNumGpuCores", handle)
    if isinstance(cores, Absence):
        return cores
    capability = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return int(cores) // (64 if tuple(capability) in {(7, 0), (7, 5), (8, 0)} else 128)


def _firmware(nvml: Any, handle: Any) -> dict[str, Reading]:
    return {
        "vbios": _text(nvml, "nvmlDeviceGetVbiosVersion", handle),
        "inforom": _text(nvml, "nvmlDeviceGetInforomImageVersion", handle),
        "gsp": _text(nvml, "nvmlDeviceGetGspFirmwareVersion", handle),
    }


def _mig(nvml: Any, handle: Any) -> Reading:
    mode = _get(nvml, "nvmlDeviceGetMigMode", handle)
    if isinstance(mode, Absence):
        return mode
    return "disabled" if mode[0] == 0 else "enabled"


def _pcie(nvml: Any, handle: Any) -> PcieLink:
    return PcieLink(
        generation=_get(nvml, "nvmlDeviceGetCurrPcieLinkGeneration", handle),
        width=_get(nvml, "nvmlDeviceGetCurrPcieLinkWidth", handle),
        max_generation=_get(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle),
        max_width=_get(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle),
        replays=_get(nvml, "nvmlDeviceGetPcieReplayCounter", handle),
    )


def _ecc(nvml: Any, handle: Any) -> Ecc:
    mode = _get(nvml, "nvmlDeviceGetEccMode", handle)
    rows = _get(nvml, "nvmlDeviceGetRemappedRows", handle)
    remapped = [rows] * 4 if isinstance(rows, Absence) else list(rows)
    kinds = (nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
    volatile = nvml.NVML_VOLATILE_ECC
    counts = [_get(nvml, "nvmlDeviceGetTotalEccErrors", handle, kind, volatile) for kind in kinds]
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
    word = _get(nvml, call or "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    if isinstance(word, Absence):
        return Throttle(reading=word)
    return Throttle(
        unfit=tuple(name for bit, name in UNFIT_REASONS.items() if word & bit),
        normal=tuple(name for bit, name in NORMAL_REASONS.items() if word & bit),
        reading=f"{word:#x}",
    )


def _power(nvml: Any, handle: Any) -> Power:
    return Power(
        cap_w=_watts(_get(nvml, "nvmlDeviceGetEnforcedPowerLimit", handle)),
        default_cap_w=_watts(_get(nvml, "nvmlDeviceGetPowerManagementDefaultLimit", handle)),
        draw_w=_watts(_get(nvml, "nvmlDeviceGetPowerUsage", handle)),
    )


def _watts(milliwatts: Reading) -> Reading:
    return milliwatts if isinstance(milliwatts, Absence) else float(milliwatts) / 1000


def _processes(nvml: Any, handle: Any) -> tuple[Process, ...] | Absence:
    found = _get(nvml, "nvmlDeviceGetComputeRunningProcesses", handle)
    if isinstance(found, Absence):
        return found
    return tuple(
        Process(
            pid=process.pid,
            name=_text(nvml, "nvmlSystemGetProcessName", process.pid),
            memory_bytes=Absence.NO_PERMISSION if process.usedGpuMemory is None else process.usedGpuMemory,
        )
        for process in found
    )


def _numa_node(bdf: str) -> Reading:
    """From sysfs, which every driver release has; -1 means that the firmware told none."""
    try:
        node = int(Path(f"/sys/bus/pci/devices/{bdf}/numa_node").read_text())
    except OSError:
        return Absence.NOT_AVAILABLE
    return node if node >= 0 else Absence.NOT_AVAILABLE


def _recovery(nvml: Any, handle: Any) -> Reading:
    field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    if field is None:
        return Absence.NOT_SUPPORTED
    values = _get(nvml, "nvmlDeviceGetFieldValues", handle, [field])
    if isinstance(values, Absence):
        return values
    if values[0].nvmlReturn != nvml.NVML_SUCCESS:
        return Absence.NOT_SUPPORTED
    action = int(values[0].value.uiVal)
    return RECOVERY_ACTIONS.get(action, f"action {action}")


def _fabric(nvml: Any, handle: Any) -> Reading:
    """Only boards behind NVSwitch have one; an H200 without it says "not supported"."""
    if not hasattr(nvml, "c_nvmlGpuFabricInfo_t"):
        return Absence.NOT_SUPPORTED
    info = nvml.c_nvmlGpuFabricInfo_t()
    from ctypes import byref

    answer = _get(nvml, "nvmlDeviceGetGpuFabricInfo", handle, byref(info))
    if isinstance(answer, Absence):
        return answer
    if info.state == 0:
        return Absence.NOT_SUPPORTED
    state = FABRIC_STATES.get(info.state, f"state {info.state}")
    return state if info.status == 0 else f"{state}, status {info.status}"


@dataclass(frozen=True)
class _End:
    """One device's half of its links: read once and not for every pair."""

    handle: Any
    active: int
    errors: int


def _end(nvml: Any, handle: Any) -> _End:
    return _End(handle, _active_links(nvml, handle), _link_errors(nvml, handle))


def _link(nvml: Any, ends: Mapping[int, _End], a: int, b: int) -> Link:
    pair = ends[a].handle, ends[b].handle
    reads = _get(nvml, "nvmlDeviceGetP2PStatus", *pair, 0)  # READ; the constant is a tuple by mistake
    nvlink = _get(nvml, "nvmlDeviceGetP2PStatus", *pair, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    linked = nvlink == nvml.NVML_P2P_STATUS_OK
    return Link(
        a=a,
        b=b,
        kind=nvlink if isinstance(nvlink, Absence) else ("nvlink" if linked else "pcie"),
        active=min(ends[a].active, ends[b].active) if linked else 0,
        errors=ends[a].errors + ends[b].errors,
        p2p=reads if isinstance(reads, Absence) else reads == nvml.NVML_P2P_STATUS_OK,
    )


def _active_links(nvml: Any, handle: Any) -> int:
    return sum(_get(nvml, "nvmlDeviceGetNvLinkState", handle, link) == 1 for link in range(MAX_LINKS))


def _link_errors(nvml: Any, handle: Any) -> int:
    kinds = (nvml.NVML_NVLINK_ERROR_DL_REPLAY, nvml.NVML_NVLINK_ERROR_DL_RECOVERY)
    counts = (
        _get(nvml, "nvmlDeviceGetNvLinkErrorCounter", handle, link, kind)
        for link in range(MAX_LINKS)
        for kind in kinds
    )
    return sum(count for count in counts if isinstance(count, int))


def _sample(nvml: Any, handle: Any, index: int) -> Sample:
    throttle = _throttle(nvml, handle)
    return Sample(
        index=index,
        clock_mhz=_get(nvml, "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
        power_w=_watts(_get(nvml, "nvmlDeviceGetPowerUsage", handle)),
        temperature_c=_get(nvml, "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
        unfit=throttle.unfit,
        normal=throttle.normal,
    )


def _cuda_of_driver(nvml: Any) -> Reading:
    version = _get(nvml, "nvmlSystemGetCudaDriverVersion_v2")
    return version if isinstance(version, Absence) else f"{version // 1000}.{version % 1000 // 10}"


def _library_version() -> str:
    try:
        return importlib.metadata.version("nvidia-ml-py")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _visible(devices: Sequence[Device]) -> list[Device]:
    """What the user restricted this process to: NVML itself does not look at the variable."""
    chosen = os.environ.get(VISIBILITY)
    if chosen is None:
        return list(devices)
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    return [device for device in devices if _is_named(device, names)]


def _is_named(device: Device, names: Sequence[str]) -> bool:
    return any(
        name == str(device.index) or (name.startswith("GPU-") and device.uuid.startswith(name))
        for name in names
    )
