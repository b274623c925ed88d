"""Debian's docker-registry on a free port. In: its program, a folder, an address, settings. Out: its port."""

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

TRIES = 5
TIMEOUT_S = 300.0  # only for what hangs


@contextlib.contextmanager
def running(
    program: Path | str,
    folder: Path,
    *,
    address: str = "127.0.0.1",
    settings: Mapping[str, Any] | None = None,
) -> Iterator[int]:
    """A registry that keeps its data in `folder`, until the block ends. `settings`: more of its sections."""
    folder.mkdir(parents=True, exist_ok=True)
    process, port = _started(program, folder, address, dict(settings or {}))
    try:
        yield port
    finally:
        process.terminate()
        process.wait(timeout=TIMEOUT_S)


def _started(
    program: Path | str, folder: Path, address: str, settings: dict[str, Any]
) -> tuple[subprocess.Popen[bytes], int]:
    """The process and its port. Another program may take a free port before the registry does."""
    log = folder / "log"
    for _ in range(TRIES):
        with socket.socket() as free:
            free.bind((address, 0))
            port = free.getsockname()[1]
        (folder / "config.yml").write_text(yaml.safe_dump(_config(folder, f"{address}:{port}", settings)))
        with log.open("w") as file:
            process = subprocess.Popen([program, "serve", folder / "config.yml"], stdout=file, stderr=file)
        if _listens(process, port):
            return process, port
        assert "address already in use" in log.read_text(), log.read_text()
    raise AssertionError(f"{TRIES} free ports were taken by others: {log.read_text()}")


def _config(folder: Path, address: str, settings: dict[str, Any]) -> dict[str, Any]:
    storage = {"filesystem": {"rootdirectory": str(folder / "data")}, "delete": {"enabled": True}}
    return {
        "version": 0.1,
        "log": {"level": "error", "accesslog": {"disabled": True}},
        **settings,
        "storage": storage | settings.get("storage", {}),
        "http": settings.get("http", {}) | {"addr": address},
    }


def _listens(process: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until this process, and no other one, listens there; False if it ended."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess):
            sockets = psutil.Process(process.pid).net_connections(kind="tcp")
            if any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in sockets):
                return True
        if process.poll() is not None:
            return False
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"the registry does not listen after {TIMEOUT_S:g} s")
