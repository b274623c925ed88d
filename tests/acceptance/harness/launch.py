"""Multi-process workloads. In: a program for torchrun. Out: the JSON line of rank 0, or why it is missing."""

import json
import re
import secrets
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import processes
from harness.processes import TimeLimitError, WorkloadError
from harness.server import Server

WORKLOADS = processes.ACCEPTANCE / "workloads"
TRAINERS = processes.ACCEPTANCE.parent.parent / "trainers"
# The first line of torchrun's report about a rank that died: "E1121 12:06:08.562000 11831
# torch/distributed/elastic/…".
TORCHRUN = re.compile(r"[EW]\d{4} .* torch/distributed/elastic/multiprocessing/api\.py")
THREADS = {"OMP_NUM_THREADS": "1"}  # of each rank; OpenMP reads it while it is loaded
# What a rank says whose own limit ended it: trainers/phases.py, workloads/collective_timing.py, torch's
# groups and stores. All of these limits grow by `workloads.time_limits`.
OWN_LIMIT = re.compile(
    r"[^\n]*(?:lasted more than \S+ s|did not reach the barrier within"
    r"|Watchdog caught collective operation timeout"
    r"|wait timeout after|Timed out waiting|timed out after)[^\n]*"
)
RANK = Path(__file__).with_name("rank.py")


def launch(
    program: str | Path,
    arguments: Sequence[str],
    *,
    nproc: int,
    environment: Mapping[str, str],
    timeout_s: float,
    folder: Path,
    server: Server | None = None,
) -> dict[str, Any]:
    """Run a program on ranks. Raises `WorkloadError` on a hang, a failed rank, or no JSON line.

    The ranks are forks of the `server` where it can fork for this environment (`harness.forked_ranks`). Else
    they are torchrun's, and each loads torch anew.
    """
    token = uuid.uuid4().hex
    home = folder / f"launch-{Path(program).stem}-{token[:8]}"
    home.mkdir(parents=True)
    place = processes.inside(home)
    recorder = {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(place / "flight-recorder-"),
    }
    variables = processes.environment({**recorder, **THREADS, **environment}, token, home)
    forks = server is not None and server.can_fork(variables)
    rank = (str(_inside(find(program))), *arguments)
    # The log folder: otherwise torchrun leaves one in /tmp.
    torchrun = (
        "--standalone",
        "--nproc-per-node",
        str(nproc),
        "--log-dir",
        str(place),
        str(_inside(RANK)),
        *rank,
    )
    started = processes.Program(
        module="harness.forked_ranks" if forks else "torch.distributed.run",
        arguments=(str(nproc), *rank) if forks else torchrun,
        environment=variables,
        stdout=home / "stdout.txt",
        stderr=home / "stderr.txt",
    )
    process = server.start(started) if server else processes.start_program(started)
    return _record_of(process, f"{program} on {nproc} ranks", token, home, timeout_s)


def as_a_user(
    program: str, arguments: Sequence[str], *, environment: Mapping[str, str], timeout_s: float, folder: Path
) -> dict[str, Any]:
    """The JSON line of `python3 -c PROGRAM ARGUMENT…`, with the PATH and the variables of a user's job.

    No variable of the suites is among them; the token, by which it is ended, has a name that is drawn.

    Raises:
        WorkloadError: It hangs, fails, or prints no such line.
    """
    token = uuid.uuid4().hex
    home = folder / f"user-{token[:8]}"
    home.mkdir(parents=True)
    told = {**processes.variables(), **environment}
    process = processes.start(
        ["python3" if processes.container() else sys.executable, "-c", program, *arguments],
        env={name: value for name, value in told.items() if not name.startswith("STACKCHECK_")}
        | {f"_{secrets.token_hex(3)}": token},
        stdout=home / "stdout.txt",
        stderr=home / "stderr.txt",
    )
    return _record_of(process, "a user's python3", token, home, timeout_s)


def _record_of(
    process: processes.Child, program: str, token: str, home: Path, timeout_s: float
) -> dict[str, Any]:
    """Wait for a program, and return its JSON line. It does not outlive this."""
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        stacks = processes.keep_stacks(home)
        last = processes.tail(home / "stdout.txt", 1) or "no output: still importing?"
        raise TimeLimitError(
            f"{program} did not end in {timeout_s:g} s, last: {last}; stacks in {home}\n{stacks}"
        ) from None
    finally:
        processes.kill(token, process)
    if code:
        last = last_output(home / "stderr.txt")
        ended = f"{program} {processes.end_of(code)}"
        if overdue := OWN_LIMIT.search(processes.end_of_file(home / "stderr.txt")):
            raise TimeLimitError(f"{ended}: {overdue[0].strip()}; output in {home}\n{last}")
        raise WorkloadError(f"{ended}; output in {home}\n{last}")
    for line in reversed(processes.end_of_file(home / "stdout.txt").splitlines()):
        if line.startswith("{") and line.endswith("}"):
            record: dict[str, Any] = json.loads(line)
            return record
    last = processes.tail(home / "stdout.txt")
    raise WorkloadError(f"{program} ended without its JSON line; output in {home}\n{last}")


def find(program: str | Path) -> Path:
    """The file of a program: an absolute path, or a name in workloads/ or trainers/."""
    for path in (Path(program), WORKLOADS / program, TRAINERS / program):
        if path.is_absolute() and path.is_file():
            return path
    raise WorkloadError(f"no such program: {program}; looked in {WORKLOADS} and {TRAINERS}")


def _inside(file: Path) -> Path:
    """Where the container has a file of the suites or the trainers, which are mounted there."""
    root = processes.ACCEPTANCE.parent.parent
    return file if processes.container() is None else Path("/stackcheck", file.relative_to(root))


def last_output(stderr: Path, lines: int = 25) -> str:
    """The last output of the ranks. If no line has a rank's prefix, also the end of torchrun's own output."""
    output = processes.end_of_file(stderr).splitlines()
    if prefixed := [line for line in output if line.startswith("[rank")]:
        return "\n".join(prefixed[-lines:])
    end = next((number for number, line in enumerate(output) if TORCHRUN.match(line)), len(output))
    return "\n".join([*output[max(0, end - lines) : end], *output[end:][-lines:]])
