"""Processes that judge cases one after the other, and end where a case ends them. In: a function, jobs.

Out: each job with its answer, or with how its process ended; the other jobs go on in a new process.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import resource
import signal
import time
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from workloads import device
from workloads.generated_elsewhere import DeviceLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

MOST_S = {"cpu": 300, "cuda": 60}  # of one case, on a busy machine
MOST_BYTES = 2 * 2**30  # of one process's memory, beyond what it has when it starts
MOST_DEVICE_BYTES = 4 * 2**30  # of one process
MOST_SHARE = 0.8  # of a device's memory, of all processes
MOST_ENDED = 100  # processes; then something else is wrong
START_S = 120


@dataclass(frozen=True)
class Ended:
    """How a process ended in a job."""

    words: str


@dataclass
class _Process:
    """A process that has a job, and the way to it."""

    process: Any
    way: connection.Connection
    job: Any
    started: bool = False

    def give(self, job: Any) -> None:
        """Let it do another job."""
        self.job = job
        self.way.send(("job", job))

    def end(self, *, by_force: bool) -> None:
        """End it, and wait until it has ended."""
        if by_force:
            self.process.kill()
        with contextlib.suppress(OSError):
            self.way.send(("end", None))
        self.process.join(START_S)
        self.way.close()


_ALONE: list[bool] = []
_NO_JOB = object()


def each(
    function: Callable[[Any], Any], jobs: Iterable[Any], processes: int, stop: float = float("inf")
) -> Iterator[tuple[Any, Any]]:
    """What a function gives for each job, as soon as it is there.

    A job is asked for when a process is free. What runs at the clock's `stop` is ended, and has no answer.
    Raises `RuntimeError` if processes do not start or too many end.
    """
    waiting, ended = iter(jobs), 0
    running = [_start(function, processes, job) for job in itertools.islice(waiting, processes)]
    try:
        while running and time.monotonic() < stop:
            left = max(0.0, min(stop - time.monotonic(), START_S))
            ready = connection.wait([one.way for one in running], left)
            if not ready and left == START_S and not any(one.started for one in running):
                raise RuntimeError(f"no process for generated cases started in {START_S} s")
            for one in [one for one in running if one.way in ready]:
                kind, said = _answer(one)
                if kind == "started":
                    one.started = True
                    continue
                if not one.started:
                    raise RuntimeError(f"a process for generated cases does not start: {said.words}")
                yield one.job, said
                job = next(waiting, _NO_JOB)
                if kind == "said" and job is not _NO_JOB:
                    one.give(job)
                    continue
                running.remove(one)
                one.end(by_force=False)
                ended += kind != "said"
                if ended > MOST_ENDED:
                    raise RuntimeError(f"{ended} processes ended, the last one: {said.words}")
                if job is not _NO_JOB:
                    running.append(_start(function, processes, job))
    finally:
        for one in running:
            one.end(by_force=True)


def _start(function: Callable[[Any], Any], processes: int, job: Any) -> _Process:
    """A copy of this process, which has torch loaded; with a GPU a new one: its context has no copies."""
    context: Any = multiprocessing.get_context("fork" if device().type == "cpu" else "spawn")
    way, its = context.Pipe()
    process = context.Process(target=_serve, args=(its, function, processes, os.getpid()), daemon=True)
    process.start()
    its.close()
    one = _Process(process, way, job)
    one.give(job)
    return one


def _answer(one: _Process) -> tuple[str, Any]:
    try:
        kind, said = one.way.recv()
    except (EOFError, ConnectionError):
        one.process.join(START_S)
        return "ended", Ended(f"it ended its process: {_end_of(one.process.exitcode)}")
    return kind, Ended(f"it ended its device's context: {said}") if kind == "lost" else said


def _end_of(code: int | None) -> str:
    if code == -signal.SIGALRM:
        return f"it took over {_most_s()} s"
    return signal.Signals(-code).name if code and code < 0 else f"exit code {code}"


def _most_s() -> int:
    return MOST_S[device().type]


def _serve(way: connection.Connection, function: Callable[[Any], Any], processes: int, parent: int) -> None:
    alone(processes)
    way.send(("started", None))
    while _waited(way, parent):
        kind, job = way.recv()
        if kind == "end":
            return
        try:
            answer = function(job)
        except DeviceLostError as lost:
            way.send(("lost", str(lost)))
            os._exit(1)  # an end in order would wait for the context
        way.send(("said", answer))


def _waited(way: connection.Connection, parent: int) -> bool:
    """Wait for a message; false if the process that sends them is gone."""
    while not way.poll(1):
        if os.getppid() != parent:
            return False
    return True


def alone(processes: int) -> None:
    """One thread, and bounds on memory: an operator may have the square of its operands in between.

    Its cases end in time, or it ends: `limited`.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    torch.set_num_threads(1)
    if device().type != "cpu":
        torch.zeros(1, device=device())
        whole = torch.cuda.get_device_properties(device()).total_memory
        share = min(MOST_SHARE / processes, MOST_DEVICE_BYTES / whole)
        torch.cuda.set_per_process_memory_fraction(share)
    # A GPU's driver takes far more addresses than memory, so the bound is on what can be written.
    most = _written() + MOST_BYTES * (1 if device().type == "cpu" else 2)  # a driver has libraries of its own
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    _ALONE[:] = [True]


def _written() -> int:
    """The bytes of this process that are its own to write: not every kernel keeps a count of them."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    ranges = [one.split()[0].split("-") for one in lines if one.split()[1][1::2] == "wp"]
    return sum(int(end, 16) - int(start, 16) for start, end in ranges)


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """End this process, if it runs cases alone, where one takes too long: no kernel hears an exception."""
    signal.alarm(_most_s() if _ALONE else 0)
    try:
        yield
    finally:
        signal.alarm(0)
