"""The switch fabric of one NVIDIA GPU as NVML sees it. In: the opened library. Out: its state in words."""

from collections.abc import Iterator
from ctypes import byref
from typing import Any

from vendors import Absence, Reading
from vendors.nvidia_library import ask

STATES = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}
# Fields of the health mask: words -> name in the library; 1 is true, 2 is false, 0 is not told.
FAULTS = {
    "degraded bandwidth": "DEGRADED_BW",
    "route recovery": "ROUTE_RECOVERY",
    "route unhealthy": "ROUTE_UNHEALTHY",
    "access timeout recovery": "ACCESS_TIMEOUT_RECOVERY",
}
CONFIGURATION = "INCORRECT_CONFIGURATION"  # 1 is none, more is a kind of it


def fabric(nvml: Any, handle: Any) -> Reading:
    """Only boards behind NVSwitch have one; an H200 without it says "not supported"."""
    info = _info(nvml, handle)
    if isinstance(info, Absence):
        return info
    if info.state == 0:
        return Absence.NOT_SUPPORTED
    state = STATES.get(info.state, f"state {info.state}")
    wrong = [] if info.status == 0 else [f"status {info.status}"]
    return ", ".join([state, *wrong, *_unhealthy(nvml, getattr(info, "healthMask", 0))])


def _info(nvml: Any, handle: Any) -> Any:
    """With the health mask where library and driver have it."""
    answer: Any = Absence.NOT_SUPPORTED
    for version in ("V", ""):
        structure = getattr(nvml, f"c_nvmlGpuFabricInfo{version}_t", None)
        if structure is None:
            continue
        info = structure()
        answer = ask(nvml, f"nvmlDeviceGetGpuFabricInfo{version}", handle, byref(info))
        if not isinstance(answer, Absence):
            return info
    return answer


def _unhealthy(nvml: Any, mask: int) -> Iterator[str]:
    yield from (words for words, name in FAULTS.items() if _field(nvml, mask, name) == 1)
    kind = _field(nvml, mask, CONFIGURATION)
    if kind > 1:
        yield f"incorrect configuration {kind}"


def _field(nvml: Any, mask: int, name: str) -> int:
    """0 where the release does not know the field."""
    prefix = "NVML_GPU_FABRIC_HEALTH_MASK"
    width = getattr(nvml, f"{prefix}_WIDTH_{name}", 0)
    return mask >> getattr(nvml, f"{prefix}_SHIFT_{name}", 0) & width
