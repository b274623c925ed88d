"""Run shell commands at the same time. In: the commands. Out: 0 only where each of them gave 0.

Their outputs come one after the other, in the order of the commands, each from when the one before has ended.
Nothing is left running: whoever ends this early ends the commands as Ctrl-C would, and they clean up.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 60.0  # for what has to be taken away: containers, daemons, mounts
POLL_S = 0.1


class Command:
    """One command, in a process group of its own, its output in a file."""

    def __init__(self, text: str, log: Path) -> None:
        self.text = text
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", text],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.output = log.open("rb")

    def succeeded(self) -> bool:
        """Show its output up to its end."""
        ended = False
        while not ended:
            ended = self.process.poll() is not None  # asked first: what it wrote last is shown too
            shutil.copyfileobj(self.output, sys.stdout.buffer)
            sys.stdout.flush()
            time.sleep(POLL_S)
        if self.process.returncode:
            print(f"== exit code {self.process.returncode}: {self.text}", flush=True)
        return self.process.returncode == 0

    def end(self) -> None:
        """Interrupt whoever is left of it, and kill who does not heed that."""
        self.output.close()
        self._signal(signal.SIGINT)
        deadline = time.monotonic() + PATIENCE_S
        while self._signal(0) and time.monotonic() < deadline:
            self.process.poll()
            time.sleep(POLL_S)
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
            return True
        return False


class Interruption:
    """Whatever ends us ends the commands: the first signal, once a command that starts is known."""

    def __init__(self) -> None:
        self.number = 0
        self.holding = False

    def __call__(self, number: int, _frame: object) -> None:
        """Hear a signal."""
        if self.number:
            return  # the commands are being ended: a second signal must not leave one of them running
        self.number = number
        if not self.holding:
            raise SystemExit(128 + number)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep a signal that comes meanwhile until the end of the block."""
        self.holding = True
        yield
        self.holding = False
        if self.number:
            raise SystemExit(128 + self.number)


def together(texts: list[str], interruption: Interruption) -> bool:
    """Run all of them to their end, also when one fails: each failure is shown."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        commands = []
        for number, text in enumerate(texts):
            with interruption.held():
                commands.append(Command(text, Path(folder, str(number))))
                stack.callback(commands[-1].end)
        ended = [command.succeeded() for command in commands]
    return all(ended)


if __name__ == "__main__":
    interruption = Interruption()
    # SIGINT too: where it is ignored, as behind a shell's `&`, the commands would not hear it either.
    for known in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(known, interruption)
    sys.exit(not together(sys.argv[1:], interruption))
