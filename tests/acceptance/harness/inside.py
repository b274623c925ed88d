"""The controller's side of a container. In: what is to run there. Out: children, and texts of limited size.

The controller runs no code of the image and opens no path that the image can write: output comes through
file descriptors of the controller's own files, and answers through a socket, with limits on size and time.
"""

import json
import os
import select
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.processes import WorkloadError

FOLDER = Path("/stackcheck/out")  # the folder in the container that it may write
SOCKET = "agent"
LONGEST_BYTES = 16 << 20  # of a message
MOST_FDS = 16
HEAD_BYTES = 8
START_S = 300.0  # until the image's Python runs: a large image on a cold disk takes minutes
ANSWER_S = 60.0
POLL_S = 0.02


class LostError(WorkloadError):
    """The container, or its Python, does not answer as it should; the message says how."""


class Forked:
    """A child that another process started, with the methods of `subprocess.Popen` that the harness needs."""

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
        """The return code. Raises `subprocess.TimeoutExpired`, and `LostError` if its parent is gone."""
        if self.returncode is not None:
            return self.returncode
        ready, _, _ = select.select([self._status], [], [], timeout)
        if not ready:
            raise subprocess.TimeoutExpired(self._what, timeout or 0.0)
        said = os.read(self._status, 64)
        try:
            self.returncode = int(said)
        except ValueError:
            raise LostError(f"the process that started {self._what} ended, so its end is not known") from None
        return self.returncode


class Inside:
    """A connection to the agent of a container.

    Attributes:
        environment: What a program of the image gets; the controller may add to it.
        executable: The image's Python.
        interpreter: What that Python says about itself.
        has_own_bytecode: Whether children keep their compiled modules in a folder of this run.
    """

    def __init__(self, folder: Path, own: Path) -> None:
        """
        Args:
            folder: The folder of this machine that the container may write.
            own: The folder of this run, which the container does not see.
        """
        self.own = own
        self._lock = threading.Lock()
        self._socket = _connected(folder / SOCKET, time.monotonic() + START_S)
        facts = self.ask("facts")
        environment = facts.get("environment")
        if not isinstance(environment, dict) or not all(isinstance(v, str) for v in environment.values()):
            raise LostError("the agent did not say which variables it has")
        self.environment: dict[str, str] = environment
        self.interpreter = {name: str(facts.get(name)) for name in ("path", "file", "sha256")}
        self.executable = self.interpreter["path"]
        self.has_own_bytecode = facts.get("bytecode") is True

    def path(self, path: Path) -> Path:
        """Where children have a folder of this run."""
        return FOLDER / (path.relative_to(self.own) if path.is_relative_to(self.own) else path.name)

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int],
    ) -> Forked:
        """Start a child in the container; it writes to files that this process opened."""
        status, child_status = os.pipe()
        try:
            fds = (stdout, stderr, child_status, *pass_fds)
            pid = self.ask("start", fds, command=list(command), environment=dict(env)).get("pid")
            return Forked(int(str(pid)), status, " ".join(command[1:4]))
        except (TypeError, ValueError, LostError):
            os.close(status)
            raise LostError(f"the container did not start {' '.join(command[1:4])}") from None
        finally:
            os.close(child_status)

    def ask(self, do: str, fds: Sequence[int] = (), **request: Any) -> dict[str, Any]:
        """The answer to a request. Raises `LostError`; after that every further request does, too."""
        with self._lock:
            try:
                send(self._socket, {"do": do, **request}, fds)
                answer = message(self._socket, self._socket.recv(HEAD_BYTES))  # descriptors are dropped
            except (OSError, EOFError, ValueError, TypeError, RecursionError) as error:
                self._socket.close()
                raise LostError(
                    f"the container does not answer ({do}): {type(error).__name__}: {error}"
                ) from None
        if "error" in answer:
            raise LostError(f"the container could not do it ({do}): {str(answer['error'])[:2000]}")
        return answer

    def text(self, do: str, **request: Any) -> str:
        """The text of an answer."""
        return str(self.ask(do, **request).get("text", ""))[:LONGEST_BYTES]


def send(connection: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """Send a message with descriptors beside it."""
    body = json.dumps(message).encode()
    socket.send_fds(connection, [len(body).to_bytes(HEAD_BYTES, "big")], list(fds))
    connection.sendall(body)


def received(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next message. Raises `EOFError`, `OSError` (also when time is up), `ValueError` or `TypeError`."""
    head, fds, _, _ = socket.recv_fds(connection, HEAD_BYTES, MOST_FDS)
    return message(connection, head), fds


def message(connection: socket.socket, head: bytes) -> dict[str, Any]:
    """The message after its first bytes, which tell its size. Raises as `received` does."""
    if len(head) < HEAD_BYTES:
        raise EOFError("the other end is closed")
    size = int.from_bytes(head, "big")
    if size > LONGEST_BYTES:
        raise ValueError(f"a message of {size} bytes, at most {LONGEST_BYTES}")
    body = bytearray()
    deadline = time.monotonic() + ANSWER_S
    while len(body) < size:
        if time.monotonic() > deadline or not (part := connection.recv(size - len(body))):
            raise EOFError("a message is not complete")
        body += part
    found = json.loads(bytes(body))
    if not isinstance(found, dict):
        raise TypeError("a message is no JSON object")
    return found


def _connected(path: Path, deadline: float) -> socket.socket:
    """A connection to a socket that another process makes in a folder of its own.

    The file is opened before it is used: a link there could lead to any socket of this machine.
    """
    while time.monotonic() < deadline:
        try:
            fd = os.open(path, os.O_PATH | os.O_NOFOLLOW)
        except FileNotFoundError:
            time.sleep(POLL_S)
            continue
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                raise LostError(f"{path} is no socket")
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(ANSWER_S)
            connection.connect(f"/proc/self/fd/{fd}")
        except ConnectionRefusedError:  # made, and not listening yet
            connection.close()
            time.sleep(POLL_S)
            continue
        finally:
            os.close(fd)
        return connection
    raise LostError(f"the image's Python did not start in {START_S:g} s: no {path}")
