"""A user's own program in a container, as if it ran here: input, output, terminal, signals and exit code.

In: a `RunSpec`. Out: the program's exit code. Its bytes pass as they come, stdout and stderr apart; SIGTERM,
SIGINT and SIGHUP reach it, and it has some time to end. Nothing of it is limited or looked at.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import shutil
import signal
import socket
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from stackcheck.engine import container
from stackcheck.engine.container import API_TIMEOUT_S, RunSpec, engine_errors
from stackcheck.engine.interrupts import Interrupts

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container


PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
CHUNK_BYTES = 1 << 16
HEADER_BYTES = 8  # the stream's number, three zeros, and the length, as Docker's attach has it


def run(client: DockerClient, spec: RunSpec, *, stop_timeout_s: float) -> int:
    """Run a program to its end, remove its container, and return the exit code.

    `on_line`, the time limit and the quota of `spec` are not used. `stop_timeout_s` after the first signal
    the program is killed.
    """
    source = _input()
    screen = source is not None and os.isatty(source) and sys.stdout.isatty()
    with container.made(client, spec, stdin_open=source is not None, tty=screen) as (made, signals):
        with engine_errors("starting a container"):
            line = _attached(client, made, reads=source is not None)
            container.start(made, spec)
        if source is not None:
            threading.Thread(target=_copy_in, args=(source, line), daemon=True).start()
        with (
            _Messenger(made, stop_timeout_s) as messenger,
            _raw(source if screen else None, messenger),
            _passed_on(signals, messenger),
            engine_errors("reading a container's output"),
        ):
            _copy_out(line, screen=screen)
            return int(made.wait(timeout=API_TIMEOUT_S)["StatusCode"])


def _input() -> int | None:
    """Where the program reads from: this one's input, unless that is a terminal of which it has no part."""
    try:
        source = sys.stdin.fileno()
        if os.isatty(source) and os.tcgetpgrp(source) != os.getpgrp():
            return None  # in the background a read from the terminal would stop this process
    except (AttributeError, OSError, io.UnsupportedOperation):
        return None
    return source


def _attached(client: DockerClient, made: Container, *, reads: bool) -> socket.socket:
    params = {"stdout": 1, "stderr": 1, "stream": 1, **({"stdin": 1} if reads else {})}
    api: Any = client.api  # the stubs know no return type
    wrapped = api.attach_socket(made.id, params=params)
    line: socket.socket = getattr(wrapped, "_sock", wrapped)  # a file for reading alone, around the socket
    line.settimeout(None)  # a job may be silent for hours
    return line


def _copy_in(source: int, line: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the program has ended
        while chunk := os.read(source, CHUNK_BYTES):
            line.sendall(chunk)
        line.shutdown(socket.SHUT_WR)


def _copy_out(line: socket.socket, *, screen: bool) -> None:
    """Pass each piece on at once; a terminal has one stream without headers."""
    streams = {1: sys.stdout.buffer, 2: sys.stderr.buffer}
    while header := _exactly(line, HEADER_BYTES) if not screen else line.recv(CHUNK_BYTES):
        number, chunk = (1, header) if screen else (header[0], b"")
        left = 0 if screen else int.from_bytes(header[4:], "big")
        while left or chunk:
            chunk = chunk or line.recv(min(left, CHUNK_BYTES))
            if not chunk:
                return
            left -= 0 if screen else len(chunk)
            streams[number].write(chunk)
            streams[number].flush()
            chunk = b""


def _exactly(line: socket.socket, count: int) -> bytes:
    """Read exactly this number of bytes; empty at the end."""
    found = b""
    while len(found) < count and (part := line.recv(count - len(found))):
        found += part
    return found if len(found) == count else b""


class _Messenger:
    """Tells the container of signals and sizes, in a thread: a handler must not talk to the engine."""

    def __init__(self, made: Container, stop_timeout_s: float) -> None:
        self._made = made
        self._told: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._timer = threading.Timer(stop_timeout_s, self._kill, [signal.SIGKILL])
        self._timer.daemon = True
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._told.put(None)
        self._thread.join(API_TIMEOUT_S)
        self._timer.cancel()

    def take(self, number: int, _frame: FrameType | None = None) -> None:
        """Handle a signal."""
        self._told.put(number)

    def _work(self) -> None:
        while (number := self._told.get()) is not None:
            if number == signal.SIGWINCH:
                self.resize()
                continue
            self._kill(number)
            with contextlib.suppress(RuntimeError):  # it runs since the first signal
                self._timer.start()

    def _kill(self, number: int) -> None:
        import docker

        with contextlib.suppress(docker.errors.DockerException, OSError):  # it may just have ended
            self._made.kill(signal=number)

    def resize(self) -> None:
        """Tell the container the size of this terminal."""
        import docker

        size = shutil.get_terminal_size()
        with contextlib.suppress(docker.errors.DockerException, OSError):
            self._made.resize(height=size.lines, width=size.columns)


@contextlib.contextmanager
def _passed_on(signals: Interrupts, messenger: _Messenger) -> Iterator[None]:
    """In the body signals reach the program, first those that came while its container was made."""
    before = dict(signals.handlers)
    signals.handlers |= {number: messenger.take for number in PASSED_ON if number in before}
    try:
        with signals.let_in():
            yield
    finally:
        signals.handlers.update(before)


@contextlib.contextmanager
def _raw(screen: int | None, messenger: _Messenger) -> Iterator[None]:
    """Give the program the terminal: each key reaches it, and it knows the size."""
    if screen is None:
        yield
        return
    kept = termios.tcgetattr(screen)
    before = signal.signal(signal.SIGWINCH, messenger.take)
    try:
        tty.setraw(screen)
        messenger.resize()  # before the program gets a key
        yield
    finally:
        termios.tcsetattr(screen, termios.TCSADRAIN, kept)
        signal.signal(signal.SIGWINCH, before)
