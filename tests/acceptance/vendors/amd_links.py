"""xGMI links between AMD GPUs as amdsmi reports them. In: the opened module, handles.
Out: a `Link` for a pair.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from vendors import Absence, Device, Link, Reading, added, amd_kernel, is_known
from vendors.amd_library import ask, counter, field, member, reading

# On MI300 and later, reading the error status fails (EINVAL; ROCm/rocm-systems#11468). Their link errors are
# the ones that RAS counts, and reading does not clear these.
COUNTED_BY_RAS = ("gfx94", "gfx95")
RAS_COUNTS = ("uncorrectable_count", "correctable_count")


@dataclass(frozen=True)
class End:
    """One device's side of its links, read once and not for every pair."""

    handle: Any
    node: amd_kernel.Node | None
    states: tuple[str, ...] | Absence  # "U", "D" or "X" of each link, in no order that names a peer
    errors: Reading
    errors_cleared: bool

    def misses_one(self, peers: int) -> bool:
        """Whether a link of this device is down, or fewer are up than it has peers."""
        return "D" in self.states or list(self.states).count("U") < peers


def end(smi: Any, handle: Any, device: Device) -> End:
    """Read one device's side."""
    counted = device.arch.startswith(COUNTED_BY_RAS)
    if counted:  # of the links' RAS block; a correctable one is a bit error rate above its limit (mce_amd.c)
        counts = ask(smi, "amdsmi_get_gpu_ecc_count", handle, member(smi, "AmdSmiGpuBlock.XGMI_WAFL"))
    errors = added(*(counter(counts, name) for name in RAS_COUNTS)) if counted else _error_status(smi, handle)
    node = amd_kernel.node_of(device.bdf, device.part)
    return End(handle, node, _link_states(smi, handle), errors, errors_cleared=not counted)


def link(smi: Any, ends: Mapping[int, End], short: Collection[int], a: Device, b: Device) -> Link:
    """The link between two devices, from both sides; `short` has the devices that miss a link."""
    one, other = ends[a.index], ends[b.index]
    return Link(
        a=a.index,
        b=b.index,
        kind="xgmi" if amd_kernel.are_linked(one.node, other.node) else _kind(smi, one.handle, other.handle),
        links=_count(smi, one.handle, other.handle),
        active=_active(one, other, {a.index, b.index} & set(short), alone=len(short) == 1),
        errors=added(one.errors, other.errors),
        errors_cleared=one.errors_cleared or other.errors_cleared,
        p2p=reading(ask(smi, "amdsmi_is_P2P_accessible", one.handle, other.handle)),
    )


def _kind(smi: Any, one: Any, other: Any) -> Reading:
    answer = ask(smi, "amdsmi_topo_get_link_type", one, other)
    if isinstance(answer, Absence):
        return answer
    kinds = {
        member(smi, "AmdSmiLinkType.AMDSMI_LINK_TYPE_XGMI", "AmdSmiIoLinkType.XGMI"): "xgmi",
        member(smi, "AmdSmiLinkType.AMDSMI_LINK_TYPE_PCIE", "AmdSmiIoLinkType.PCIEXPRESS"): "pcie",
    }
    kind = answer["type"]
    return kinds.get(getattr(kind, "value", kind), f"type {kind}")  # 7.0.2 returns a raw ctypes object


def _count(smi: Any, one: Any, other: Any) -> Reading:
    """The KFD gives one link's bandwidth as the least and that of all links as the most (kfd_crat.c).
    Older drivers give 0 for both.
    """
    answer = ask(smi, "amdsmi_get_minmax_bandwidth_between_processors", one, other)
    least, most = (field(answer, f"{end}_bandwidth") for end in ("min", "max"))
    if not is_known(least) or not is_known(most):
        return least if isinstance(least, Absence) else most
    return round(int(most) / int(least)) if least and most else Absence.NOT_AVAILABLE


def short_of_links(ends: Mapping[int, End]) -> frozenset[int]:
    """The devices that have a link down, or fewer links up than they have peers.

    No release tells which peer a link leads to: 7.0 leaves the addresses of `amdsmi_get_link_metrics` empty,
    and later ones list them in an order that differs from that of the states, unless the kernel has "Use
    external link order for xgmi data" (May 2025). But a link that is down is down at both ends: so it is that
    of two devices that each miss one. A device that misses one alone may lack any of its links.
    """
    return frozenset(
        index
        for index, end in ends.items()
        if not isinstance(end.states, Absence)
        and end.misses_one(sum(amd_kernel.are_linked(end.node, other.node) for other in ends.values()))
    )


def _active(one: End, other: End, short: Collection[int], *, alone: bool) -> Reading:
    """Whether the pair's link is up: not where both miss a link, nor where one does and no other device."""
    if len(short) == len((one, other)) or (short and alone):
        return "down"
    absent = [end.states for end in (one, other) if isinstance(end.states, Absence)]
    return next((state for state in absent if state.is_failure), absent[0]) if absent else "up"


def _link_states(smi: Any, handle: Any) -> tuple[str, ...] | Absence:
    """The state of each link; all are unreadable where the library knows no state."""
    answer = ask(smi, "amdsmi_get_gpu_xgmi_link_status", handle)
    if isinstance(answer, Absence):
        return answer
    states = tuple(str(letter) for letter in answer["status"])
    return states if {"U", "D"} & set(states) else Absence.NOT_AVAILABLE


def _error_status(smi: Any, handle: Any) -> Reading:
    """0, 1 or 2 for no error, one, several: the kernel stores no more, and reading clears it."""
    answer = ask(smi, "amdsmi_gpu_xgmi_error_status", handle)
    if isinstance(answer, Absence):
        return answer
    names = ("NO_ERRORS", "ERROR", "MULTIPLE_ERRORS")
    found = [count for count, name in enumerate(names) if answer == member(smi, f"AmdSmiXgmiStatus.{name}")]
    return found[0] if found else f"status {answer}"
