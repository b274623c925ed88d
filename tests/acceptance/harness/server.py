"""A process that has loaded torch once and forks for each child. In: a module to run as a program. Out: a
child.

Loading torch takes a processor 2 to 8 s, and a run starts tens of processes that need it. The server forks
before any device was opened, so each child initialises its device itself, as a new process does. What a
library reads only while it is loaded cannot change after a fork: a child with other variables than those
named in `READ_WHEN_USED` is started anew, and so is every child if loading torch has opened a device.
"""

import json
import os
import select
import socket
import subprocess
import time
import uuid
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

from harness import processes
from harness.processes import Child, Program, WorkloadError

LOAD_S = 180.0  # loading takes 2 to 8 s of a processor; a busy machine with a cold disk needs more
# Read when a device or a process group is made, and by the harness itself.
READ_WHEN_USED = (processes.TOKEN, processes.STACKS, processes.DEVICE_MODEL, processes.PATIENCE)
READ_WHEN_USED_PREFIXES = ("NCCL_", "RCCL_", "TORCH_NCCL_")
READY = "ready"


class Forked:
    """A child of the server, with the methods of `subprocess.Popen` that the harness needs."""

    def __init__(self, pid: int, status: int, what: str) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status
        self._what = what

    def __del__(self) -> None:
        os.close(self._status)

    def poll(self) -> int | None:
        """The return code; None while the child runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The return code. Raises `subprocess.TimeoutExpired`, and `WorkloadError` if the server is gone."""
        if self.returncode is not None:
            return self.returncode
        ready, _, _ = select.select([self._status], [], [], timeout)
        if not ready:
            raise subprocess.TimeoutExpired(self._what, timeout or 0.0)
        if not (said := os.read(self._status, 64)):
            raise WorkloadError(f"the process that forked {self._what} ended, so its end is not known")
        self.returncode = int(said)
        return self.returncode


class Server:
    """One server at a time; `start` starts it when it is first needed."""

    def __init__(
        self, folder: Path, free: Iterable[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        """
        Args:
            folder: For the server's output.
            free: More variables that a child may change after the fork: those that select devices.
            environment: Variables that torch has to see while it is loaded, beside those of this process.
        """
        self.folder = folder
        self._loaded_with = dict(environment or {})
        self._free = {*READ_WHEN_USED, *free}
        self._process: Child | None = None
        self._socket: socket.socket | None = None
        self._forks: bool | None = None  # None: torch is not loaded yet
        self._token = ""
        self._environment: dict[str, str] = {}

    def start(self, program: Program) -> Child:
        """Start a program in its own session, by a fork where that changes nothing.

        Raises:
            WorkloadError: The server ended or did not load torch in time.
        """
        can_fork = self.can_fork(program.environment)
        return self._fork(program) if can_fork else processes.start_program(program)

    def can_fork(self, environment: Mapping[str, str]) -> bool:
        """Whether a child with this environment may be a fork. Waits until torch is loaded, if it may."""
        self.prepare()
        names = self._environment.keys() | environment.keys()
        changed = {name for name in names if self._environment.get(name) != environment.get(name)}
        fixed = [name for name in changed - self._free if not name.startswith(READ_WHEN_USED_PREFIXES)]
        return not fixed and self._is_ready()

    def prepare(self) -> None:
        """Let the server load torch, without waiting for it."""
        if self._socket is not None and self._process is not None and self._process.poll() is not None:
            self.stop()
        if self._socket is not None:
            return
        self._token = uuid.uuid4().hex
        home = self.folder / f"server-{self._token[:8]}"
        home.mkdir(parents=True)
        self._environment = processes.environment(self._loaded_with, self._token, home)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = spawn(self._environment, home, theirs)
        theirs.close()
        self._socket, self._forks = ours, None

    def stop(self) -> None:
        """End the server, which ends its children."""
        if self._socket is None:
            return
        self._socket.close()
        self._socket = None
        try:
            assert self._process is not None
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            processes.kill(self._token, self._process)

    def _is_ready(self) -> bool:
        """Wait until torch is loaded. False, with a warning that pytest prints, if that opened a device."""
        if self._forks is None:
            said = self._receive(LOAD_S)
            self._forks = said == READY
            if not self._forks:
                warnings.warn(said, RuntimeWarning, stacklevel=2)
        return self._forks

    def _fork(self, program: Program) -> Forked:
        assert self._socket is not None
        request = {
            "module": program.module,
            "arguments": program.arguments,
            "environment": dict(program.environment),
            "stdout": str(program.stdout),
            "stderr": str(program.stderr),
        }
        # A file, because a message of a socket holds about 200 kB (net.core.wmem_default).
        file = program.stdout.with_name("request.json")
        file.write_text(json.dumps(request), encoding="utf-8")
        status, child_status = os.pipe()
        try:
            socket.send_fds(self._socket, [str(file).encode()], [child_status, *program.pass_fds])
            return Forked(int(self._receive(LOAD_S)), status, program.module)
        except (OSError, WorkloadError):
            os.close(status)
            raise
        finally:
            os.close(child_status)

    def _receive(self, timeout_s: float) -> str:
        assert self._socket is not None
        deadline = time.monotonic() + timeout_s
        ready, _, _ = select.select([self._socket], [], [], max(0.0, deadline - time.monotonic()))
        said = self._socket.recv(4096).decode() if ready else ""
        if said:
            return said
        end = "ended" if ready else f"did not answer in {timeout_s:g} s"
        last = processes.tail(self.folder / f"server-{self._token[:8]}" / "stderr.txt")
        self.stop()
        raise WorkloadError(f"the process that loads torch for others {end}:\n{last}")


def spawn(environment: Mapping[str, str], home: Path, control: socket.socket) -> Child:
    """Start the server in a new Python."""
    return processes.start(
        processes.python("-m", "harness.server_main", str(control.fileno())),
        env=environment,
        stdout=home / "stdout.txt",
        stderr=home / "stderr.txt",
        pass_fds=(control.fileno(),),
    )
