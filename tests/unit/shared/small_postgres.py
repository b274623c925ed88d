"""A real PostgreSQL server for a test. In: the folder of its programs. Out: an address for SQLAlchemy."""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

START_TIMEOUT_S = 300.0  # only for what hangs: a busy machine may take minutes


@contextlib.contextmanager
def server(programs: Path) -> Iterator[str]:
    """The address of a server on a socket of its own, run by a user without rights."""
    user = "nobody" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    folder = Path(tempfile.mkdtemp(prefix="stackcheck-pg-", dir="/tmp"))
    if os.geteuid() == 0:
        shutil.chown(folder, user)
    data, log = folder / "data", (folder / "log").open("wb")
    as_user = {"user": user} if os.geteuid() == 0 else {}
    made = [
        str(programs / "initdb"),
        "-D",
        str(data),
        "-U",
        "postgres",
        "--auth=trust",
        "--no-sync",
        "-E",
        "UTF8",
    ]
    subprocess.run(made, check=True, cwd=folder, stdout=log, stderr=log, **as_user)
    options = ("-D", str(data), "-k", str(folder), "-c", "listen_addresses=", "-c", "fsync=off")
    running = subprocess.Popen(
        [str(programs / "postgres"), *options], cwd=folder, stdout=log, stderr=log, **as_user
    )
    try:
        _wait_for(folder, running)
        yield f"postgresql+psycopg://postgres@/postgres?host={folder}"
    finally:
        running.send_signal(signal.SIGINT)  # ends connections and stops
        running.wait(START_TIMEOUT_S)
        log.close()
        shutil.rmtree(folder)


def _wait_for(folder: Path, running: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end and running.poll() is None:
        try:
            psycopg.connect(f"host={folder} user=postgres dbname=postgres").close()
        except psycopg.OperationalError:
            time.sleep(0.1)
        else:
            return
    pytest.fail(f"PostgreSQL did not start:\n{(folder / 'log').read_text()}")
