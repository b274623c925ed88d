"""The phase that a process is in, and a watchdog that ends it with all stacks when a phase takes too long.

In: names of phases as they begin. Out: a line of progress on rank 0's stdout, seconds by phase for the
record, and on a hang the Python stacks of all threads of this rank on stderr. Ranks print one after the
other, so that their stacks do not mix in one file.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from pathlib import Path

HUNG = 6  # the exit code of a rank that its watchdog ended
STDERR = 2  # not `sys.stderr`: a library may have put an object without a descriptor there
STAGGER_S = 0.3  # between the stacks of two ranks
# After the watchdog: ends a process whose hang holds the interpreter lock, so that the watchdog cannot run.
LAST_RESORT_S = 15.0


class Phases:
    """The phases of one process; the phase `import` ends when this object is made."""

    def __init__(self, limit_s: float) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.limit_s, self.name, self.entered = limit_s, "import", 0.0
        self.seconds: dict[str, float] = {}
        self.deadline = time.monotonic() + limit_s
        self.say(f"import took {since_start():.1f} s")
        if "STACKCHECK_STACKS" not in os.environ:  # the harness of the suites handles the signal
            faulthandler.register(signal.SIGUSR1, file=STDERR, all_threads=True)
        threading.Thread(target=self._watch, daemon=True).start()

    def enter(self, name: str) -> None:
        """The next phase begins."""
        now = since_start()
        self.seconds[self.name] = self.seconds.get(self.name, 0.0) + now - self.entered
        self.name, self.entered = name, now
        self.alive()
        self.say(name)

    def alive(self) -> None:
        """The phase makes progress (a step has ended): restart its time limit."""
        self.deadline = time.monotonic() + self.limit_s

    def say(self, text: str) -> None:
        """A line of progress, by rank 0."""
        if self.rank == 0:
            print(f"[{since_start():7.1f} s] {text}", flush=True)

    def _watch(self) -> None:
        while (left := self.deadline - time.monotonic()) > 0:
            faulthandler.dump_traceback_later(left + LAST_RESORT_S, exit=True, file=STDERR)
            time.sleep(min(left, 1.0))
        time.sleep(STAGGER_S * self.rank)
        os.write(STDERR, f"rank {self.rank}: {self.name} lasted more than {self.limit_s:g} s\n".encode())
        faulthandler.dump_traceback(file=STDERR, all_threads=True)
        os._exit(HUNG)


def since_start() -> float:
    """Seconds since this process was started, with the start of the interpreter and the imports (Linux)."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    up = float(Path("/proc/uptime").read_text().split()[0])
    return up - ticks / os.sysconf("SC_CLK_TCK")
