"""Child processes that can always be ended, and whose Python stacks can be read. In: a command. Out: how it
ended.

torchrun starts each rank in its own session, so killing a process group is not enough. Every child carries a
token in its environment, and a process that carries it is ours to signal and to kill.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from harness import bytecode

ACCEPTANCE = Path(__file__).resolve().parent.parent
TOKEN = "STACKCHECK_CHILD"
DEVICE_MODEL = "STACKCHECK_DEVICE_MODEL"  # what trainers/peaks.py asks for; a name of devices.json
# The factor on a child's time limits, which were set on up to four H200s; workloads.time_limits reads it.
PATIENCE = "STACKCHECK_TIME_LIMIT_FACTOR"
STACKS = "STACKCHECK_STACKS"
STACK_SIGNAL = signal.SIGUSR1
STACK_LINES = 25  # of each process, in a message


class WorkloadError(Exception):
    """The workload raised, crashed or hung; the message says which, with its output or stacks."""


class Child(Protocol):
    """A child process, whether it was started anew or forked by `harness.server`."""

    returncode: int | None

    def poll(self) -> int | None:
        """The return code; None while the child runs."""

    def wait(self, timeout: float | None = None) -> int:
        """The return code. Raises `subprocess.TimeoutExpired`."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a child runs: `python -m MODULE FD… ARGUMENT…`, with its output in files."""

    module: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str]
    stdout: Path
    stderr: Path
    pass_fds: tuple[int, ...] = ()


def environment(extra: Mapping[str, str], token: str, stacks: Path) -> dict[str, str]:
    """The environment of a child: ours and `extra`, the suites on its import path, and where its stacks
    go.
    """
    path = os.pathsep.join(filter(None, (str(ACCEPTANCE), os.environ.get("PYTHONPATH"))))
    ours = {
        "PYTHONPATH": path,
        "PYTHONDONTWRITEBYTECODE": "" if bytecode.is_kept() else "1",
        "PYTHONUNBUFFERED": "1",
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {**inherited, **ours, **extra, TOKEN: token, STACKS: str(stacks)}


def start(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    stdout: Path,
    stderr: Path,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a child in its own session, with its output in files."""
    with stdout.open("ab") as out, stderr.open("ab") as err:
        return subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
        )


def start_program(program: Program) -> subprocess.Popen[bytes]:
    """Start a program in a new Python."""
    words = (*map(str, program.pass_fds), *program.arguments)
    return start(
        python("-m", program.module, *words),
        env=program.environment,
        stdout=program.stdout,
        stderr=program.stderr,
        pass_fds=program.pass_fds,
    )


def carrying(token: str) -> list[int]:
    """The pids of living processes that carry this token."""
    wanted = f"{TOKEN}={token}".encode()
    return [pid for pid in _pids() if wanted in _environ(pid)]


def keep_stacks(stacks: Path, *, wait_s: float = 3.0) -> str:
    """The Python stacks of every process that offered them (`harness.stacks`), as text."""
    asked = [path for path in sorted(stacks.glob("*.pid")) if _signal(int(path.read_text()), STACK_SIGNAL)]
    (stacks / "dump").touch()  # harness.rank writes the collective flight recorder when it sees this
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline and not all(_stack_file(path).stat().st_size for path in asked):
        time.sleep(0.05)
    time.sleep(0.3)  # stacks are written frame by frame
    return "\n".join(f"--- {path.stem}\n{_innermost(_stack_file(path))}" for path in asked)


def kill(token: str, child: Child | None = None, *, wait_s: float = 10.0) -> list[int]:
    """Kill every process with the token. Returns the pids that survived, stuck in the driver."""
    deadline = time.monotonic() + wait_s
    while (alive := carrying(token)) and time.monotonic() < deadline:
        for pid in alive:
            _signal(pid, signal.SIGKILL)
        if child is not None:
            child.poll()
        time.sleep(0.05)
    if child is not None and not alive:
        child.wait(wait_s)
    return alive


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a child's output."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""


def end_of(code: int) -> str:
    """How a process with this return code ended, in words."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def python(*arguments: str) -> list[str]:
    """The command that runs this interpreter with these arguments."""
    return [sys.executable, *arguments]


def _innermost(stack: Path) -> str:
    """The start of a stack: faulthandler writes the innermost call first. The file has all of it."""
    lines = stack.read_text().splitlines()
    more = [f"  … {len(lines) - STACK_LINES} more lines in {stack}"] if len(lines) > STACK_LINES else []
    return "\n".join([*lines[:STACK_LINES], *more])


def _stack_file(pid_file: Path) -> Path:
    return pid_file.with_suffix(".stack.txt")


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it ended, is a zombie, or belongs to another user: not ours
        return []


def _signal(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
