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
                do = request.pop("do")
                answer = _start(fds, **request) if do == "start" else DO[do](**request)
            except Exception as error:  # noqa: BLE001 - the controller says which request failed
                answer = {"error": f"{type(error).__name__}: {error}"}
            finally:
                for fd in fds:
                    os.close(fd)
            inside.send(connection, answer)


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


# What takes no descriptors.
DO: dict[str, Callable[..., dict[str, Any]]] = {
    "facts": lambda: {"environment": dict(os.environ), **about.interpreter(), "bytecode": bytecode.is_kept()},
    "kill": lambda token: {"alive": processes.kill(token)},
    "stacks": lambda folder: {"text": processes.keep_stacks(Path(folder))},
    "tail": lambda path, lines: {"text": processes.tail(Path(path), lines)},
    "lives": lambda pid: {"lives": processes.lives(pid)},
}

if __name__ == "__main__":
    main(sys.argv[1])
