"""Who listens to the driver for a whole run. In: a vendor. Out: what it reported, in a file.

The controller starts one child before the first check (`vendors.listener`); whoever judges reads its file.
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
class Heard:
    """What is known of the run so far; `listening` is false when somebody ought to be and is not."""

    listening: bool
    absence: str | None  # why this vendor, part or release cannot tell
    error: str | None
    faults: tuple[Mapping[str, Any], ...]


class Listener:
    """One child of the run; its file outlives it as evidence."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._process: subprocess.Popen[bytes] | None = None
        self._parent = -1
        self._token = uuid.uuid4().hex

    def start(self, vendor: str) -> None:
        """Begin, and wait until the library listens: what happens from now on is heard."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        held, self._parent = os.pipe()
        self._process = processes.start(
            processes.python("-m", "vendors.listener", vendor, str(held), str(self.path)),
            env=processes.environment({}, self._token, self.path.parent),
            stdout=self.path.with_suffix(".txt"),
            stderr=self.path.with_suffix(".txt"),
            pass_fds=(held,),
        )
        os.close(held)
        deadline = time.monotonic() + READY_S
        while not self._lines() and self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def heard(self) -> Heard:
        """What has been reported since the start; callable in every process of the run."""
        lines = self._lines()
        said = {key: value for line in lines for key, value in line.items()}
        return Heard(
            listening="listening" in said and _lives(int(said["listening"])),
            absence=said.get("absence"),
            error=said.get("error"),
            faults=tuple(line for line in lines if "what" in line),
        )

    def stop(self) -> None:
        """End the child: its pipe closes, and it is killed if that is not enough."""
        if self._process is None:
            return
        os.close(self._parent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        processes.kill(self._token, self._process)
        self._process = None

    def _lines(self) -> list[dict[str, Any]]:
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
