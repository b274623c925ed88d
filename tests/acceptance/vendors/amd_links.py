"""xGMI links between AMD GPUs as amdsmi reports them. In: the opened module, handles. Out: a `Link` for
a pair.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vendors import Absence, Device, Link, Reading, added, amd_kernel, is_known
from vendors.amd_library import ask, field, member, reading

# On MI300 and later, reading the error status fails (EINVAL; ROCm/rocm-systems#11468). Their link errors are
# the ones that RAS counts, and reading does not clear these.
COUNTED_BY_RAS = ("gfx94", "gfx95")
RAS_COUNTS = ("uncorrectable_count", "correctable_count")


@dataclass(frozen=True)
class End:
    """One device's side of its links, read once and not for every pair."""

    handle: Any
    node: amd_kernel.Node | None
    states: Mapping[str, Reading] | Absence  # peer's bus address -> "up", "down"
    errors: Reading
    errors_cleared: bool

    def state(self, peer: str) -> Reading:
        if isinstance(self.states, Absence):
            return self.states
        return self.states.get(peer, Absence.NOT_AVAILABLE)


def end(smi: Any, handle: Any, device: Device) -> End:
    """Read one device's side."""
    counted = device.arch.startswith(COUNTED_BY_RAS)
    errors = _ras_errors(smi, handle) if counted else _error_status(smi, handle)
    node = amd_kernel.node_of(device.bdf, device.part)
    return End(handle, node, _link_states(smi, handle), errors, errors_cleared=not counted)


def link(smi: Any, ends: Mapping[int, End], a: Device, b: Device) -> Link:
    """The link between two devices, from both sides."""
    one, other = ends[a.index], ends[b.index]
    states = [one.state(b.bdf), other.state(a.bdf)]
    known = [state for state in states if is_known(state)]
    return Link(
        a=a.index,
        b=b.index,
        kind="xgmi" if amd_kernel.are_linked(one.node, other.node) else _kind(smi, one.handle, other.handle),
        links=_count(smi, one.handle, other.handle),
        active="down" if "down" in known else known[0] if known else states[0],
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
    """The KFD gives one link's bandwidth as the least and that of all links as the most (kfd_crat.c); older
    drivers give 0 for both.
    """
    answer = ask(smi, "amdsmi_get_minmax_bandwidth_between_processors", one, other)
    least, most = (field(answer, f"{end}_bandwidth") for end in ("min", "max"))
    if not is_known(least) or not is_known(most):
        return least if isinstance(least, Absence) else most
    return round(int(most) / int(least)) if least and most else Absence.NOT_AVAILABLE


def _link_states(smi: Any, handle: Any) -> Mapping[str, Reading] | Absence:
    """Link states by peer: link i of the status is link i of the metrics, which has the peer's address."""
    status = ask(smi, "amdsmi_get_gpu_xgmi_link_status", handle)
    metrics = ask(smi, "amdsmi_get_link_metrics", handle)
    absent = [answer for answer in (status, metrics) if isinstance(answer, Absence)]
    if absent:
        return next((answer for answer in absent if answer.is_failure), Absence.NOT_SUPPORTED)
    words: Mapping[str, Reading] = {"U": "up", "D": "down", "X": Absence.NOT_AVAILABLE}
    pairs = zip(status["status"], metrics["links"], strict=False)
    return {str(link["bdf"]).lower(): words.get(letter, f"state {letter}") for letter, link in pairs}


def _ras_errors(smi: Any, handle: Any) -> Reading:
    """Errors of the links' RAS block; a correctable one is a bit error rate above its limit (mce_amd.c)."""
    counts = ask(smi, "amdsmi_get_gpu_ecc_count", handle, member(smi, "AmdSmiGpuBlock.XGMI_WAFL"))
    return added(*(field(counts, name) for name in RAS_COUNTS))


def _error_status(smi: Any, handle: Any) -> Reading:
    """0, 1 or 2 for no error, one, several: the kernel stores no more, and reading clears it."""
    answer = ask(smi, "amdsmi_gpu_xgmi_error_status", handle)
    if isinstance(answer, Absence):
        return answer
    names = ("NO_ERRORS", "ERROR", "MULTIPLE_ERRORS")
    found = [count for count, name in enumerate(names) if answer == member(smi, f"AmdSmiXgmiStatus.{name}")]
    return found[0] if found else f"status {answer}"
