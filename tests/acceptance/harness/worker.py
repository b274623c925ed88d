"""The parent's half of `on_device`. In: a function's name, JSON arguments.
Out: its JSON result, or a failure.

The worker process lives as long as the same devices are leased, because importing torch and creating a device
context take seconds. It is replaced after a crash or a timeout.
"""

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
from harness.processes import TimeLimitError, WorkloadError
from harness.server import Server

LONGEST_BYTES = 64 << 20  # of an answer


@dataclass
class _Child:
    process: processes.Child
    requests: int
    answers: int
    token: str
    folder: Path
    buffered: bytes = b""


class Worker:
    """One child at a time; `call` starts it if no child runs."""

    def __init__(self, folder: Path, server: Server | None = None) -> None:
        """
        Args:
            folder: For the output of each child.
            server: Forks the child where that changes nothing; without it each child is a new Python.
        """
        self.folder = folder
        self.server = server
        self._child: _Child | None = None
        self._environment: Mapping[str, str] = {}

    def call(
        self, function: str, kwargs: Mapping[str, object], *, environment: Mapping[str, str], timeout_s: float
    ) -> Any:
        """Run `module:name` in the child and return its result. Raises `WorkloadError`."""
        if self._child is not None and self._environment != environment:
            self.stop()
        if self._child is None:
            self._environment = dict(environment)
            self._child = _start(self.folder, environment, self.server)
        child = self._child
        request = json.dumps({"function": function, "kwargs": dict(kwargs)}).encode() + b"\n"
        try:
            os.write(child.requests, request)
            answer = _read_line(child, time.monotonic() + timeout_s)
        except TimeoutError:
            raise TimeLimitError(self._hang(child, function, timeout_s)) from None
        except (BrokenPipeError, EOFError):
            raise WorkloadError(self._crash(child, function)) from None
        if answer.get("ok") is not True:
            raise WorkloadError(f"{function} raised in the worker:\n{answer.get('error')}")
        return answer["result"]

    @property
    def pid(self) -> int | None:
        """The process id of the living child on this machine; None: no child, or one of a container."""
        process = self._child.process if self._child else None
        lives = process is not None and process.poll() is None and processes.container() is None
        return getattr(process, "pid", None) if lives else None

    def stop(self) -> None:
        """End the child by closing its pipe; kill it if it does not end."""
        if (child := self._child) is None:
            return
        self._child = None
        os.close(child.requests)
        try:
            child.process.wait(5)
        except (subprocess.TimeoutExpired, WorkloadError):
            processes.kill(child.token, child.process)
        os.close(child.answers)

    def _hang(self, child: _Child, function: str, timeout_s: float) -> str:
        found = processes.keep_stacks(child.folder)
        left = self._discard(child)
        stuck = f"\npids {left} did not die: they are stuck in the driver" if left else ""
        return f"{function} did not answer in {timeout_s:g} s; stacks in {child.folder}{stuck}\n{found}"

    def _crash(self, child: _Child, function: str) -> str:
        self._discard(child)
        end = processes.end_of(child.process.wait(0))
        last = processes.tail(child.folder / "stderr.txt")
        stack = processes.tail_inside(child.folder / "worker.stack.txt", 40)
        return f"the worker {end} in {function}; output in {child.folder}\n{last}\n{stack}"

    def _discard(self, child: _Child) -> list[int]:
        self._child = None
        os.close(child.requests)
        os.close(child.answers)
        time.sleep(0.1)  # a crash has its own exit code; do not hide it behind our signal
        child.process.poll()
        return processes.kill(child.token, child.process)


def _start(folder: Path, environment: Mapping[str, str], server: Server | None) -> _Child:
    token = uuid.uuid4().hex
    home = folder / f"worker-{token[:8]}"
    home.mkdir(parents=True)
    child_reads, requests = os.pipe()
    answers, child_writes = os.pipe()
    program = processes.Program(
        module="harness.worker_main",
        environment=processes.environment(environment, token, home),
        stdout=home / "stdout.txt",
        stderr=home / "stderr.txt",
        pass_fds=(child_reads, child_writes),
    )
    try:
        process = server.start(program) if server else processes.start_program(program)
    finally:
        os.close(child_reads)
        os.close(child_writes)
    return _Child(process=process, requests=requests, answers=answers, token=token, folder=home)


def _read_line(child: _Child, deadline: float) -> dict[str, Any]:
    line, child.buffered = processes.line_of(child.answers, child.buffered, deadline, LONGEST_BYTES)
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WorkloadError(f"the answer cannot be read: {type(error).__name__}: {error}") from None
    if not isinstance(answer, dict) or not ({"ok", "result"} <= answer.keys() or "error" in answer):
        raise WorkloadError("the answer has neither a result nor an error")
    return answer
