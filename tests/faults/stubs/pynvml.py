"""A stand-in for nvidia-ml-py: four healthy H200s, changed by the JSON in STACKCHECK_FAKE_NVML.

Keys: devices (count); cuda (of libcuda, 13000); init ("hang", "driver_not_loaded"); any field below for every device; and "one": the
same for device 0 only. A value "N/A" is returned unchanged; "not_supported" and "no_permission" are raised as
NVML's errors. "xid" is reported on device 2 to a listener.
"""

# ruff: noqa: E501, N801, N802, N816 - the names are NVML's own
import json
import os
import time
from ctypes import Structure, c_uint
from pathlib import Path
from types import SimpleNamespace

NVML_SUCCESS = 0
NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION = 2, 3, 4
NVML_ERROR_NOT_FOUND, NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_FUNCTION_NOT_FOUND = 6, 9, 13
NVML_ERROR_GPU_IS_LOST, NVML_ERROR_UNKNOWN = 15, 999
NVML_CLOCK_SM = 1
NVML_TEMPERATURE_GPU = 0
NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
NVML_VOLATILE_ECC = 0
NVML_P2P_CAPS_INDEX_NVLINK = 2
NVML_P2P_STATUS_OK = 0
NVML_NVLINK_ERROR_DL_REPLAY, NVML_NVLINK_ERROR_DL_RECOVERY = 0, 1
NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS = 215
NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW, NVML_GPU_FABRIC_HEALTH_MASK_WIDTH_DEGRADED_BW = 0, 3
NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_RECOVERY, NVML_GPU_FABRIC_HEALTH_MASK_WIDTH_ROUTE_RECOVERY = 2, 3
NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY, NVML_GPU_FABRIC_HEALTH_MASK_WIDTH_ROUTE_UNHEALTHY = 4, 3
NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION = 8
NVML_GPU_FABRIC_HEALTH_MASK_WIDTH_INCORRECT_CONFIGURATION = 15
NVML_ERROR_TIMEOUT, NVML_ERROR_NO_DATA = 10, 21
nvmlEventTypeXidCriticalError, nvmlEventTypeDoubleBitEccError = 8, 2

STATE = json.loads(os.environ.get("STACKCHECK_FAKE_NVML") or "{}")
HEALTHY = {
    "capability": [9, 0], "name": "NVIDIA H200", "pci_device_id": 0x233510DE, "cores": 16896,
    "memory": 143771 << 20, "used": 600 << 20, "vbios": "96.00.AA", "inforom": "G520", "gsp": "580.159.04",
    "mig": 0, "pcie_generation": 5, "pcie_max_generation": 5, "pcie_width": 16, "replays": 0, "ecc": 1, "corrected": 0, "uncorrected": 0,
    "remapped": [0, 0, 0, 0], "reasons": 0, "cap": 700000, "default_cap": 700000, "power": 120000, "clock": 1980,
    "temperature": 35, "processes": [], "process_name": "python3", "process_memory": 1 << 30, "processes_late": [], "used_late": 0, "recovery": 0, "fabric_state": 3, "fabric_status": 0, "fabric_health": 0x1AA, "links": 18,
    "p2p_read": 0, "p2p_nvlink": 0, "uncorrected_late": 0, "recovering": 0, "replaying": 0, "event_types": 10, "link_counters": 1,
}  # fmt: skip
ERRORS = {
    "not_supported": NVML_ERROR_NOT_SUPPORTED, "no_permission": NVML_ERROR_NO_PERMISSION,
    "lost": NVML_ERROR_GPU_IS_LOST, "no_data": NVML_ERROR_NO_DATA, "unknown": NVML_ERROR_UNKNOWN,
}  # fmt: skip


class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(f"NVML error {value}")
        self.value = value


class c_nvmlGpuFabricInfo_t(Structure):
    _fields_ = (("state", c_uint), ("status", c_uint))


class c_nvmlGpuFabricInfoV_t(Structure):
    _fields_ = (("state", c_uint), ("status", c_uint), ("healthMask", c_uint))


def value(handle, key):
    found = {**HEALTHY, **STATE, **(STATE.get("one", {}) if handle == 0 else {})}[key]
    if isinstance(found, str) and found in ERRORS:
        raise NVMLError(ERRORS[found])
    return found


def nvmlInit():
    if STATE.get("init") == "hang":
        time.sleep(3600)
    if STATE.get("init") == "driver_not_loaded":
        raise NVMLError(NVML_ERROR_DRIVER_NOT_LOADED)


def nvmlDeviceGetCount():
    return STATE.get("devices", 4)


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlSystemGetDriverVersion():
    return STATE.get("driver", "580.159.04")


def nvmlSystemGetCudaDriverVersion_v2():
    return STATE.get("cuda", 13000)


def nvmlDeviceGetMemoryInfo(handle):
    used = "used_late" if value(handle, "used_late") and is_late() else "used"
    return SimpleNamespace(total=value(handle, "memory"), used=value(handle, used), free=0)


def nvmlDeviceGetPciInfo(handle):
    return SimpleNamespace(
        busId=f"00000000:{0x1B + handle:02X}:00.0", pciDeviceId=value(handle, "pci_device_id")
    )


