"""Which checks run, and when. In: their marks. Out: correctness first, performance alone, the last ones last.

`@pytest.mark.last` is for a check that judges the whole run; such checks have a file of their own.
pytest-xdist hands out files in order, but the ones before may still run in another worker: so each check
leaves a mark in a folder that all workers see, and a last one waits for all the others. A check that goes on
for long, as its tier asks, says so there before it begins.
"""

import os
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from harness.leases import Wish

TIERS = ("smoke", "standard", "soak")
# Nothing ended for so long beyond what a check said: whoever should have is gone, or hangs behind its own
# watchdog.
STALL_S = 900.0
LASTS = "lasts-"
POLL_S = 0.1


def tier(item: pytest.Item) -> int:
    """The number of the first tier that runs a check."""
    mark = item.get_closest_marker("tier")
    name = mark.args[0] if mark else "smoke"
    if name not in TIERS:
        raise pytest.UsageError(f"{item.nodeid}: tier {name!r}, expected one of {', '.join(TIERS)}")
    return TIERS.index(name)


def is_last(item: pytest.Item) -> bool:
    """Whether a check judges the whole run."""
    return item.get_closest_marker("last") is not None


def ordered(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Correctness, then performance, then what judges the run; files stay together within each.

    Where files run side by side, those that begin with a few devices come first and fill the machine; those
    that need none run beside them; those that need most of it follow, for each of them waits for all others.
    """
    items = list(items)
    least: dict[Path, int] = {}
    for item in items:
        if devices(item) and not is_performance(item):
            least[item.path] = min(least.get(item.path, devices(item)), devices(item))
    few = max(1, max(map(devices, items), default=0) // 2)

    def place(item: pytest.Item) -> tuple[bool | int, ...]:
        count = least.get(item.path, devices(item))
        return is_last(item), is_performance(item), count > few, count == 0, count

    return sorted(items, key=place)


def devices(item: pytest.Item) -> int:
    """How many devices a check is marked with; 0 without a mark."""
    mark = item.get_closest_marker("gpus")
    return int(mark.args[0]) if mark else 0


def wish(item: pytest.Item) -> Wish:
    """What a check leases: one device where it does not say; performance is alone on the machine."""
    mark = item.get_closest_marker("gpus")
    alone = bool(mark and (mark.kwargs.get("perf") or mark.kwargs.get("exclusive")))
    return Wish(group=str(item.path), count=devices(item) or 1, alone=alone)


class Ended:
    """How many checks of a run have ended, over all of its workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.expected: Path | None = None  # the mark of the check that this process is in

    def add(self, number: int) -> None:
        """Say that the check of that number has ended."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / str(number)).touch()
        if self.expected is not None:
            self.expected.unlink()
            self.expected = None

    def expect(self, seconds: float) -> None:
        """Say that the check which begins now goes on for so long: until it ends, silence is no stall."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.expected = self.folder / f"{LASTS}{seconds:g}-{os.getpid()}"
        self.expected.touch()

    def wait_for(self, count: int, *, stall_s: float = STALL_S) -> bool:
        """Wait until so many have ended; False when none has for too long, whatever any of them lasts."""
        seen, since = -1, time.monotonic()
        while (now := self._count()) < count:
            if now != seen:
                seen, since = now, time.monotonic()
            if time.monotonic() - since > stall_s + self._longest():
                return False
            time.sleep(POLL_S)
        return True

    def _count(self) -> int:
        return sum(not name.startswith(LASTS) for name in self._marks())

    def _longest(self) -> float:
        said = (
            name.removeprefix(LASTS).rpartition("-")[0] for name in self._marks() if name.startswith(LASTS)
        )
        return max(map(float, said), default=0.0)

    def _marks(self) -> list[str]:
        return [mark.name for mark in self.folder.iterdir()] if self.folder.is_dir() else []


def is_performance(item: pytest.Item) -> bool:
    """Whether a check measures speed."""
    mark = item.get_closest_marker("gpus")
    return bool(mark and mark.kwargs.get("perf"))
