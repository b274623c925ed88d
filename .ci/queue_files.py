"""Test files, each in a pytest of its own, so many at a time; whoever is free takes the next one.

In: `PROCESSES FILE… -- ARGUMENTS OF PYTEST`. What takes longest begins first, whatever the order given.
Out: each file's output when it has ended, one closing line for all, and 0 only where each of them gave 0.

pytest-xdist cannot do this: a process of it keeps its last test until it has the next file. So a long file
can wait behind another file's only test while other processes have nothing left to do.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

# What takes longest first, as the last one to begin should be short; before all others what waits for time
# limits while they compute. What is not here takes less than half a minute.
LONGEST = (
    "test_fleet_slurm",
    "test_rocm_mirror",
    "test_rocm_stack",
    "test_templates",
    "test_foreign_images",
    "test_triton_releases",
    "test_nightly",
    "test_templates_cuda",
    "test_report_browser",
    "test_bisect",
    "test_cosign",
    "test_publishing_campaign",
    "test_build_on_its_own",
    "test_build",
    "test_consumer",
    "test_full_disk",
    "test_bad_days",
)
CLOSING = re.compile(r"^=* ?((?:\d+ [a-z]+(?:, )?)+) in ([\d.]+)s(?: \([\d:]+\))? ?=*$")
COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)s?\b")
POLL_S = 0.1


class File:
    """One test file while it runs. Of equal names in one place the number of the place tells them apart."""

    def __init__(self, path: str, arguments: list[str], place: int) -> None:
        self.path, self.place, self.begin = path, place, time.monotonic()
        self.output = tempfile.TemporaryFile()  # noqa: SIM115  # `told` closes it
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pytest", path, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTEST_XDIST_WORKER": f"gw{place}"},  # what the tests name their things by
        )

    def told(self) -> Counter[str]:
        """Show what it said, and count how its tests ended: stage.py shall find one closing line alone."""
        self.output.seek(0)
        lines = self.output.read().decode(errors="replace").splitlines()
        self.output.close()
        total: Counter[str] = Counter()
        print(f"== {self.path}: {time.monotonic() - self.begin:.0f} s, exit code {self.process.returncode}")
        for line in lines:
            if found := CLOSING.match(line):
                total += Counter({word: int(number) for number, word in COUNT.findall(found[1])})
            print(f"{found[1]}, {found[2]} seconds" if found else line)
        sys.stdout.flush()
        return total


class Queue:
    """The files that wait, and those that run."""

    def __init__(self, processes: int, files: list[str], arguments: list[str]) -> None:
        place = {name: number for number, name in enumerate(LONGEST)}
        self.waiting = sorted(files, key=lambda path: place.get(Path(path).stem, len(place)))
        self.free, self.arguments = list(range(processes))[::-1], arguments
        self.running: list[File] = []
        self.signal = 0

    def hear(self, number: int, _frame: object) -> None:
        """Begin no other file. Those that run are of the same process group and hear it by themselves."""
        self.signal, self.waiting = number, []

    def run(self) -> int:
        """Run all of them to their end, also when one fails."""
        begin, total, code = time.monotonic(), Counter[str](), 0
        while self.waiting or self.running:
            while self.waiting and self.free:
                self.running.append(File(self.waiting.pop(0), self.arguments, self.free.pop()))
            for file in [file for file in self.running if file.process.poll() is not None]:
                self.running.remove(file)
                self.free.append(file.place)
                total += file.told()
                code = code or file.process.returncode != 0
            time.sleep(POLL_S)
        counts = ", ".join(
            f"{total[word]} {word}" for word in ("failed", "passed", "skipped", "error") if total[word]
        )
        print(f"{counts or '0 passed'} in {time.monotonic() - begin:.2f}s")
        return 128 + self.signal if self.signal else int(code)


if __name__ == "__main__":
    processes, *words = sys.argv[1:]
    cut = words.index("--")
    queue = Queue(int(processes), words[:cut], words[cut + 1 :])
    for known in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(known, queue.hear)
    sys.exit(queue.run())
