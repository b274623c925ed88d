"""NVLink between NVIDIA GPUs, and their switch fabric. In: NVML. Out: a pair's `Link`, a fabric's state."""

from collections.abc import Iterator, Mapping
from ctypes import byref
from dataclasses import dataclass
from typing import Any

from vendors import Absence, Link, Reading, added
from vendors.nvidia_library import ask

MAX_LINKS = 18
STATES = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}
# Fields of the health mask: text -> name in the library; 1 is true, 2 is false, 0 is not reported.
FAULTS = {
    "degraded bandwidth": "DEGRADED_BW",
    "route recovery": "ROUTE_RECOVERY",
    "route unhealthy": "ROUTE_UNHEALTHY",
    "access timeout recovery": "ACCESS_TIMEOUT_RECOVERY",
}
CONFIGURATION = "INCORRECT_CONFIGURATION"  # 1 is correct, more is a kind of incorrect


@dataclass(frozen=True)
class End:
    """One device's side of its links, read once and not for every pair."""

    handle: Any
    active: int
    errors: Reading  # how often a link had to be trained again
    replays: Reading  # packets sent again: that costs time, but no data


def end(nvml: Any, handle: Any) -> End:
    """Read one device's side."""
    return End(
        handle=handle,
        active=sum(ask(nvml, "nvmlDeviceGetNvLinkState", handle, at) == 1 for at in range(MAX_LINKS)),
        errors=_recoveries(nvml, handle),
        replays=_count(nvml, handle, nvml.NVML_NVLINK_ERROR_DL_REPLAY),
    )


def link(nvml: Any, ends: Mapping[int, End], a: int, b: int) -> Link:
    """The link between two devices, from both sides."""
    pair = ends[a].handle, ends[b].handle
    # 0 is READ; the library's constant is a tuple by mistake.
    reads = ask(nvml, "nvmlDeviceGetP2PStatus", *pair, 0)
    nvlink = ask(nvml, "nvmlDeviceGetP2PStatus", *pair, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    linked = nvlink == nvml.NVML_P2P_STATUS_OK
    return Link(
        a=a,
        b=b,
        kind=nvlink if isinstance(nvlink, Absence) else ("nvlink" if linked else "pcie"),
        active=min(ends[a].active, ends[b].active) if linked else 0,
        errors=added(ends[a].errors, ends[b].errors),
        replays=added(ends[a].replays, ends[b].replays),
        p2p=reads if isinstance(reads, Absence) else reads == nvml.NVML_P2P_STATUS_OK,
    )


def _count(nvml: Any, handle: Any, kind: int) -> Reading:
    """The sum over the links that the device has; an error if one of them could not be read."""
    counts = [ask(nvml, "nvmlDeviceGetNvLinkErrorCounter", handle, link, kind) for link in range(MAX_LINKS)]
    failed = [count for count in counts if isinstance(count, Absence) and count.is_failure]
    known = [count for count in counts if not isinstance(count, Absence)]
    return failed[0] if failed else sum(known) if known else counts[0]


def _recoveries(nvml: Any, handle: Any) -> Reading:
    """How often links were trained again.
    NVLink 5 (B200) counts that in a field of each link (nvml.h), and refuses the counters of earlier
    generations.
    """
    counted = _count(nvml, handle, nvml.NVML_NVLINK_ERROR_DL_RECOVERY)
    field = getattr(nvml, "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS", None)
    if counted != Absence.NOT_SUPPORTED or field is None:
        return counted
    values = ask(nvml, "nvmlDeviceGetFieldValues", handle, [(field, link) for link in range(MAX_LINKS)])
    if isinstance(values, Absence):
        return values
    read = [int(one.value.ullVal) for one in values if one.nvmlReturn == nvml.NVML_SUCCESS]
    return sum(read) if read else counted


def fabric(nvml: Any, handle: Any) -> Reading:
    """The fabric's state in words.
    Only boards behind NVSwitch have a fabric; an H200 without one is not supported.
    """
    info = _info(nvml, handle)
    if isinstance(info, Absence):
        return info
    if info.state == 0:
        return Absence.NOT_SUPPORTED
    state = STATES.get(info.state, f"state {info.state}")
    wrong = [] if info.status == 0 else [f"status {info.status}"]
    return ", ".join([state, *wrong, *_unhealthy(nvml, getattr(info, "healthMask", 0))])


def _info(nvml: Any, handle: Any) -> Any:
    """The fabric's record, with the health mask if library and driver have it."""
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
    """The value of a field; 0 if the release does not know it."""
    prefix = "NVML_GPU_FABRIC_HEALTH_MASK"
    width = getattr(nvml, f"{prefix}_WIDTH_{name}", 0)
    return mask >> getattr(nvml, f"{prefix}_SHIFT_{name}", 0) & width
