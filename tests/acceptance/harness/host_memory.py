"""Memory of the host that no process owns, over a whole run. In: files of /proc. Out: readings, what grew.

Drivers take pages of the kernel that no process has and no pressure frees; what they forget is lost until a
reboot, and no process shows it. Other users of the host start and end meanwhile, caches fill and shrink. So
the readings are cut into quarters, and only the least growth from one quarter's median to the next counts.
"""

import json
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness import processes
from workloads import quarters

if TYPE_CHECKING:  # it imports the session, which has a HostMemory
    from harness.calls import RecordMetric

MEMINFO, ZONEINFO = Path("/proc/meminfo"), Path("/proc/zoneinfo")
LISTED, PAGE_BYTES = re.compile(r"^\s+count:\s+(\d+)$", re.MULTILINE), os.sysconf("SC_PAGE_SIZE")
PERIOD_S, LEAST = 2.0, 60  # of two minutes: work of other users lasts as long as a shorter part
# Free, or on disk too, or a process's own, or given up under pressure, or set aside by the administrator.
OWNED = ("MemFree", "Buffers", "Cached", "SwapCached", "AnonPages", "KReclaimable", "Hugetlb", "Balloon")
NO_OWNER, SLAB, SHARED = "memory that no process owns", "unreclaimable slab", "shared memory"
AT = "at_s"
MOST_BYTES = 64 << 20  # from a quarter to the next; busy hosts without a leak: docs/reference/trust.md


def reading(meminfo: str, zoneinfo: str) -> dict[str, float]:
    """Bytes of the host by the texts of these files; shared memory is a file's, and may have no process.

    Each core keeps free pages in a list of its own, which is not in MemFree: of two cores 0 to 1.1 GiB.
    """
    lines = (line.split(":", 1) for line in meminfo.splitlines())
    table = {name: 1024.0 * float(rest.split()[0]) for name, rest in lines}
    table.setdefault("KReclaimable", table["SReclaimable"])  # before Linux 4.20
    unowned = table["MemTotal"] - sum(table.get(name, 0.0) for name in OWNED)
    unowned -= PAGE_BYTES * sum(map(int, LISTED.findall(zoneinfo)))
    return {NO_OWNER: unowned, SLAB: table["SUnreclaim"], SHARED: table["Shmem"]}


def grown(readings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Bytes that grew from each quarter of the readings to the next, by name; nothing of too few readings."""
    names = readings[0].keys() - {AT} if len(readings) >= LEAST else ()
    return {name: quarters.least_growth([one[name] for one in readings]) for name in sorted(names)}


def growing(readings: Sequence[Mapping[str, float]]) -> list[str]:
    """What grew all the time by more than a host without a leak shows, in words."""
    return [
        f"the host's {name} grew by {value / 2**20:.0f} MiB or more from each quarter of "
        f"{readings[-1][AT] - readings[0][AT]:.0f} s to the next, allowed are {MOST_BYTES >> 20}"
        for name, value in grown(readings).items()
        if value > MOST_BYTES
    ]


def record(readings: Sequence[Mapping[str, float]], record_metric: "RecordMetric") -> None:
    """Record what grew, of readings of one run or of a part of it."""
    for name, value in grown(readings).items():
        record_metric("host_memory_growth", value, unit="B", conditions={"what": name})


class HostMemory:
    """Reads the host's memory in a thread of the controller; its file is there for every worker."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._done.set()

    def readings(self, since_s: float = 0.0) -> list[dict[str, float]]:
        """What was read since a time of `time.time`. Any process of the run may call it."""
        text = processes.end_of_file(self.path)  # of the last hours
        found = [
            json.loads(line)
            for line in text.splitlines(keepends=True)
            if line.startswith("{") and line.endswith("\n")
        ]
        return [one for one in found if one[AT] >= since_s]

    def _run(self) -> None:
        with self.path.open("a", encoding="utf-8", buffering=1) as file:
            while True:
                zones = ZONEINFO.read_text() if ZONEINFO.exists() else ""  # a sandbox may have none
                file.write(json.dumps({AT: time.time(), **reading(MEMINFO.read_text(), zones)}) + "\n")
                if self._done.wait(PERIOD_S):
                    return
