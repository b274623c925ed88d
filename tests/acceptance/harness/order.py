"""Which checks run, and when. In: their marks. Out: correctness first, performance alone, the last ones last.

`@pytest.mark.last` is for a check that judges the whole run. pytest-xdist hands out checks in order, but the
ones before may still run in another worker: so each check leaves a mark in a folder that all workers see, and
a last one waits for all the others.
"""

import time
from collections.abc import Iterable
from pathlib import Path

import pytest

TIERS = ("smoke", "standard", "soak")
STALL_S = 900.0  # nothing ended for so long: whoever should have is gone, or hangs behind its own watchdog
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
    """Correctness, then performance, then what judges the run; files stay together within each."""
    return sorted(items, key=lambda item: (is_last(item), _is_performance(item)))


class Ended:
    """How many checks of a run have ended, over all of its workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, number: int) -> None:
        """Say that the check of that number has ended."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / str(number)).touch()

    def wait_for(self, count: int, *, stall_s: float = STALL_S) -> bool:
        """Wait until so many have ended; False when none has for too long."""
        seen, since = -1, time.monotonic()
        while (now := self._count()) < count:
            if now != seen:
                seen, since = now, time.monotonic()
            if time.monotonic() - since > stall_s:
                return False
            time.sleep(POLL_S)
        return True

    def _count(self) -> int:
        return len(list(self.folder.iterdir())) if self.folder.is_dir() else 0


def _is_performance(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("gpus")
    return bool(mark and mark.kwargs.get("perf"))
