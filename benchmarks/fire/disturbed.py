"""A real registry, and a proxy before it that disturbs requests as a plan says.

In: a folder; a plan. Out: HOST:PORT. Nothing is disturbed that the plan does not choose.
"""

from __future__ import annotations

import contextlib
import os
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
    import random
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Plan = Callable[[int, str], str]  # the number of a request, its method -> a fault, or nothing

CONFIG = """\
version: 0.1
log: {{level: error}}
storage:
  filesystem: {{rootdirectory: {root}}}
  delete: {{enabled: true}}
http: {{addr: "127.0.0.1:{port}"}}
"""
RARE_GC = {"GOGC": "1000"}  # its garbage collector takes half of its processor time
GIVES_UP_S = 4.0  # when the client of a disturbed publication does not wait any longer
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
        process = subprocess.Popen(
            [program, "serve", str(folder / "config.yml")], stdout=log, stderr=log, env=os.environ | RARE_GC
        )
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
    """Passes requests on, and disturbs some of them, as the plan says."""

    upstream = ""
    plan: Plan
    planted: Counter[str]
    late: list[threading.Thread]
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = type(self).plan(self.planted["requests"], self.command)
        self.planted.update(["requests", *([fault] if fault else [])])
        self.close_connection = True
        if fault in {"500", "502", "429", "disk full"}:
            self.reply({"disk full": 507}.get(fault) or int(fault), {"Retry-After": "0"}, fault.encode())
        elif fault == "hang":
            time.sleep(GIVES_UP_S + 0.2)
        elif fault == "late":  # its client has given up by then
            thread = threading.Timer(GIVES_UP_S + 0.5, self.forward, [body])
            thread.start()
            self.late.append(thread)
            time.sleep(GIVES_UP_S + 0.2)
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


def many_faults(chooser: random.Random) -> Plan:
    """Each request is disturbed by chance."""
    chance = chooser.choice((0.02, 0.1, 0.3))
    return lambda _number, method: (
        _fitting(chooser.choice(FAULTS), method) if chooser.random() < chance else ""
    )


def one_fault(chooser: random.Random, requests_: int) -> Plan:
    """One request is disturbed: the n-th, or the next one that the fault fits."""
    at, left = chooser.randrange(requests_), [chooser.choice(FAULTS)]

    def plan(number: int, method: str) -> str:
        return left.pop() if left and number >= at and _fitting(left[0], method) else ""

    return plan


def _fitting(fault: str, method: str) -> str:
    return "" if fault == "disk full" and method not in {"PUT", "POST"} else fault


@contextlib.contextmanager
def disturbed(upstream: str, plan: Plan) -> Iterator[tuple[str, Counter[str]]]:
    """HOST:PORT of the proxy, and how many requests it had and which faults it planted."""
    planted: Counter[str] = Counter()
    late: list[threading.Thread] = []
    told = {"upstream": upstream, "plan": staticmethod(plan), "planted": planted, "late": late}
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
