"""A web server of this machine while a test runs. In: a handler, what it knows, a folder. Out: HOST:PORT."""

import contextlib
import functools
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def serving(
    handler: type[BaseHTTPRequestHandler],
    folder: Path | None = None,
    *,
    context: ssl.SSLContext | None = None,
    **told: Any,
) -> Iterator[str]:
    """Serve on a free port by handlers with `told` as attributes, quiet if they have no log of their own."""
    if handler.log_message is BaseHTTPRequestHandler.log_message:
        told["log_message"] = lambda *_: None
    bound = type("Bound", (handler,), told)
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(bound, directory=folder) if folder else bound
    ) as server:
        server.daemon_threads = True
        if context:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
