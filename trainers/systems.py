"""Where jobs run. In: "NAME: --ranks 2 --device cpu", or "NAME: @COMMAND". Out: the record of a run there.

A system of this host is a number of ranks and flags of train.py; any other is the command that starts
train.py there, to which the job's flags are appended (`@ssh host torchrun --nproc-per-node 8 train.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRAIN = Path(__file__).with_name("train.py")
TRACEBACK = "Traceback (most recent call last):"
LINKS = ("The above exception was the direct cause of", "During handling of the above exception")
STACK_S = 0.3
GRACE_S = 15.0  # torchrun gives its ranks 30 s to hear SIGTERM; nothing is to be saved after a time limit


class RunError(RuntimeError):
    """A run ended without a record; `code` is its exit code, None when it did not end in time."""

    def __init__(self, message: str, code: int | None) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class System:
    """A name, and the start of the command line."""

    name: str
    command: tuple[str, ...]


def system(text: str) -> System:
    """Parse a description; see the module."""
    name, _, rest = text.partition(":")
    words = shlex.split(rest)
    if words and words[0].startswith("@"):
        return System(name, (words[0][1:], *words[1:]))
    ranks = "1"
    if "--ranks" in words:
        at = words.index("--ranks")
        ranks = words[at + 1]
        del words[at : at + 2]
    return System(name, (*torchrun(ranks), *words))


def torchrun(ranks: str | int) -> tuple[str, ...]:
    """The start of a command line on this host, up to train.py's flags."""
    run = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")
    return (*run, "--nproc-per-node", str(ranks), str(TRAIN))


def run(where: System, flags: list[str], *, timeout_s: float) -> dict[str, Any]:
    """The record of this job on this system. Raises RunError."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "stdout", Path(folder) / "stderr"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                [*where.command, *flags], stdout=stdout, stderr=stderr, start_new_session=True
            )
        try:
            code: int | None = process.wait(timeout_s)
            said = out.read_text(errors="replace")
        except subprocess.TimeoutExpired:
            code, said = None, out.read_text(errors="replace")  # before it hears that it has to end
            ask_for_stacks(process)
        finally:
            end(process)
        lines = said.splitlines()
        found = next((line for line in reversed(lines) if line.startswith("{")), None)
        if found is None or code is None:
            raise RunError(
                _why(where, code, lines, err.read_text(errors="replace"), timeout_s), _code(code, err)
            )
    return json.loads(found)


def ask_for_stacks(process: subprocess.Popen) -> None:
    """Have every rank on this host write its Python stacks to stderr (phases.py)."""
    for pid in _children(process.pid) or [process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
            time.sleep(STACK_S)  # one after the other: they share a file


def end(process: subprocess.Popen) -> None:
    """End what was started, its ranks included: SIGTERM to torchrun, which ends them; then SIGKILL."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    children = _children(process.pid)
    for pid in (*children, process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _children(pid: int) -> list[int]:
    """Direct children: torchrun gives each rank a session of its own, so its group is not enough."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except FileNotFoundError:
        return []
    return [int(word) for word in text.split()]


def _code(code: int | None, err: Path) -> int | None:
    """The first failed rank's own exit code: torchrun ends with 1 whatever they said, and prints it."""
    if code is None:
        return None
    first = err.read_text(errors="replace").rpartition("Root Cause")[2]  # others end with what that caused
    said = [line for line in first.splitlines() if "exitcode  :" in line]
    return int(said[0].split(":")[1].split()[0]) if said else code


def _why(where: System, code: int | None, lines: list[str], errors: str, timeout_s: float) -> str:
    phase = next((line for line in reversed(lines) if line.startswith("[")), "no phase: still importing")
    ended = f"did not end in {timeout_s:g} s" if code is None else f"ended with {code}"
    own = [line for line in errors.splitlines() if line.startswith(("train.py:", "rank "))]
    if code is None:
        own = own or errors.splitlines()[:120]  # every rank's stacks come before torchrun's own words
    last = "\n".join(own or raised(errors.splitlines()) or errors.splitlines()[-15:])
    return f"{where.name} {ended} in phase {phase}\n{last}"


def raised(lines: list[str], keep: int = 30) -> list[str]:
    """The end of the first traceback: what a rank died of comes before torchrun's, which says only that.

    Of exceptions that caused each other it is the last one's, which says what that meant for the run.
    """
    first = next((line for line in lines if TRACEBACK in line), None)
    if first is None:
        return []
    prefix = first.partition(TRACEBACK)[0]  # torch puts [rank0]: before each line of some
    own = [line for line in lines[lines.index(first) :] if line.startswith(prefix)]
    begin = _last_linked(own, prefix + TRACEBACK)
    inside = itertools.takewhile(lambda line: line.startswith(f"{prefix}  "), own[begin + 1 :])
    end = begin + 1 + len(list(inside))
    message = itertools.takewhile(lambda line: TRACEBACK not in line, own[end : end + 10])
    return [*own[max(begin, end - keep) : end], *message]


def _last_linked(own: list[str], title: str) -> int:
    """Where the last traceback of the first chain begins."""
    begins = [number for number, line in enumerate(own) if line.startswith(title)]
    last = 0
    for before, after in itertools.pairwise(begins):
        if not any(link in line for line in own[before:after] for link in LINKS):
            break
        last = after
    return last


def timestamp() -> str:
    """Today, for provenance."""
    return time.strftime("%Y-%m-%d", time.gmtime())
