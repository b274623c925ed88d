"""What changes on a host while it is read: counters that the firmware moves, errors counted late.

In: a state and its tree on disk. Out: functions that run beside the command until the namespaces end.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fakeamd import gpu_metrics, kfd, telemetry
from fakeamd.states import Counting, HostState, Moving

TICK_S = 0.01
LATE_S = 1.0  # a busy machine takes over 0.1 s for its first reading, and the run goes on for 2 s at least


def movers(state: HostState, sys_root: Path, metrics_revision: int) -> tuple[Callable[[], None], ...]:
    """One function for each thing that moves."""
    revision = telemetry.revision_of(state.product, metrics_revision)
    late = [partial(_count, sys_root / kfd.device_folder(one.gpu) / one.path, one) for one in state.counting]
    steady = [
        partial(_move, sys_root / kfd.device_folder(one.gpu) / "gpu_metrics", one, revision)
        for one in state.moving
    ]
    return (*late, *steady)


def _count(path: Path, counting: Counting) -> None:
    """Write the new text some time after the first reader: tmpfs moves the access time at that first read."""
    untouched = path.stat().st_atime_ns
    while path.stat().st_atime_ns == untouched:
        time.sleep(TICK_S)
    time.sleep(LATE_S)
    path.write_text(counting.text + "\n", encoding="utf-8")


def _move(path: Path, moving: Moving, revision: int) -> None:
    descriptor = os.open(path, os.O_RDWR)
    places = [
        (*gpu_metrics.offset(revision, name), step)
        for name, step in moving.step.items()
        if hasattr(gpu_metrics.layout(revision), name)
    ]
    while True:
        for offset, size, step in places:
            value = int.from_bytes(os.pread(descriptor, size, offset), "little") + step
            os.pwrite(descriptor, value.to_bytes(size, "little"), offset)
        time.sleep(TICK_S)
