"""NVLink between NVIDIA GPUs as NVML sees it. In: the opened library. Out: a `Link` for a pair."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vendors import Absence, Link, Reading, added
from vendors.nvidia_library import ask

MAX_LINKS = 18


@dataclass(frozen=True)
class End:
    """One device's half of its links: read once and not for every pair."""

    handle: Any
    active: int
    errors: Reading  # times that a link had to be trained again
    replays: Reading  # packets sent again, which costs time and no data


def end(nvml: Any, handle: Any) -> End:
    """Read one device's half."""
    return End(
        handle=handle,
        active=_active_links(nvml, handle),
        errors=_count(nvml, handle, nvml.NVML_NVLINK_ERROR_DL_RECOVERY),
        replays=_count(nvml, handle, nvml.NVML_NVLINK_ERROR_DL_REPLAY),
    )


def link(nvml: Any, ends: Mapping[int, End], a: int, b: int) -> Link:
    """Join two halves."""
    pair = ends[a].handle, ends[b].handle
    reads = ask(nvml, "nvmlDeviceGetP2PStatus", *pair, 0)  # READ; the constant is a tuple by mistake
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


def _active_links(nvml: Any, handle: Any) -> int:
    return sum(ask(nvml, "nvmlDeviceGetNvLinkState", handle, link) == 1 for link in range(MAX_LINKS))


def _count(nvml: Any, handle: Any, kind: int) -> Reading:
    """The sum over the links that a part has."""
    counts = [ask(nvml, "nvmlDeviceGetNvLinkErrorCounter", handle, link, kind) for link in range(MAX_LINKS)]
    failed = [count for count in counts if isinstance(count, Absence) and count.is_failure]
    known = [count for count in counts if not isinstance(count, Absence)]
    return failed[0] if failed else sum(known) if known else counts[0]
