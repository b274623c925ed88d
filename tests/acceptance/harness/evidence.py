"""Whether a device was fit for a check. In: readings before and after it.
Out: facts, and problems in words.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from harness import resultfile
from harness.unfit import Unfit
from vendors import Absence, Device, Host, VendorName, is_known, is_unfit_share

CLOCKS_SET = "application clocks"  # as NVML calls it; among the reasons that are normal under load
SLACK_BYTES = 2 << 30  # as in Primus
# After a whole run: 15 H100s and H200s in 8 runs of docs/results had what they had before, to the byte.
# Nobody has read it on AMD.
STAYS_BYTES: Mapping[VendorName, int] = {"nvidia": 256 << 20, "amd": SLACK_BYTES, "cpu": SLACK_BYTES}


def device_names(devices: Sequence[Device]) -> tuple[str, ...]:
    """The anonymised names of devices."""
    return tuple(resultfile.anonymous(device.uuid) for device in devices)


def evidence(host: Host, devices: Sequence[Device]) -> dict[str, Any]:
    """Throttling, memory errors and processes of each device, by device index."""
    return {str(device.index): _state(device) for device in _leased(host, devices)}


def link_states(host: Host) -> dict[str, Any]:
    """State, error and replay counts of the links, by pair.
    No check judges replays: they cost time, but no data.
    """
    return {
        f"{link.a}-{link.b}": {
            "kind": link.kind,
            "active": link.active,
            "errors": link.errors,
            "errors_cleared": link.errors_cleared,
            "replays": link.replays,
        }
        for link in host.links
    }


def newly_unfit(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Unfit]:
    """What got worse between two readings of the same devices, or can no longer be read."""
    found = ((int(index), before.get(index, late), late) for index, late in after.items())
    return [unfit for one in found for unfit in _newly_unfit(*one)]


def _newly_unfit(index: int, early: Mapping[str, Any], late: Mapping[str, Any]) -> Iterator[Unfit]:
    readings = {
        "throttle reasons": late["throttle_reading"],
        "uncorrectable memory errors": late["uncorrectable"],
    }
    for words in unanswered(readings | dict(late["accumulators"])):
        yield Unfit("no answer", f"device {index}: {words}", index)
    for reason in late["unfit"]:
        yield Unfit("throttled", f"device {index} throttled: {reason}", index)
    for name, value in late["accumulators"].items():
        grown = _growth(early["accumulators"].get(name), value)
        ticks = _growth(early["throttle_ticks"], late["throttle_ticks"])
        if is_unfit_share(grown, ticks):
            words = f"device {index} throttled during the check: {name} grew by {grown} in {ticks} ticks"
            yield Unfit("throttled", words, index)
    if _growth(early["uncorrectable"], late["uncorrectable"]) > 0:
        words = f"device {index} counted uncorrectable memory errors during the check"
        yield Unfit("memory errors", words, index)


def held_down(index: int, reasons: Iterable[str]) -> Iterator[Unfit]:
    """Whether somebody set the clocks of a device lower than it could run."""
    if CLOCKS_SET in reasons:
        yield Unfit("clocks", f"device {index}: a setting holds its clocks down ({CLOCKS_SET})", index)


def doubts(start: Host, now: Host, devices: Sequence[Device]) -> list[Unfit]:
    """States of the machine that make figures slow and nothing wrong:
    a lowered power cap, clocks that were set, a process that was on a device before the run and still is.
    """
    early = {device.index: occupants(device) for device in start.devices}
    found = []
    for device in _leased(now, devices):
        stayed = [words for pid, words in occupants(device).items() if pid in early.get(device.index, {})]
        if stayed:
            words = f"device {device.index} is shared with {', '.join(stayed)} since before the run"
            found.append(Unfit("shared", words, device.index))
        cap, default = device.power.cap_w, device.power.default_cap_w
        if is_known(cap) and is_known(default) and float(cap) < float(default):
            words = f"device {device.index}: power cap {cap} W, the default is {default} W"
            found.append(Unfit("power cap", words, device.index))
        found += held_down(device.index, device.throttle.normal)
    return found


def unanswered(readings: Mapping[str, Any]) -> list[str]:
    """The readings that the device or the library should have answered and did not, in words."""
    return [
        f"{what}: {reading}, so its state is unknown"
        for what, reading in readings.items()
        if isinstance(reading, Absence) and reading.is_failure
    ]


def occupants(device: Device) -> dict[int, str]:
    """Processes that hold memory of a device: pid -> its pid and name.

    A process without memory on it uses another device: amdsmi before 10.0 lists every process on every GPU.
    """
    if isinstance(device.processes, Absence):
        return {}
    return {
        process.pid: f"{process.pid} {process.name}"
        for process in device.processes
        if not is_known(process.memory_bytes) or process.memory_bytes
    }


def newly_shared(start: Host, now: Host, devices: Sequence[Device]) -> list[Unfit]:
    """New users of some devices since the run began. Call it while none of our processes is on them."""
    before = {device.index: device for device in start.devices}
    found = []
    for device in _leased(now, devices):
        early = before[device.index]
        new = [words for pid, words in occupants(device).items() if pid not in occupants(early)]
        if new:
            words = f"device {device.index} is shared with {', '.join(new)}"
            found.append(Unfit("shared", words, device.index))
        readings = {"processes": device.processes, "memory in use": device.memory_used_bytes}
        found += [
            Unfit("no answer", f"device {device.index}: {words}", device.index)
            for words in unanswered(readings)
        ]
    for index, more in newly_used(start, now, devices).items():
        words = f"device {index} has {more / 2**30:.1f} GiB more in use than at the start of the run"
        found.append(Unfit("shared", words, index))
    return found


def without(now: Host, own: int) -> Host:
    """The machine as if one process had ended. Where its memory is not known, nothing is taken away."""
    return dataclasses.replace(now, devices=tuple(_without(device, own) for device in now.devices))


def _without(device: Device, own: int) -> Device:
    if isinstance(device.processes, Absence):
        return device
    ours = [process for process in device.processes if process.pid == own]
    if len(ours) != 1 or not is_known(ours[0].memory_bytes) or not is_known(device.memory_used_bytes):
        return device
    rest = tuple(process for process in device.processes if process.pid != own)
    left = int(device.memory_used_bytes) - int(ours[0].memory_bytes)
    return dataclasses.replace(device, processes=rest, memory_used_bytes=left)


def newly_used(
    start: Host, now: Host, devices: Sequence[Device], slack_bytes: int = SLACK_BYTES
) -> dict[int, int]:
    """Device index -> bytes in use beyond those at the start of the run.
    What a driver needs for itself is not counted: no more than the slack.
    """
    before = {device.index: device.memory_used_bytes for device in start.devices}
    late = {device.index: device.memory_used_bytes for device in now.devices}
    grown = {
        index: int(late[index]) - int(before[index])
        for index in (device.index for device in devices)
        if is_known(late[index]) and is_known(before[index])
    }
    return {index: more for index, more in grown.items() if more > slack_bytes}


def _leased(host: Host, devices: Sequence[Device]) -> list[Device]:
    """These devices in another reading of the machine."""
    leased = {device.index for device in devices}
    return [device for device in host.devices if device.index in leased]


def _state(device: Device) -> dict[str, Any]:
    processes = device.processes
    return {
        "unfit": list(device.throttle.unfit),
        "normal": list(device.throttle.normal),
        "throttle_reading": device.throttle.reading,
        "accumulators": dict(device.throttle.accumulators),
        "throttle_ticks": device.throttle.ticks,
        **asdict(device.ecc),
        "temperature_c": device.temperature_c,
        "clock_mhz": device.clock_mhz,
        "power_w": device.power.draw_w,
        "power_cap_w": device.power.cap_w,
        "power_cap_default_w": device.power.default_cap_w,
        "partition": dict(device.partition),
        "firmware": dict(device.firmware),
        "fabric": device.fabric,
        "recovery_action": device.recovery_action,
        "memory_bytes": device.memory_bytes,
        "memory_used_bytes": device.memory_used_bytes,
        "processes": str(processes) if isinstance(processes, Absence) else list(occupants(device)),
    }


def _growth(early: object, late: object) -> float:
    return late - early if isinstance(early, int | float) and isinstance(late, int | float) else 0
