"""Start train.py in fresh processes, here or on another system, and bring back its record.

In: a system as text, "NAME: --ranks 2 --device cpu" or "NAME: @COMMAND", and flags of train.py. Out: the
record, or RunError. A system on this host is a number of ranks and flags; any other is the command that
starts train.py there, and the flags are appended to it (`@ssh host torchrun --nproc-per-node 8 train.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

from errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

Given: TypeAlias = argparse.Namespace  # options of the programs that start runs
Parser: TypeAlias = argparse.ArgumentParser
TRAIN = Path(__file__).resolve().parents[1] / "train.py"
# Inputs are drawn on the CPU, so that any device starts with the same weights; nothing runs that no curve
# needs.
COMPARABLE = ["--portable", "--no-digest", "--no-backend-check"]
TRACEBACK = "Traceback (most recent call last):"
REPORTED = "traceback : "  # before the line of a rank in torchrun's report
LINKS = ("The above exception was the direct cause of", "During handling of the above exception")
STACK_S = 0.3  # between the stacks of two ranks
RUNNING: set[subprocess.Popen[bytes]] = set()
STOPPED = threading.Event()
STARTING: set[int] = set()  # threads that are making a process which RUNNING has not yet
GRACE_S = 15.0  # torchrun gives its ranks 30 s after SIGTERM; after a time limit there is nothing to save


class RunError(RuntimeError):
    """A run ended without a record. `code`: its exit code; None if it did not end in time."""

    def __init__(self, message: str, code: int | None) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class System:
    """Where a job runs: a name, and the start of its command line."""

    name: str
    command: tuple[str, ...]


def parse_system(text: str) -> System:
    """Parse a system's text; the module's docstring has its form."""
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


def on_gpu(system: System, gpu: str | None) -> System:
    """The system with this one GPU of the host; HIP reads this variable too."""
    chosen = () if gpu is None else ("env", f"CUDA_VISIBLE_DEVICES={gpu}")
    return System(system.name, (*chosen, *system.command))


def stop_runs_on_sigterm() -> None:
    """SIGTERM to this program ends its runs too: each has a session of its own, and would hold its GPUs.

    One that comes while a run is made waits until the run can be ended: `_leave_if_stopped` looks for it.
    """

    def stop(_signal: int, _frame: object) -> None:
        STOPPED.set()
        for process in tuple(RUNNING):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
        if threading.get_ident() in STARTING:
            return
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)


def run(system: System, flags: list[str], *, timeout_s: float) -> dict[str, Any]:
    """The record of this job on this system. Raises RunError."""
    if STOPPED.is_set():
        raise RunError(f"{system.name} was not started: SIGTERM", None)
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "stdout", Path(folder) / "stderr"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = _started([*system.command, *flags], stdout, stderr)
        try:
            _leave_if_stopped(system)
            code: int | None = process.wait(timeout_s)
            said = out.read_text(errors="replace")
        except subprocess.TimeoutExpired:
            code, said = None, out.read_text(errors="replace")  # as it was at the time limit, before SIGTERM
            ask_for_stacks(process)
        finally:
            end(process)
            RUNNING.discard(process)
        lines = said.splitlines()
        found = next((line for line in reversed(lines) if line.startswith("{")), None)
        if found is None or code is None:
            raise RunError(
                _why(system, code, lines, err.read_text(errors="replace"), timeout_s), _code(code, err)
            )
    record: dict[str, Any] = json.loads(found)
    return record


def _started(command: list[str], stdout: BinaryIO, stderr: BinaryIO) -> subprocess.Popen[bytes]:
    """A process that RUNNING has: no SIGTERM of `stop_runs_on_sigterm` comes between the two."""
    STARTING.add(threading.get_ident())
    try:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, start_new_session=True)
        RUNNING.add(process)
    finally:
        STARTING.discard(threading.get_ident())
    return process


def _leave_if_stopped(system: System) -> None:
    """Raise what a SIGTERM that came while the run was made left undone; the caller ends the run."""
    if not STOPPED.is_set():
        return
    if threading.current_thread() is threading.main_thread():
        raise SystemExit(128 + signal.SIGTERM)
    raise RunError(f"{system.name} was ended as it began: SIGTERM", None)


def ask_for_stacks(process: subprocess.Popen[bytes]) -> None:
    """Have every rank on this host write its Python stacks to stderr (phases.py)."""
    for pid in _children(process.pid) or [process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
            time.sleep(STACK_S)  # one after the other: they share a file


def end(process: subprocess.Popen[bytes]) -> None:
    """End the run and its ranks: SIGTERM to torchrun, which ends its ranks; then SIGKILL to what is left."""
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
    """Direct children.

    A signal to the process group is not enough: torchrun starts each rank in its own session.
    """
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except FileNotFoundError:
        return []
    return [int(word) for word in text.split()]


def _code(code: int | None, err: Path) -> int | None:
    """The exit code of the rank that failed first: torchrun prints it, and itself always ends with 1."""
    if code is None:
        return None
    # The other ranks failed because of the one that torchrun calls the root cause.
    _, _, first = err.read_text(errors="replace").rpartition("Root Cause")
    said = [line for line in first.splitlines() if "exitcode  :" in line]
    return int(said[0].split(":")[1].split()[0]) if said else code


def _why(system: System, code: int | None, lines: list[str], errors: str, timeout_s: float) -> str:
    phase = next((line for line in reversed(lines) if line.startswith("[")), None)
    where = f"in phase {phase}" if phase else "before its first phase"
    ended = f"did not end in {timeout_s:g} s" if code is None else f"ended with {code}"
    said = errors.splitlines()
    own = [line for line in said if line.startswith(("train.py:", "rank ")) or "train.py: error: " in line]
    reported = (line.partition(REPORTED) for line in said)
    own = own or [line for _, _, line in reported if line.startswith("train.py:")][:1]
    if code is None:
        own = own or said[:120]  # every rank's stacks come before torchrun's report
    last = "\n".join(own or raised(said) or said[-15:])
    return f"{system.name} {ended} {where}\n{last}"


def raised(lines: list[str], keep: int = 30) -> list[str]:
    """The end of the first traceback, with its message: a rank's error comes before torchrun's report of it.

    Of chained exceptions it is the last one, which says what the first one meant for the run.
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


def parser(about: str | None) -> Parser:
    """A parser whose help begins with the docstring of its program."""
    return Parser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


def exit_code(program: str, work: Callable[[], int]) -> int:
    """The exit code of this work; a refusal is 2 and a run without a record 1, each with a line on stderr."""
    try:
        return work()
    except (RefusedError, RunError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2 if isinstance(error, RefusedError) else 1


def judged(result: dict[str, Any], out: Path | None) -> int:
    """Print a result, to `out` too; 1 if its verdict has problems."""
    line = json.dumps(result)
    if out:
        out.write_text(line + "\n")
    print(line)
    return 1 if result["verdict"]["problems"] else 0


def timestamp() -> str:
    """Today's date in UTC, for a reference's provenance."""
    return time.strftime("%Y-%m-%d", time.gmtime())
