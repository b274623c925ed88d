"""Starts children in a container for a controller outside it. In: requests on a socket. Out: answers.

A request is JSON, with file descriptors beside it: the child's output, a pipe for its return code, and what
else it needs. Each connection is served in a thread. The controller trusts nothing that comes from here:
this is a program of the image, and what it says is evidence.
"""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder, whose modules have plain names

from harness import about, bytecode, inside, processes  # noqa: E402

OUTPUTS = 3  # stdout, stderr, and the pipe for the return code


def main(path: str) -> None:
    """Serve every connection to a new socket."""
    bytecode.keep()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen()
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve, args=(connection,), daemon=True).start()


def _serve(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError, EOFError):
        while True:
            request, fds = inside.received(connection)
            try:
                answer = DO[request.pop("do")](fds=fds, **request)
            except Exception as error:  # noqa: BLE001 - the controller says which request failed
                answer = {"error": f"{type(error).__name__}: {error}"}
            finally:
                for fd in fds:
                    os.close(fd)
            inside.send(connection, answer)


def _facts(fds: Sequence[int]) -> dict[str, Any]:
    del fds
    return {"environment": dict(os.environ), **about.interpreter(), "bytecode": bytecode.is_kept()}


def _start(fds: Sequence[int], command: Sequence[str], environment: dict[str, str]) -> dict[str, Any]:
    stdout, stderr, status, *given = fds
    if processes.STACKS in environment:
        Path(environment[processes.STACKS]).mkdir(parents=True, exist_ok=True)
    child = subprocess.Popen(
        processes.with_numbers(command, given),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=given,
        start_new_session=True,
    )
    threading.Thread(target=_tell_end, args=(child, os.dup(status)), daemon=True).start()
    return {"pid": child.pid}


def _tell_end(child: "subprocess.Popen[bytes]", status: int) -> None:
    code = child.wait()
    with contextlib.suppress(OSError):  # nobody waits for it any more
        os.write(status, str(code).encode())
    os.close(status)


def _kill(fds: Sequence[int], token: str) -> dict[str, Any]:
    del fds
    return {"alive": processes.kill(token)}


def _stacks(fds: Sequence[int], folder: str) -> dict[str, Any]:
    del fds
    return {"text": processes.keep_stacks(Path(folder))}


def _tail(fds: Sequence[int], path: str, lines: int) -> dict[str, Any]:
    del fds
    return {"text": processes.tail(Path(path), lines)}


def _lives(fds: Sequence[int], pid: int) -> dict[str, Any]:
    del fds
    return {"lives": processes.lives(pid)}


DO: dict[str, Callable[..., dict[str, Any]]] = {
    "facts": _facts,
    "start": _start,
    "kill": _kill,
    "stacks": _stacks,
    "tail": _tail,
    "lives": _lives,
}

if __name__ == "__main__":
    main(sys.argv[1])
