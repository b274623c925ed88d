"""What torch sees of the devices, and copies that use their links. In: nothing or seconds. Out: plain
figures.
"""

import time
from typing import Any

import torch

COPY_BYTES = 64 << 20
PATTERN_ELEMENTS = (1 << 20) + 1
PEER_BYTES = 256 << 20
PEER_COPIES, PEER_REPEATS = 20, 5


def seen() -> list[dict[str, Any]]:
    """Each device in torch's order, with what joins it to the management library."""
    return [_properties(index) for index in range(torch.cuda.device_count())]


def busy_links(seconds: float) -> int:
    """Copy between host and every visible device, so that their links leave the idle state; returns copies
    made.
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
    """Copy a pattern that names both ends over every ordered pair, and compare it bit by bit where it
    arrived.
    """
    count = torch.cuda.device_count()
    return [_peer_copy(a, b) for a in range(count) for b in range(count) if a != b]


def _peer_copy(a: int, b: int) -> dict[str, Any]:
    pattern = torch.arange(PATTERN_ELEMENTS, dtype=torch.int64) * 2654435761 + (a << 40) + (b << 48)
    target = torch.full((PATTERN_ELEMENTS,), -1, dtype=torch.int64, device=f"cuda:{b}")
    target.copy_(pattern.to(f"cuda:{a}"))
    torch.cuda.synchronize(b)
    wrong = int((target.cpu() != pattern).sum())
    return {"from": a, "to": b, "access": torch.cuda.can_device_access_peer(b, a), "wrong_elements": wrong}


def peer_speeds() -> dict[str, Any]:
    """Seconds of one copy over each ordered pair, alone on the links, and how much of its data was wrong.

    {"bytes", "pairs": [{"from", "to", "seconds": one per repeat, "wrong_elements"}]}
    """
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    return {"bytes": PEER_BYTES, "pairs": [_peer_speed(a, b) for a, b in pairs]}


def _peer_speed(a: int, b: int) -> dict[str, Any]:
    values = torch.arange(PEER_BYTES // 8, dtype=torch.int64, device=f"cuda:{a}") * 2654435761 + (a << 40)
    target = torch.full_like(values, -1, device=f"cuda:{b}")
    seconds = []
    with torch.cuda.device(a):
        target.copy_(values, non_blocking=True)  # the first copy opens the path
        for _ in range(PEER_REPEATS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(a)
            torch.cuda.synchronize(b)
            start.record()
            for _ in range(PEER_COPIES):
                target.copy_(values, non_blocking=True)
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3 / PEER_COPIES)
    wrong = int((target.cpu() != values.cpu()).sum())
    return {"from": a, "to": b, "seconds": seconds, "wrong_elements": wrong}


def _properties(index: int) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(index)
    arch = getattr(found, "gcnArchName", "") if torch.version.hip else f"sm_{found.major}{found.minor}"
    parts = [getattr(found, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    known = all(part is not None for part in parts)
    return {
        "index": index,
        "arch": arch.split(":")[0],
        "compute_units": found.multi_processor_count,
        "memory_bytes": found.total_memory,
        "bdf": "{:04x}:{:02x}:{:02x}.0".format(*parts) if known else None,
        "uuid": str(found.uuid) if hasattr(found, "uuid") else None,
    }
