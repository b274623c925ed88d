"""Network cards for RDMA: what the kernel says of each port, and what is wrong. In: /sys. Out: faults.

The layout is /sys/class/infiniband of the kernel's Documentation/ABI/stable/sysfs-class-infiniband; RoCE and
EFA are there too. A port is held to its mates, the ports of equal cards: nothing in /sys says what the
switch offers. A fault is one of the machine.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vendors.kernel_files import text

SYS = Path("/sys")
# Counters that a healthy link leaves alone, of `counters/`. The second ones may tick: their rate decides.
NEVER = (
    "link_downed",
    "link_error_recovery",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
RARELY = ("symbol_error", "port_rcv_errors")
# Errors of one port in an hour that are let pass: this project's choice. On links with error correction they
# are those that it could not correct (NVIDIA, ibdiagnet manual, "Bit Error Rate").
AN_HOUR = 10.0
# A counter of 8, 16 or 32 bits stops at its end: it hides every further error. Later cards count in 64 bits.
FULL = {
    "link_downed": (0xFF, 0xFFFFFFFF), "link_error_recovery": (0xFF, 0xFFFFFFFF),
    "symbol_error": (0xFFFF, 0xFFFFFFFF), "port_rcv_errors": (0xFFFF, 0xFFFFFFFF),
    "local_link_integrity_errors": (0xF, 0xFFFFFFFF), "excessive_buffer_overrun_errors": (0xF, 0xFFFFFFFF),
}  # fmt: skip
ACTIVE, RATE = "ACTIVE", re.compile(r"([\d.]+) Gb/sec(?: \((\d+)X)?")
FABRIC_GB_PER_S = 100.0  # Gbit/s of an Ethernet port from which several equal ones are a fabric for training
Port = dict[str, Any]
Ports = dict[str, Port]  # "mlx5_0/1" -> readings


def read(root: Path = SYS) -> Ports:
    """Every port of every card, virtual functions of a card that this host has itself left out."""
    found: Ports = {}
    for card in sorted((root / "class/infiniband").glob("*")):
        if not (card / "device/physfn").exists():
            for port in sorted((card / "ports").glob("*")):
                found[f"{card.name}/{port.name}"] = _port(card, port)
    return found


def _port(card: Path, port: Path) -> Port:
    rate = RATE.search(text(port / "rate"))
    layer = text(port / "link_layer") or "unknown"
    return {
        "address": (card / "device").resolve().name,
        "kind": ":".join((text(card / "device/vendor"), text(card / "device/device"), layer, port.name)),
        "driver": (card / "device/driver").resolve().name if (card / "device/driver").exists() else "",
        "layer": layer,
        "state": text(port / "state").partition(": ")[2],
        "physical": text(port / "phys_state").partition(": ")[2],
        "rate": float(rate[1]) if rate else None,
        "lanes": int(rate[2]) if rate and rate[2] else None,
        "mtu": _mtu(card, port),
        "pcie": _pcie(card / "device"),
        "errors": {
            name: int(count)
            for name in (*NEVER, *RARELY)
            if (count := text(port / "counters" / name)).isdigit()
        },
        "read": time.time(),
    }


def _mtu(card: Path, port: Path) -> int | None:
    """The least MTU of the port's network interfaces."""
    named = {text(entry) for entry in (port / "gid_attrs/ndevs").glob("*")} - {""}
    interfaces = [one for one in (card / "device/net").glob("*") if not named or one.name in named]
    return min((int(mtu) for one in interfaces if (mtu := text(one / "mtu")).isdigit()), default=None)


def _pcie(device: Path) -> dict[str, Any]:
    """The card's link to its slot: lanes and GT/s now, and what card and slot both can."""
    slot = device.resolve().parent
    found: dict[str, Any] = {}
    for name in ("width", "speed"):
        now = _first_number(text(device / f"current_link_{name}"))
        most = [_first_number(text(end / f"max_link_{name}")) for end in (device, slot)]
        if now and most[0]:
            found |= {name: now, f"max_{name}": min(filter(None, most))}
    return found


