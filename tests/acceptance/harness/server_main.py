"""The process that `harness.server` starts. In: requests on a socket.
Out: a fork for each, and its return code.

A request comes as descriptors: a file with JSON, the files for the child's output, a pipe for its return
code, and the child's own. The answer is the child's process id. The first message is "ready", or why no fork
may be used: a device that is open before the fork is broken after it. What most children load is loaded while
nothing is asked; if that opens a device, this is the answer from then on. The server ends, and ends its
children, when the other end of the socket closes.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from harness import forked
from harness.processes import STACKS, TOKEN
from harness.server import NOT_FORKED, READY

# What most children load. Not Inductor: while it is loaded it may start the processes that compile for it.
MODULES = (
    "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch.distributed.pipelining",
    "torch.distributed.run", "torch.distributed.tensor.parallel", "torch.profiler", "torch.utils.checkpoint",
    "sympy", "torch._dynamo", "torch.nn.attention.flex_attention",
)  # fmt: skip
RANKS = "harness.forked_ranks"
MOST_FDS = 12
MEMORY, TERMINALS = 1, (4, 5, *range(136, 144))  # major numbers: /dev/null and its like; terminals


@dataclass(frozen=True)
class Mark:
    """Where this process has its token in the memory that it began with, which /proc/PID/environ shows."""

    address: int
    length: int

    @classmethod
    def find(cls) -> "Mark":
        """Find the place; this process must not have changed its environment before."""
        library = ctypes.CDLL(None)
        library.getenv.restype = ctypes.c_void_p
        return cls(library.getenv(TOKEN.encode()), len(os.environ[TOKEN]))

    def put(self, token: str) -> None:
        """Replace the token, so that a search for a child's processes finds this fork and its forks."""
        assert len(token) == self.length
        ctypes.memmove(self.address, token.encode(), self.length)
        if f"{TOKEN}={token}".encode() not in Path("/proc/self/environ").read_bytes().split(b"\0"):
            raise RuntimeError("this process cannot be marked as a child of this run")


# A program to run in a fork (module, arguments, environment), its two outputs, its other descriptors.
_Request = tuple[dict[str, Any], tuple[int, int], tuple[int, ...]]


@dataclass
class _Server:
    control: socket.socket
    modules: list[str]  # still to be loaded
    refusal: str | None = None  # why no child is forked any more
    children: dict[int, int] = field(default_factory=dict)  # process id -> pipe for its return code

    def serve(self) -> _Request | None:
        """Fork for each request. Returns the request in a fork, and None in the server when it has to end."""
        awake, wake = socket.socketpair()
        wake.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, or the wake-up is not written
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        while True:
            ready, _, _ = select.select([self.control, awake], [], [], 0 if self.modules else None)
            if not ready:
                self._load(self.modules.pop(0))
            if awake in ready:
                awake.recv(4096)
                self._tell_ends()
            if self.control in ready:
                fds = self._received()
                if not fds:
                    return None
                request = self._forked(fds)
                if request is not None:
                    awake.close()
                    wake.close()
                    return request

    def _load(self, module: str) -> None:
        if module in sys.modules:  # by one before it: nothing new can have opened a device
            return
        with contextlib.suppress(ImportError):  # an older torch has fewer
            importlib.import_module(module)
        self.refusal = self.refusal or _refusal()
        gc.collect()
        gc.freeze()

    def _received(self) -> list[int]:
        """The next request; empty when the other end is closed, even if it did not read an answer."""
        try:
            _, fds, _, _ = socket.recv_fds(self.control, 4096, MOST_FDS)
        except ConnectionResetError:
            return []
        return fds

    def _forked(self, fds: list[int]) -> _Request | None:
        file, out, err, status, *given = fds
        if self.refusal is not None:
            for fd in fds:
                os.close(fd)
            self.control.send(self.refusal.encode())
            return None
        if pid := os.fork():
            for fd in (file, out, err, *given):
                os.close(fd)
            self.children[pid] = status
            self.control.send(str(pid).encode())
            return None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.control.close()
        for other in (status, *self.children.values()):
            os.close(other)
        with os.fdopen(file, "rb") as told:
            told.seek(0)
            return json.load(told), (out, err), tuple(given)

    def _tell_ends(self) -> None:
        for pid in list(self.children):
            ended, code = os.waitpid(pid, os.WNOHANG)
            if ended:
                pipe = self.children.pop(pid)
                with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
                    os.write(pipe, str(os.waitstatus_to_exitcode(code)).encode())
                os.close(pipe)


def main(control: socket.socket, mark: Mark) -> None:
    """Serve. A fork becomes the program of its request."""
    refusal = _refusal()
    control.send((refusal or READY).encode())
    server = _Server(control, list(MODULES), refusal)
    request = server.serve()
    if request is not None:
        _become(request, mark)
    for pid in server.children:  # with what each started in its own session
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _refusal() -> str | None:
    """Why this process must not fork children, in words."""
    touched = _opened_device() or _asked_device()
    return touched and f"{NOT_FORKED}, because loading torch {touched}"


def _opened_device() -> str | None:
    """The device that this process has open, in words: neither a terminal nor /dev/null and its like."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed again
            state = os.fstat(int(descriptor.name))
            if stat.S_ISCHR(state.st_mode) and os.major(state.st_rdev) not in (MEMORY, *TERMINALS):
                return f"opened {descriptor.readlink()}"
    return None


def _asked_device() -> str | None:
    """Whether torch asked the runtime for a device, which shows in a fork only, in words."""
    if (pid := os.fork()) == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return "asked the runtime for a device" if os.waitpid(pid, 0)[1] else None


def _become(request: _Request, mark: Mark) -> None:
    """Take on a request's session, output and environment, run its module, and end."""
    program, outputs, fds = request
    module, environment = program["module"], program["environment"]
    os.setsid()
    for number, file in enumerate(outputs, 1):
        os.dup2(file, number)
        os.close(file)
    Path(environment[STACKS]).mkdir(parents=True, exist_ok=True)
    mark.put(environment[TOKEN])
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    if module != RANKS:
        forked.tell_allocator()
    sys.argv = [module, *map(str, fds), *program["arguments"]]
    forked.run(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), Mark.find())
