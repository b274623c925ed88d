"""The Docker daemon as a process of this host: whether it answers; without an init, start and stop by pid.

In: a host with dockerd installed. Out: a daemon that answers at the default socket, its pid in `PID_FILE`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from stackcheck.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable

PID_FILE = Path("/run/stackcheck-dockerd.pid")
LOG_FILE = Path("/var/log/stackcheck-dockerd.log")
INIT_FOLDER = Path("/run/systemd/system")
START_TIMEOUT_S = 60.0


def socket_answers(timeout_s: float = 5.0) -> bool:
    """Whether a daemon answers where `DOCKER_HOST` or the default socket says."""
    import docker
    import requests

    with contextlib.suppress(docker.errors.DockerException, requests.RequestException):
        client = docker.from_env(timeout=timeout_s)  # type: ignore[arg-type]
        with contextlib.closing(client):
            return bool(client.ping())
    return False


def start_daemon(report: Callable[[str], None]) -> None:
    """Start the service where there is an init, else `dockerd` by hand with its own pid file and log.

    Raises:
        EngineError: It did not answer in time; the message has the log's last lines.
    """
    process = None
    if INIT_FOLDER.is_dir():
        report("starting the docker service")
        subprocess.run(["systemctl", "start", "docker"], check=False, timeout=START_TIMEOUT_S)
    else:
        report(f"starting dockerd (pid file {PID_FILE}, log {LOG_FILE})")
        process = _spawn_daemon()
    deadline = time.monotonic() + START_TIMEOUT_S
    while not socket_answers(timeout_s=2.0):
        # Asked of the process itself: a program that is being loaded does not have its name yet.
        if time.monotonic() > deadline or (process and process.poll() is not None):
            raise EngineError(
                "dockerd did not start",
                where=str(LOG_FILE),
                got="\n    ".join(_log_tail()),
                next_step=f"read {LOG_FILE}, mend what it names, then run: stackcheck doctor --fix",
            )
        time.sleep(0.2)


def _spawn_daemon() -> subprocess.Popen[bytes]:
    with LOG_FILE.open("ab") as log:
        # A session of its own: Ctrl-C in the terminal that started it must not end it.
        process = subprocess.Popen(
            ["dockerd"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    PID_FILE.write_text(f"{process.pid}\n", encoding="utf-8")
    return process


def daemon_pid() -> int | None:
    """The pid of the dockerd that this tool started, while it runs."""
    if not PID_FILE.exists():
        return None
    pid = int(PID_FILE.read_text(encoding="utf-8"))
    try:
        name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return None
    # A pid is reused after a reboot: only a living dockerd counts.
    return pid if name == "dockerd" and state != "Z" else None


def stop_daemon(timeout_s: float = 30.0) -> bool:
    """Stop the dockerd that this tool started, by its pid; False where there is none."""
    pid = daemon_pid()
    if pid is None:
        return False
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while daemon_pid() is not None and time.monotonic() < deadline:
        time.sleep(0.2)
    if daemon_pid() is not None:
        os.kill(pid, signal.SIGKILL)
    PID_FILE.unlink(missing_ok=True)
    return True


def _log_tail(lines: int = 8) -> list[str]:
    if not LOG_FILE.exists():
        return []
    return LOG_FILE.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