def _first_number(words: str) -> float | None:
    found = re.match(r"[\d.]+", words)
    return float(found[0]) if found else None


def used(ports: Ports) -> Ports:
    """The ports that should be up. Where equal ones of other cards are up, a port that is down is broken.
    Ports of a kind of which none is up have no cable, unless none of this host is up at all.
    """
    up = {port["kind"] for port in ports.values() if port["state"] == ACTIVE}
    return {name: port for name, port in ports.items() if not up or port["kind"] in up}


def down(ports: Ports) -> Iterator[str]:
    """Each port that should be up and is not, in words."""
    for name, port in used(ports).items():
        if port["state"] != ACTIVE:
            state, physical = port["state"] or "unknown", port["physical"] or "unknown"
            yield f"{_named(name, port)}: state {state}, physical {physical}"


def slow(ports: Ports) -> Iterator[str]:
    """Each port below its mates, or whose card is below what card and slot can, in words."""
    for what, unit in (("rate", "Gbit/s"), ("lanes", "lanes")):
        for name, port, most in _below(ports, what):
            yield f"{_named(name, port)}: {what} {port[what] or 0:g}, its mates have {most:g} {unit}"
    for name, port in used(ports).items():
        for what, unit in (("width", "lanes"), ("speed", "GT/s")):
            now, most = port["pcie"].get(what), port["pcie"].get(f"max_{what}")
            if now is not None and now < most:
                yield f"{_named(name, port)}: PCIe {what} {now:g}, card and slot can {most:g} {unit}"


def unlike(ports: Ports) -> Iterator[str]:
    """Each port with a smaller MTU than its mates, in words."""
    for name, port, most in _below(ports, "mtu"):
        yield f"{_named(name, port)}: MTU {port['mtu'] or 0}, its mates have {most:g}"


def _below(ports: Ports, what: str) -> Iterator[tuple[str, Port, float]]:
    live = {name: port for name, port in ports.items() if port["state"] == ACTIVE}
    for name, port in live.items():
        most = max((mate[what] or 0 for mate in live.values() if mate["kind"] == port["kind"]), default=0)
        if (port[what] or 0) < most:
            yield name, port, most


def growing(early: Ports, late: Ports) -> Iterator[str]:
    """Each port whose errors grew, is full of errors, or is gone, in words."""
    for name, before in used(early).items():
        after = late.get(name)
        if after is None:
            yield f"{_named(name, before)}: it was there when the run began, and is gone"
            continue
        hours = max(0.0, after["read"] - before["read"]) / 3600
        for counter, count in after["errors"].items():
            grown = count - before["errors"].get(counter, count)
            if grown > (AN_HOUR * hours if counter in RARELY else 0):
                yield f"{_named(name, after)}: {counter} grew from {count - grown} to {count}"
            elif count in FULL[counter]:
                yield f"{_named(name, after)}: {counter} stands at its end, {count}; perfquery -R clears it"


def fabric(ports: Ports) -> list[str]:
    """The ports through which devices of several nodes exchange data.
    One Ethernet port alone may be for anything, as in every virtual machine of some clouds.
    """
    live = {name: port for name, port in ports.items() if port["state"] == ACTIVE}
    kinds: Sequence[str] = [p["kind"] for p in live.values() if (p["rate"] or 0) >= FABRIC_GB_PER_S]
    return [name for name, p in live.items() if p["layer"] == "InfiniBand" or kinds.count(p["kind"]) > 1]


def efa(ports: Mapping[str, Port]) -> list[str]:
    """The ports of AWS's Elastic Fabric Adapter, which NCCL reaches through libfabric alone."""
    return [name for name, port in ports.items() if port["driver"] == "efa"]


def _named(name: str, port: Port) -> str:
    return f"{name} at {port['address']}"
