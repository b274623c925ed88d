"""A process that has loaded torch once and forks for each child. In: a module to run as a program.
Out: a child.

Loading torch takes a processor 2 to 8 s, and a run starts tens of processes that need it. The server forks
before any device was opened, so each child initialises its device itself, as a new process does. What a
library reads only while it is loaded cannot change after a fork: a child with other variables than those
named in `READ_WHEN_USED` is started anew, and so is every child if loading torch has opened a device.
"""

import fcntl
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

from harness import forked, processes
from harness.inside import Forked
from harness.processes import Child, Program, WorkloadError

LOAD_S = 180.0  # loading takes 2 to 8 s of a processor; a busy machine with a cold disk needs more
# Read when a device or a process group is made, and by the harness itself.
READ_WHEN_USED = (processes.TOKEN, processes.STACKS, processes.DEVICE_MODEL, processes.PATIENCE)
READ_WHEN_USED_PREFIXES = ("NCCL_", "RCCL_", "TORCH_NCCL_")
READY, NOT_FORKED = "ready", "children are not forked"


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
        forked = self._fork(program) if self.can_fork(program.environment) else None
        return forked or processes.start_program(program)

    def can_fork(self, environment: Mapping[str, str]) -> bool:
        """Wait until torch is loaded; True if a child with this environment may be a fork of the server."""
        self.prepare()
        names = self._environment.keys() | environment.keys()
        changed = {name for name in names if self._environment.get(name) != environment.get(name)}
        if forked.ALLOCATOR not in self._environment:  # else a fork cannot take the first value back
            changed.discard(forked.ALLOCATOR)
        fixed = [name for name in changed - self._free if not name.startswith(READ_WHEN_USED_PREFIXES)]
        if not fixed and self._forks is None:
            self._may_fork(self._receive(LOAD_S))
        return not fixed and bool(self._forks)

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
        except (subprocess.TimeoutExpired, WorkloadError):
            processes.kill(self._token, self._process)

    def _may_fork(self, said: str) -> bool:
        """Keep the answer. False, with a warning that pytest prints, if loading torch opened a device."""
        self._forks = not said.startswith(NOT_FORKED)
        if not self._forks:
            warnings.warn(said, RuntimeWarning, stacklevel=2)
        return self._forks

    def _fork(self, program: Program) -> Forked | None:
        """The child; None if what was loaded since the last one has opened a device."""
        assert self._socket is not None
        request = {
            "module": program.module,
            "arguments": program.arguments,
            "environment": dict(program.environment),
        }
        status, child_status = os.pipe()
        file = _sealed(json.dumps(request).encode())
        try:
            with program.stdout.open("ab") as out, program.stderr.open("ab") as err:
                fds = [file, out.fileno(), err.fileno(), child_status, *program.pass_fds]
                socket.send_fds(self._socket, [b"start"], fds)
            pid = self._receive(LOAD_S)
            if not self._may_fork(pid):
                os.close(status)
                return None
            if not pid.isdecimal():
                raise WorkloadError(f"the process that loads torch for others answered {pid[:80]!r}")
            return Forked(int(pid), status, program.module)
        except (OSError, WorkloadError):
            os.close(status)
            raise
        finally:
            os.close(file)
            os.close(child_status)

    def _receive(self, timeout_s: float) -> str:
        assert self._socket is not None
        deadline = time.monotonic() + timeout_s
        ready, _, _ = select.select([self._socket], [], [], max(0.0, deadline - time.monotonic()))
        said = self._socket.recv(4096).decode(errors="replace") if ready else ""
        if said:
            return said
        end = "ended" if ready else f"did not answer in {timeout_s:g} s"
        last = processes.tail(self.folder / f"server-{self._token[:8]}" / "stderr.txt")
        self.stop()
        raise WorkloadError(f"the process that loads torch for others {end}:\n{last}")


def _sealed(text: bytes) -> int:
    """An open file in memory that nobody can change: a message of a socket holds about 200 kB."""
    file = os.memfd_create("request", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(file), "wb") as writing:
        writing.write(text)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return file


def spawn(environment: Mapping[str, str], home: Path, control: socket.socket) -> Child:
    """Start the server in a new Python."""
    return processes.start(
        processes.python("-m", "harness.server_main", *processes.numbers(1)),
        env=environment,
        stdout=home / "stdout.txt",
        stderr=home / "stderr.txt",
        pass_fds=(control.fileno(),),
    )
