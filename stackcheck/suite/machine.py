"""Whether the telemetry of a check shows the unfit machine that it claims. In: a check. Out: a problem.

UNFIT says that a run tells nothing about the image, so it needs evidence about the machine: throttling,
another process, a lowered power cap, a link that is down. A check that ends `invalid` names such states, and
the readings beside it have to show them; else it counts as failed. The image wrote the readings: where this
host can see the same part by itself (`seen`), the two have to agree. Pure.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from stackcheck.suite.results import CheckResult, MachineFinding
from stackcheck.vendors.seen import Seen

NO_EVIDENCE = "it names no state of the machine, so it counts as failed"
# Our own processes are gone when the devices are read beside a figure; a driver keeps less than this.
OWN_BYTES = 2 << 30
# What a device returns that fell off its bus. Other errors can come from the image's own library.
GONE = ("all ones", "GPU_IS_LOST", "RESET_REQUIRED", "NO_RESPONSE")

# The reports of a driver that no program causes, by their beginning: the suites' vendors/*_events.py.
XIDS = (48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 145)
MACHINE_FAULTS = (
    *(f"Xid {number}:" for number in XIDS),
    *("uncorrectable ECC error", "a memory row could not be remapped", "fatal poison error", "poison error"),
    *("the GPU is unavailable", "thermal throttling", "the GPU is being reset", "the GPU was reset"),
)
OLDER_SLOT = "pcie_generation"  # the condition of host copies, where the slot is older than the device
MEMORY_SHARE = 0.98  # of the nominal size; ECC and the driver reserve the rest
CLOCKS_SET = "application clocks"  # a setting that holds the clocks down

Readings = dict[str, Any]


def problem(
    check: CheckResult, rows: Sequence[Mapping[str, Any]] = (), seen: Seen | None = None
) -> str | None:
    """Why an invalid check is not accepted as UNFIT; None if its telemetry shows each state it names.

    Args:
        check: The check, as the image wrote it.
        rows: The rows of devices.json for this host's devices, in their order: lanes, memory, PCIe.
        seen: What this host itself saw of its devices; None: the run was on another host.
    """
    if not check.machine:
        return NO_EVIDENCE
    for found in check.machine:
        if not (_is_shown(found, check, rows) and _agrees(found, seen, rows)):
            where = "the machine" if found.device is None else f"device {found.device}"
            return f"no reading shows {found.kind!r} on {where}, so it counts as failed"
    return None


def _is_shown(found: MachineFinding, check: CheckResult, rows: Sequence[Mapping[str, Any]]) -> bool:
    row: Mapping[str, Any] = rows[0] if rows else {}  # all devices are of one model
    after, states = check.evidence.after, list(_states(check, found.device))
    shown = {
        "link": lambda: _links_are_bad(check, _lanes(rows)),
        "firmware": lambda: _firmware_differs(check),
        "pcie": lambda: _is_narrow(_at(after, "pcie", str(found.device)), row),
        "short memory": lambda: any(_is_short(state.get("memory_bytes"), row) for state in states),
        "driver fault": lambda: _faults_are_the_machines(check, found.device),
        "nic": lambda: nics_are_bad(check.evidence.before.get("nics"), after.get("nics")),
        "gpudirect": lambda: no_gpudirect(after.get("gpudirect")),
        "missing device": lambda: bool(_list(after.get("missing"))),
        "throttled": lambda: _was_throttled(check, found.device) or _grew(states, "throttled"),
        "clocks": lambda: CLOCKS_SET in _list(_at(after, "during").get("throttle")),
        "memory errors": lambda: _grew(states, "memory errors"),
    }
    state_shows = _SHOWN.get(found.kind, lambda _state: False)
    return any(map(state_shows, states)) or (found.kind in shown and shown[found.kind]())


def _states(check: CheckResult, device: int | None) -> Iterator[Readings]:
    """The readings of a device: at the start of the run, before the check and after it; of all for None."""
    before, after = check.evidence.before, check.evidence.after
    for readings in (_at(after, "start"), before, after):
        for index, state in readings.items():
            if isinstance(state, dict) and index.isdecimal() and (device is None or index == str(device)):
                yield state


def _at(readings: Mapping[str, Any], *path: str) -> Readings:
    """A part of the readings; empty if the image left it out or wrote something else."""
    for name in path:
        readings = readings.get(name) or {}
        if not isinstance(readings, dict):
            return {}
    return dict(readings)


def _was_throttled(check: CheckResult, device: int | None) -> bool:
    """Whether a sample that was taken during the check shows throttling."""
    during = _at(check.evidence.after, "during", "unfit")
    return any(during.values()) if device is None else bool(during.get(str(device)))


def _grew(states: list[Readings], kind: str) -> bool:
    """Whether a counter grew from one reading to the next."""
    counters = [_at(state, "accumulators") if kind == "throttled" else _errors(state) for state in states]
    return any(
        _is_number(early.get(name)) and _is_number(late[name]) and late[name] > early[name]
        for early, late in itertools.pairwise(counters)
        for name in late
    )


def _errors(state: Readings) -> Readings:
    return {name: state.get(name) for name in ("uncorrectable", "pending", "failed")}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _above(value: object, limit: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > limit


def _has_errors(state: Readings) -> bool:
    return state.get("enabled") is False or any(_above(count, 0) for count in _errors(state).values())


def _is_shared(state: Readings) -> bool:
    processes = state.get("processes")
    occupied = isinstance(processes, list) and bool(processes)
    return occupied or _above(state.get("memory_used_bytes"), OWN_BYTES)


def _is_capped(state: Readings) -> bool:
    cap, default = state.get("power_cap_w"), state.get("power_cap_default_w")
    return _is_number(cap) and _is_number(default) and float(cap) < float(default)  # type: ignore[arg-type]


def _is_partitioned(state: Readings) -> bool:
    """Whether a device is in a mode that differs from the one that every bound assumes."""
    usual = {"mig": "disabled", "compute": "SPX", "memory": "NPS1"}
    partition = _at(state, "partition")
    return any(partition.get(name, mode) != mode for name, mode in usual.items())


def _does_not_answer(state: Readings) -> bool:
    values = (*state.values(), *_at(state, "accumulators").values())
    return any(isinstance(value, str) and any(code in value for code in GONE) for value in values)


def _asks_for_recovery(state: Readings) -> bool:
    action = state.get("recovery_action")
    return isinstance(action, str) and action in {"reset", "reboot", "drain peer-to-peer", "drain and reset"}


def _fabric_is_down(state: Readings) -> bool:
    fabric = state.get("fabric")
    return isinstance(fabric, str) and fabric not in {"completed", "N/A", "not supported", "no permission"}


_SHOWN: dict[str, Callable[[Readings], bool]] = {
    "throttled": lambda state: bool(state.get("unfit")),
    "memory errors": _has_errors,
    "shared": _is_shared,
    "power cap": _is_capped,
    "clocks": lambda state: CLOCKS_SET in _list(state.get("normal")),
    "partition": _is_partitioned,
    "recovery": _asks_for_recovery,
    "fabric": _fabric_is_down,
    "no answer": _does_not_answer,
}


def _agrees(found: MachineFinding, seen: Seen | None, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether what this host saw agrees with a claim about a part that it can see without a load."""
    if seen is None:
        return True
    if found.kind == "missing device":
        return bool(seen.unlisted)
    number = -1 if found.device is None else found.device
    if found.kind == "short memory":
        return any(_is_short(held, rows[0]) for held in seen.memory_bytes[number : number + 1])
    if found.kind == "pcie":  # where the kernel does not show a link, there is nothing to compare
        return all(
            link is None or _is_narrow(vars(link), rows[0]) for link in seen.links[number : number + 1]
        )
    return True


