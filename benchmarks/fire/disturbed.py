"""A real registry, and a proxy before it that disturbs requests as a seed says.

In: a folder; a seed and a chance. Out: HOST:PORT. Nothing is disturbed that the seed does not choose.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import requests

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIG = """\
version: 0.1
log: {{level: error}}
storage:
  filesystem: {{rootdirectory: {root}}}
  delete: {{enabled: true}}
http: {{addr: "127.0.0.1:{port}"}}
"""
FAULTS = (
    *("500", "502", "429", "disk full", "hang", "late", "reset", "reset in the body", "truncated"),
    *("wrong bytes", "slow"),
)


@contextlib.contextmanager
def registry(folder: Path) -> Iterator[str]:
    """HOST:PORT of a real registry on loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir(parents=True)
    (folder / "config.yml").write_text(CONFIG.format(root=folder / "data", port=port))
    program = shutil.which("docker-registry") or sys.exit(
        "install docker-registry: apt-get install docker-registry"
    )
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([program, "serve", str(folder / "config.yml")], stdout=log, stderr=log)
    try:
        for _ in range(600):
            with contextlib.suppress(requests.ConnectionError):
                if requests.get(f"http://127.0.0.1:{port}/v2/", timeout=30).ok:
                    break
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=60)


class Proxy(BaseHTTPRequestHandler):
    """Passes requests on, and disturbs some of them, as the schedule's seed says."""

    upstream = ""
    chance = 0.0
    chooser: random.Random
    planted: Counter[str]
    late: list[threading.Thread]
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.chooser.choice(FAULTS) if self.chooser.random() < self.chance else ""
        if fault == "disk full" and self.command not in {"PUT", "POST"}:
            fault = ""
        self.planted[fault] += bool(fault)
        self.close_connection = True
        if fault in {"500", "502", "429", "disk full"}:
            self.reply({"disk full": 507}.get(fault) or int(fault), {"Retry-After": "0"}, fault.encode())
        elif fault == "hang":
            time.sleep(0.6)
        elif fault == "late":  # its client has given up by then
            thread = threading.Timer(0.8, self.forward, [body])
            thread.start()
            self.late.append(thread)
            time.sleep(0.6)
        elif fault == "reset":
            self.connection.shutdown(socket.SHUT_RDWR)
        else:
            self.pass_on(body, fault)

    do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = answer  # noqa: N815

    def forward(self, body: bytes) -> requests.Response:
        dropped = {"connection", "host", "content-length", "accept-encoding"}
        headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
        headers |= {"Host": self.headers["Host"], "Accept-Encoding": "identity"}
        url = f"http://{self.upstream}{self.path}"
        return requests.request(
            self.command, url, data=body or None, headers=headers, allow_redirects=False, timeout=60
        )

    def pass_on(self, body: bytes, fault: str) -> None:
        found = self.forward(body)
        headers = {
            name: value
            for name, value in found.headers.items()
            if name.lower() not in {"content-length", "connection", "transfer-encoding", "date"}
        }
        content = found.content
        length = found.headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(content))
        if fault == "wrong bytes" and content:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if fault in {"truncated", "reset in the body"}:
            content = content[: len(content) // 2]
        self.reply(found.status_code, headers, content, length=length, slow=fault == "slow")

    def reply(
        self, status: int, headers: dict[str, str], body: bytes, *, length: str = "", slow: bool = False
    ) -> None:
        with contextlib.suppress(OSError):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", length or str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            if self.command == "HEAD":
                return
            for byte in body[:20] if slow else ():
                self.wfile.write(bytes([byte]))
                time.sleep(0.05)
            self.wfile.write(body[20:] if slow else body)

    def log_message(self, *_arguments: object) -> None:
        """Print no log."""


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_arguments: object) -> None:
        """A client that gave up is part of the game."""


@contextlib.contextmanager
def disturbed(upstream: str, seed: str, chance: float) -> Iterator[tuple[str, Counter[str]]]:
    planted: Counter[str] = Counter()
    late: list[threading.Thread] = []
    told = {
        "upstream": upstream,
        "chance": chance,
        "chooser": random.Random(seed),
        "planted": planted,
        "late": late,
    }
    server = Server(("127.0.0.1", 0), type("Bound", (Proxy,), told))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}", planted
    finally:
        for waiting in late:
            waiting.join()  # a late write arrives before the outcome is judged
        server.shutdown()
        thread.join()
        server.server_close()
