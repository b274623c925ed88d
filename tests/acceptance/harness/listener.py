"""Listen to the driver's fault reports during a whole run. In: a vendor. Out: the reports, in a file.

The controller starts one child process (`vendors.listener`) before the first check. The check that judges the
run reads the child's file.
"""

import contextlib
import json
import os
import subprocess
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import processes

READY_S = 20.0
END_S = 5.0
POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class FaultReports:
    """The reports so far. `listening` is false if the child has ended, or never began to listen."""

    listening: bool
    absence: str | None  # why this vendor, device or library release cannot report faults
    error: str | None
    faults: tuple[Mapping[str, Any], ...]


class Listener:
    """The child of this run; its file stays as evidence."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._process: processes.Child | None = None
        self._parent = -1
        self._token = uuid.uuid4().hex

    def start(self, vendor: str) -> None:
        """Start the child, and wait until the library listens, so that no fault of the run is missed."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        held, self._parent = os.pipe()
        self._process = processes.start(
            processes.python("-m", "vendors.listener", vendor, *processes.numbers(1)),
            env=processes.environment({}, self._token, self.path.parent),
            stdout=self.path,
            stderr=self.path.with_suffix(".txt"),
            pass_fds=(held,),
        )
        os.close(held)
        deadline = time.monotonic() + READY_S
        while not self._lines() and self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def reports(self) -> FaultReports:
        """What was reported since the start. Any process of the run may call it."""
        lines = self._lines()
        facts = {key: value for line in lines for key, value in line.items()}
        return FaultReports(
            listening="listening" in facts and processes.lives(int(facts["listening"])),
            absence=facts.get("absence"),
            error=facts.get("error"),
            faults=tuple(line for line in lines if "what" in line),
        )

    def stop(self) -> None:
        """End the child by closing its pipe; kill it if it does not end."""
        if self._process is None:
            return
        os.close(self._parent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        processes.kill(self._token, self._process)
        self._process = None

    def _lines(self) -> list[dict[str, Any]]:
        text = processes.end_of_file(self.path)
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
