"""The devices as torch sees them, and copies over their links. In: nothing or seconds. Out: plain figures."""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from vendors.kernel_files import numbers
from workloads.speed_conditions import LINK_BYTES

COPY_BYTES = 64 << 20
PATTERN_ELEMENTS = (1 << 20) + 1
COPIES, REPEATS = 20, 5
BUS = Path("/sys/bus/pci/devices")


def seen() -> list[dict[str, Any]]:
    """Each device in torch's order, with the ids that match it to a device of the management library."""
    return [_properties(index) for index in range(torch.cuda.device_count())]


def busy_links(seconds: float) -> int:
    """Copy from the host to every visible device, so that the links leave their idle state.

    Returns the number of copies.
    """
    host = torch.empty(COPY_BYTES, dtype=torch.uint8).pin_memory()
    buffers = [torch.empty_like(host, device=f"cuda:{index}") for index in range(torch.cuda.device_count())]
    deadline, copies = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        for buffer in buffers:
            buffer.copy_(host, non_blocking=True)
            copies += 1
        for index in range(len(buffers)):
            torch.cuda.synchronize(index)
    return copies


def peer_copies() -> list[dict[str, Any]]:
    """Copy a pattern that contains both device numbers between every ordered pair, and compare every bit."""
    return [_peer_copy(a, b) for a, b in itertools.permutations(range(torch.cuda.device_count()), 2)]


def _peer_copy(a: int, b: int) -> dict[str, Any]:
    pattern = torch.arange(PATTERN_ELEMENTS, dtype=torch.int64) * 2654435761 + (a << 40) + (b << 48)
    target = torch.full((PATTERN_ELEMENTS,), -1, dtype=torch.int64, device=f"cuda:{b}")
    target.copy_(pattern.to(f"cuda:{a}"))
    torch.cuda.synchronize(b)
    wrong = int((target.cpu() != pattern).sum())
    return {"from": a, "to": b, "access": torch.cuda.can_device_access_peer(b, a), "wrong_elements": wrong}


def peer_speeds() -> dict[str, Any]:
    """Time one copy between each ordered pair, one pair at a time, and count wrong elements.

    {"bytes", "pairs": [{"from", "to", "seconds": one per repeat, "wrong_elements"}]}
    """
    pairs = itertools.permutations(range(torch.cuda.device_count()), 2)
    return {"bytes": LINK_BYTES, "pairs": [_peer_speed(a, b) for a, b in pairs]}


def _peer_speed(a: int, b: int) -> dict[str, Any]:
    values = torch.arange(LINK_BYTES // 8, dtype=torch.int64, device=f"cuda:{a}") * 2654435761 + (a << 40)
    target = torch.full_like(values, -1, device=f"cuda:{b}")
    torch.cuda.synchronize(b)
    with torch.cuda.device(a):
        seconds = _seconds_a_copy(target, values)
    wrong = int((target.cpu() != values.cpu()).sum())
    return {"from": a, "to": b, "seconds": seconds, "wrong_elements": wrong}


def _seconds_a_copy(target: torch.Tensor, source: torch.Tensor) -> list[float]:
    """Seconds of a copy on the current device's stream, one figure per repeat."""
    target.copy_(source, non_blocking=True)  # the first copy opens the path
    return [_repeat(lambda: target.copy_(source, non_blocking=True)) for _ in range(REPEATS)]


def _repeat(copy: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(COPIES):
        copy()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / COPIES


def host_speeds() -> dict[str, Any]:
    """Time one copy between pinned memory and each device, and count wrong elements.

    {"bytes", "devices": [{"h2d": seconds, one per repeat, "d2h": the same, "wrong_elements"}]}, one device
    after the other. The pinned memory is on the device's NUMA node, where a job's launcher would put it.
    """
    pinned: list[torch.Tensor] = []  # kept until the end: torch would reuse freed memory for the next device
    found = [_host_speed(index, pinned) for index in range(torch.cuda.device_count())]
    return {"bytes": LINK_BYTES, "devices": found}


def _host_speed(index: int, pinned: list[torch.Tensor]) -> dict[str, Any]:
    values = torch.arange(LINK_BYTES // 8, dtype=torch.int64) * 2654435761 + (index << 40)
    with torch.cuda.device(index), _beside(_properties(index)["bdf"]):
        host = values.pin_memory()
        pinned.append(host)
        device = torch.full_like(host, -1, device=f"cuda:{index}")
        down = _seconds_a_copy(device, host)
        wrong = int((device.cpu() != values).sum())
        host.fill_(-1)
        up = _seconds_a_copy(host, device)
        wrong += int((host != values).sum())
    return {"h2d": down, "d2h": up, "wrong_elements": wrong}


@contextlib.contextmanager
def _beside(bdf: str | None) -> Iterator[None]:
    """Run this thread on cores of the device's NUMA node; if it may use none of them, on any."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, allowed & local_cores(bdf) or allowed)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def local_cores(bdf: str | None) -> set[int]:
    """The cores on a device's NUMA node; empty if the kernel does not list them."""
    path = BUS / str(bdf) / "local_cpulist"
    return numbers(path.read_text()) if path.is_file() else set()


def _properties(index: int) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(index)
    arch = getattr(found, "gcnArchName", "") if torch.version.hip else f"sm_{found.major}{found.minor}"
    parts = [getattr(found, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    numbered = [part for part in parts if part is not None]
    return {
        "index": index,
        "arch": arch.split(":")[0],
        "compute_units": found.multi_processor_count,
        "memory_bytes": found.total_memory,
        "bdf": "{:04x}:{:02x}:{:02x}.0".format(*numbered) if len(numbered) == len(parts) else None,
        "uuid": str(found.uuid) if hasattr(found, "uuid") else None,
    }