def slot_problem(conditions: Mapping[str, Any], seen: Seen | None) -> str | None:
    """Why the bound of an older slot is not accepted for a figure; None if it is, or there is no claim."""
    claimed = conditions.get(OLDER_SLOT)
    known = [link.max_generation for link in seen.links if link] if seen else []
    if claimed is None or not known or (_is_number(claimed) and claimed >= min(known)):
        return None
    return f"is judged as in a slot of PCIe generation {claimed}, and this host has generation {min(known)}"


def _is_short(held: object, row: Mapping[str, Any]) -> bool:
    """Whether a device has less memory than its model."""
    return _is_number(held) and bool(row) and float(held) < MEMORY_SHARE * row["memory_bytes"]  # type: ignore[arg-type]


def _is_narrow(link: Readings, row: Mapping[str, Any]) -> bool:
    """Whether a link to the host has too few lanes, or is slower than device and slot can be."""
    wanted, most = row.get("pcie"), link.get("max_generation")
    if not wanted:
        return False
    shared = min(wanted["generation"], most) if _is_number(most) else wanted["generation"]
    width, generation = link.get("width"), link.get("generation")
    return (_is_number(width) and float(width) < wanted["width"]) or (  # type: ignore[arg-type]
        _is_number(generation) and float(generation) < shared  # type: ignore[arg-type]
    )