def nvmlDeviceGetUUID(handle):
    return f"GPU-00000000-0000-0000-0000-{handle:012d}"


def nvmlDeviceGetMigMode(handle):
    return [value(handle, "mig")] * 2


def nvmlDeviceGetEccMode(handle):
    return [value(handle, "ecc")] * 2


def nvmlDeviceGetTotalEccErrors(handle, kind, _counter):
    if kind != NVML_MEMORY_ERROR_TYPE_UNCORRECTED:
        return value(handle, "corrected")
    return value(handle, "uncorrected") or late(handle)


def late(handle):
    count = value(handle, "uncorrected_late")
    return count if count and is_late() else 0


def is_late():
    """Not in the first process that asks, which reads the host before the run."""
    first = Path(os.environ["STACKCHECK_FAKE_FOLDER"]) / "first-reader"
    if not first.exists():
        first.write_text(str(os.getpid()))
    return first.read_text() != str(os.getpid())


def nvmlDeviceGetComputeRunningProcesses(handle):
    late = value(handle, "processes_late")
    pids = value(handle, "processes") + (late if late and is_late() else [])
    return [SimpleNamespace(pid=pid, usedGpuMemory=value(handle, "process_memory")) for pid in pids]


def nvmlSystemGetProcessName(_pid):
    return value(0, "process_name")


def nvmlDeviceGetFieldValues(handle, fields):
    if fields[0] != NVML_FI_DEV_GET_GPU_RECOVERY_ACTION:  # NVLink 5: (field, link)
        moving = value(handle, "recovering")
        counts = [int(time.monotonic() * 1000) if moving and link == 3 else 0 for _, link in fields]
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=count)) for count in counts]
    return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=value(handle, "recovery")))]


def nvmlDeviceGetGpuFabricInfo(handle, reference):
    reference._obj.state = value(handle, "fabric_state")
    reference._obj.status = value(handle, "fabric_status")


def nvmlDeviceGetGpuFabricInfoV(handle, reference):
    nvmlDeviceGetGpuFabricInfo(handle, reference)
    reference._obj.healthMask = value(handle, "fabric_health")


def nvmlDeviceGetP2PStatus(a, b, cap):
    return max(
        value(handle, "p2p_nvlink" if cap == NVML_P2P_CAPS_INDEX_NVLINK else "p2p_read") for handle in (a, b)
    )


def nvmlDeviceGetNvLinkState(handle, link):
    return int(link < value(handle, "links"))


def nvmlDeviceGetNvLinkErrorCounter(handle, link, kind):
    value(handle, "link_counters")
    moving = value(handle, "recovering" if kind == NVML_NVLINK_ERROR_DL_RECOVERY else "replaying")
    return int(time.monotonic() * 1000) if moving and link == 3 else 0


def nvmlEventSetCreate():
    return {"waited": 0}


def nvmlDeviceGetSupportedEventTypes(handle):
    return value(handle, "event_types")


def nvmlDeviceRegisterEvents(_handle, _types, _set):
    return None


def nvmlDeviceGetIndex(handle):
    return handle


def nvmlEventSetWait_v2(events, timeout_ms):
    events["waited"] += 1
    xid = STATE.get("xid")
    if xid is None or events["waited"] != 1:
        time.sleep(min(timeout_ms / 1000, 0.05))  # at its end a run waits for this call to return
        raise NVMLError(NVML_ERROR_TIMEOUT)
    if xid == "lost":
        raise NVMLError(NVML_ERROR_GPU_IS_LOST)
    return SimpleNamespace(device=2, eventType=nvmlEventTypeXidCriticalError, eventData=xid)


def nvmlDeviceGetClockInfo(handle, _kind):
    return value(handle, "clock")


def nvmlDeviceGetMaxClockInfo(_handle, _kind):
    return 1980


def nvmlDeviceGetTemperature(handle, _sensor):
    return value(handle, "temperature")


def _reader(key):
    return lambda handle: value(handle, key)


nvmlDeviceGetName = _reader("name")
nvmlDeviceGetCudaComputeCapability = _reader("capability")
nvmlDeviceGetNumGpuCores = _reader("cores")
nvmlDeviceGetVbiosVersion = _reader("vbios")
nvmlDeviceGetInforomImageVersion = _reader("inforom")
nvmlDeviceGetGspFirmwareVersion = _reader("gsp")
nvmlDeviceGetCurrPcieLinkGeneration = _reader("pcie_generation")
nvmlDeviceGetMaxPcieLinkGeneration = _reader("pcie_max_generation")
nvmlDeviceGetCurrPcieLinkWidth = nvmlDeviceGetMaxPcieLinkWidth = _reader("pcie_width")
nvmlDeviceGetPcieReplayCounter = _reader("replays")


def nvmlDeviceGetRemappedRows(handle):
    late = "remapped_late" in STATE and is_late()
    return value(handle, "remapped_late" if late else "remapped")


nvmlDeviceGetCurrentClocksEventReasons = _reader("reasons")
nvmlDeviceGetEnforcedPowerLimit = _reader("cap")
nvmlDeviceGetPowerManagementDefaultLimit = _reader("default_cap")
nvmlDeviceGetPowerUsage = _reader("power")
