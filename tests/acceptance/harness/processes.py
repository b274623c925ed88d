"""Child processes that can always be ended, and whose Python stacks can be read. In: a command.
Out: how it ended.

torchrun starts each rank in its own session, so killing a process group is not enough. Every child carries a
token in its environment, and this process may signal and kill whatever carries it.

On a bare machine children are started by this process. In a run on an image this process is outside the
container, and `enter` says through which agent children are started, read and killed in it.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from harness import bytecode

if TYPE_CHECKING:
    from harness.inside import Inside

ACCEPTANCE = Path(__file__).resolve().parent.parent
TOKEN = "STACKCHECK_CHILD"
DEVICE_MODEL = "STACKCHECK_DEVICE_MODEL"  # what trainers/peaks.py asks for; a name of devices.json
# The factor on a child's time limits, which were set on up to four H200s; workloads.time_limits reads it.
PATIENCE = "STACKCHECK_TIME_LIMIT_FACTOR"
STACKS = "STACKCHECK_STACKS"
STACK_SIGNAL = signal.SIGUSR1
STACK_LINES = 25  # of each process, in a message
READ_BYTES = 1 << 20  # of a child's output, from its end
NUMBER = "@fd"  # stands in a command for the number that a descriptor has in the child

_entered: "list[Inside]" = []


class WorkloadError(Exception):
    """The workload raised, crashed or hung; the message says which, with its output or stacks."""


class TimeLimitError(WorkloadError):
    """The clock ended the workload: the suites', or its own, whose limit `workloads.time_limits` scales."""


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


def enter(container: "Inside") -> None:
    """From now on start every child in a container."""
    _entered[:] = [container]


def container() -> "Inside | None":
    """Where children run; None: on this machine."""
    return _entered[0] if _entered else None


def variables() -> MutableMapping[str, str]:
    """The variables that children inherit."""
    return _entered[0].environment if _entered else os.environ


def inside(path: Path) -> Path:
    """Where children have a folder of this run."""
    return _entered[0].path(path) if _entered else path


def environment(extra: Mapping[str, str], token: str, stacks: Path) -> dict[str, str]:
    """The environment of a child:
    this process's and `extra`, the suites' import path, and where its stacks go.
    """
    suites = "/stackcheck/tests/acceptance" if _entered else str(ACCEPTANCE)
    path = os.pathsep.join(filter(None, (suites, variables().get("PYTHONPATH"))))
    cached = _entered[0].has_own_bytecode if _entered else bytecode.is_kept()
    ours = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "" if cached else "1", "PYTHONUNBUFFERED": "1"}
    inherited = {name: value for name, value in variables().items() if not name.startswith("PYTEST_")}
    return {**inherited, **ours, **extra, TOKEN: token, STACKS: str(inside(stacks))}


def start(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    stdout: Path,
    stderr: Path,
    pass_fds: Sequence[int] = (),
) -> Child:
    """Start a child in its own session, with its output in files. `numbers` stand for its descriptors."""
    with stdout.open("ab") as out, stderr.open("ab") as err:
        if _entered:
            outputs = {"stdout": out.fileno(), "stderr": err.fileno()}
            return _entered[0].start(command, env=env, pass_fds=pass_fds, **outputs)
        return subprocess.Popen(
            with_numbers(command, pass_fds),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
        )


def numbers(count: int) -> tuple[str, ...]:
    """What stands in a command for the numbers of the child's first descriptors."""
    return tuple(f"{NUMBER}{number}" for number in range(count))


def with_numbers(command: Sequence[str], fds: Sequence[int]) -> list[str]:
    """A command with the numbers of descriptors in their places."""
    known = dict(zip(numbers(len(fds)), map(str, fds), strict=True))
    return [known.get(word, word) for word in command]


def start_program(program: Program) -> Child:
    """Start a program in a new Python."""
    words = (*numbers(len(program.pass_fds)), *program.arguments)
    return start(
        python("-m", program.module, *words),
        env=program.environment,
        stdout=program.stdout,
        stderr=program.stderr,
        pass_fds=program.pass_fds,
    )


def carrying(token: str) -> list[int]:
    """The pids of living processes that carry this token, whatever the variable's name."""
    wanted = f"={token}".encode()
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return [pid for pid in pids if any(line.endswith(wanted) for line in _environ(pid))]


def keep_stacks(stacks: Path, *, wait_s: float = 3.0) -> str:
    """The Python stacks of every process that offered them (`harness.stacks`), as text."""
    if _entered:
        return _entered[0].text("stacks", folder=str(inside(stacks)))
    asked = [path for path in sorted(stacks.glob("*.pid")) if _signal(int(path.read_text()), STACK_SIGNAL)]
    (stacks / "dump").touch()  # harness.rank writes the collective flight recorder when it sees this
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline and not all(_stack_file(path).stat().st_size for path in asked):
        time.sleep(0.05)
    time.sleep(0.3)  # stacks are written frame by frame
    return "\n".join(f"--- {path.stem}\n{_innermost(_stack_file(path))}" for path in asked)


def kill(token: str, child: Child | None = None, *, wait_s: float = 10.0) -> list[int]:
    """Kill every process with the token. Returns the pids that survived, stuck in the driver."""
    if _entered:
        said = _entered[0].ask("kill", token=token).get("alive")
        alive = [pid for pid in said if isinstance(pid, int)] if isinstance(said, list) else []
        if child is not None and not alive:
            with contextlib.suppress(WorkloadError, subprocess.TimeoutExpired):  # its end may stay unknown
                child.wait(wait_s)
        return alive
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


def line_of(pipe: int, begun: bytes, deadline: float, longest: int) -> tuple[bytes, bytes]:
    """The next line of a pipe after what has `begun`, and what follows it.

    Raises `TimeoutError` after the deadline, and `EOFError` if the child closed it or wrote too many bytes.
    """
    while b"\n" not in begun:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError
        chunk = os.read(pipe, 1 << 20)
        if not chunk or len(begun) > longest:
            raise EOFError
        begun += chunk
    line, _, rest = begun.partition(b"\n")
    return line, rest


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a child's output."""
    return "\n".join(end_of_file(path).splitlines()[-lines:])


def tail_inside(path: Path, lines: int) -> str:
    """The last lines of a file that a child wrote by itself."""
    if _entered:
        return _entered[0].text("tail", path=str(inside(path.parent) / path.name), lines=lines)
    return tail(path, lines)


def end_of_file(path: Path) -> str:
    """The last mebibyte of a file; a child may write any amount. Empty if there is no file."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - READ_BYTES))
        return file.read(READ_BYTES).decode(errors="replace")


def lives(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    if _entered:
        return _entered[0].ask("lives", pid=pid).get("lives") is True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def end_of(code: int) -> str:
    """How a process with this return code ended, in words."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def python(*arguments: str) -> list[str]:
    """The command that runs this interpreter with these arguments."""
    return [_entered[0].executable if _entered else sys.executable, *arguments]


def _innermost(stack: Path) -> str:
    """The start of a stack: faulthandler writes the innermost call first. The file has all of it."""
    lines = stack.read_text().splitlines()
    more = [f"  … {len(lines) - STACK_LINES} more lines in {stack}"] if len(lines) > STACK_LINES else []
    return "\n".join([*lines[:STACK_LINES], *more])


def _stack_file(pid_file: Path) -> Path:
    return pid_file.with_suffix(".stack.txt")


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