def _faults_are_the_machines(check: CheckResult, device: int | None) -> bool:
    """Whether the driver reported a fault of this device, and none in the run that a program can cause."""
    faults = [fault for fault in _list(check.evidence.after.get("faults")) if isinstance(fault, dict)]
    named = [fault for fault in faults if fault.get("index") == (-1 if device is None else device)]
    return bool(named) and all(str(fault.get("what")).startswith(MACHINE_FAULTS) for fault in faults)


def _firmware_differs(check: CheckResult) -> bool:
    versions = [_at(state, "firmware") for state in _states(check, None)]
    return any(one != versions[0] for one in versions)


def _lanes(rows: Sequence[Mapping[str, Any]]) -> int:
    """How many lanes of a link must be up: every one to a switch; one to each neighbour in a direct mesh."""
    links = [row.get("link") or {} for row in rows]
    return max((int(link["links"]) for link in links if link.get("kind") == "nvlink"), default=1)


def _links_are_bad(check: CheckResult, lanes: int) -> bool:
    """Whether a link is down, is of another kind, has fewer lanes than it should or errors."""
    start, before = _at(check.evidence.after, "start", "links"), _at(check.evidence.before, "links")
    late = _at(check.evidence.after, "links")
    links = [link for link in (*start.values(), *before.values(), *late.values()) if isinstance(link, dict)]
    grew = any(
        _is_number(_at(before, pair).get(name)) and _above(_at(late, pair).get(name), _at(before, pair)[name])
        for pair in late
        for name in ("errors", "replays")
    )
    return grew or any(_is_down(link, lanes) for link in links) or _are_unlike(links)


def _is_down(link: Readings, lanes: int) -> bool:
    active = link.get("active")
    few = active == "down" or (_is_number(active) and not _above(active, lanes - 1))
    # Where each reading clears the counts, any error is a new one.
    failed = link.get("errors_cleared") is True and _above(link.get("errors"), 0)
    return few or failed or link.get("kind") == "pcie"


def _are_unlike(links: list[Readings]) -> bool:
    return len({(str(link.get("kind")), str(link.get("active"))) for link in links}) > 1


SHARED = ("state", "rate", "lanes", "mtu")  # alike on all ports of equal cards
AT_THE_END = {0xF, 0xFF, 0xFFFF, 0xFFFFFFFF}  # of a counter that counts no further


def nics_are_bad(before: object, after: object) -> bool:
    """Whether a port is down, unlike its mates, behind a narrow slot, gone, or counts errors."""
    early, late = _ports(before), _ports(after)
    mates = defaultdict(list)
    for port in late.values():
        mates[str(port.get("kind"))].append(port)
    none_up = bool(late) and all(port.get("state") != "ACTIVE" for port in late.values())
    return (
        none_up
        or any(map(_ports_differ, mates.values()))
        or any(map(_is_narrow_port, late.values()))
        or bool(early.keys() - late.keys())
        or any(_count_errors(early.get(name, {}), port) for name, port in late.items())
    )


def no_gpudirect(ways: object) -> bool:
    """Whether the host has none of the ways from a network card to the memory of GPUs."""
    return isinstance(ways, dict) and bool(ways) and all(there is False for there in ways.values())


def _ports(readings: object) -> dict[str, dict[str, Any]]:
    found = readings.items() if isinstance(readings, dict) else ()
    return {name: port for name, port in found if isinstance(port, dict)}


def _ports_differ(ports: Iterable[Mapping[str, Any]]) -> bool:
    return any(len({str(port.get(name)) for port in ports}) > 1 for name in SHARED)


def _is_narrow_port(port: Mapping[str, Any]) -> bool:
    link = port.get("pcie")
    return isinstance(link, dict) and any(
        _count_of(link.get(name)) < _count_of(link.get(f"max_{name}")) for name in ("width", "speed")
    )


def _count_errors(early: Mapping[str, Any], late: Mapping[str, Any]) -> bool:
    before, after = early.get("errors"), late.get("errors")
    if not isinstance(after, dict):
        return False
    known = before if isinstance(before, dict) else {}
    return any(
        _count_of(count) > _count_of(known.get(name, count)) or count in AT_THE_END
        for name, count in after.items()
    )


def _count_of(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
