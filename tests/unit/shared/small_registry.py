"""A registry that answers every request with one function, and a client that soon asks again."""

import contextlib
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import loopback
from stackcheck.oci.distribution import Repository

Answer = tuple[
    int, dict[str, str], "bytes | Iterable[bytes]"
]  # an iterable is sent in chunks, without a length


@contextlib.contextmanager
def serving(answer: Callable[[BaseHTTPRequestHandler], Answer]) -> Iterator[tuple[str, list[str]]]:
    """A server that answers every request with one function; yields its host and the requests it got."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            self.body = self.rfile.read(length)
            seen.append(f"{self.command} {self.path}")
            with contextlib.suppress(ConnectionError):
                status, headers, body = answer(self)
                self.send_response(status)
                told = {"Content-Length": str(len(body))} if isinstance(body, bytes) else {}
                for name, value in (told | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.writelines([body] if isinstance(body, bytes) else body)

        do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = _do  # noqa: N815  # the base class's names

    with loopback.serving(Handler) as host:
        yield host, seen


def reset(handler: BaseHTTPRequestHandler) -> None:
    """End the connection as a proxy does that drops it: without an answer, with a reset."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    for file in (handler.rfile, handler.wfile, handler.connection):
        file.close()
    handler.close_connection = True
    raise ConnectionAbortedError


def repository(host: str, **changes: Any) -> Repository:
    return Repository(host, "a/b", **({"timeout_s": (30.0, 30.0), "retry_delays_s": (0.01, 0.01)} | changes))
