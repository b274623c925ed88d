"""Whether readings of network cards show the fault that a check claims. In: evidence. Out: yes or no. Pure.

The suites name the port (tests/acceptance/harness/nics.py); this says only whether any port is as it claims.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
        or any(map(_differ, mates.values()))
        or any(map(_is_narrow, late.values()))
        or bool(early.keys() - late.keys())
        or any(_count_errors(early.get(name, {}), port) for name, port in late.items())
    )


def no_gpudirect(ways: object) -> bool:
    """Whether the host has none of the ways from a network card to the memory of GPUs."""
    return isinstance(ways, dict) and bool(ways) and all(there is False for there in ways.values())


def _ports(readings: object) -> dict[str, dict[str, Any]]:
    found = readings.items() if isinstance(readings, dict) else ()
    return {name: port for name, port in found if isinstance(port, dict)}


def _differ(ports: Iterable[Mapping[str, Any]]) -> bool:
    return any(len({str(port.get(name)) for port in ports}) > 1 for name in SHARED)


def _is_narrow(port: Mapping[str, Any]) -> bool:
    link = port.get("pcie")
    return isinstance(link, dict) and any(
        _number(link.get(name)) < _number(link.get(f"max_{name}")) for name in ("width", "speed")
    )


def _count_errors(early: Mapping[str, Any], late: Mapping[str, Any]) -> bool:
    before, after = early.get("errors"), late.get("errors")
    if not isinstance(after, dict):
        return False
    known = before if isinstance(before, dict) else {}
    return any(
        _number(count) > _number(known.get(name, count)) or count in AT_THE_END
        for name, count in after.items()
    )


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
