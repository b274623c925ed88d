"""A separate Docker daemon for a test: empty, without a network."""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from stackcheck.engine import host_setup

START_TIMEOUT_S = 300
END_TIMEOUT_S = 120  # a killed daemon leaves its containerd running


@contextlib.contextmanager
def second_daemon(*, containerd_store: bool) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon that `DOCKER_HOST` names inside the `with`; containerd's image store or the classic one."""
    folder = Path(tempfile.mkdtemp(prefix="dockerd-"))  # sockets' paths are short: pytest's are not
    (folder / "daemon.json").write_text(
        json.dumps({"features": {"containerd-snapshotter": containerd_store}})
    )
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(_command(folder), stdout=log, stderr=log)
    try:
        with mock.patch.dict(os.environ, DOCKER_HOST=f"unix://{folder / 'docker.sock'}"):
            deadline = time.monotonic() + START_TIMEOUT_S
            while not host_setup.socket_answers() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            assert host_setup.socket_answers(), (folder / "log").read_text()[-3000:]
            yield process
    finally:
        _end(process, folder)


def _command(folder: Path) -> list[str]:
    # In a network namespace of its own: a daemon without a bridge deletes docker0, also another daemon's.
    places = {"config-file": "daemon.json", "data-root": "data", "exec-root": "exec", "pidfile": "pid"}
    return [
        *("unshare", "--net", "dockerd", "--host", f"unix://{folder / 'docker.sock'}"),
        *(f"--{option}={folder / name}" for option, name in places.items()),
        *("--bridge=none", "--iptables=false", "--ip-masq=false"),
    ]


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    process.terminate()
    try:
        process.wait(timeout=END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=END_TIMEOUT_S)
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for place in sorted((path for path in mounted if path.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "--lazy", place], check=False, capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)
