"""What one test process of this machine does at a time. In: a name. Out: a lock, an installed program."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from waits import run_program

INSTALL, QUIET = (
    ("apt-get", "install", "--yes", "--no-install-recommends"),
    {"DEBIAN_FRONTEND": "noninteractive"},
)
APT_TIMEOUT_S = 600
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stackcheck-tests"


@contextlib.contextmanager
def one_at_a_time(name: str) -> Iterator[None]:
    """Hold a lock that every test process of this machine shares; apt-get takes one caller at a time."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def command(*arguments: str | Path, **changes: str) -> str:
    """Run a program that has to succeed; its output is in the failure."""
    done = run_program(
        [str(item) for item in arguments], timeout=APT_TIMEOUT_S, env={**os.environ, **changes}
    )
    assert done.returncode == 0, f"{arguments} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def installed(program: str, package: str) -> Path:
    """The path of a program; its package is installed when it is not there."""
    with one_at_a_time("apt"):
        if shutil.which(program) is None:
            command("apt-get", "update", **QUIET)
            command(*INSTALL, package, **QUIET)
    found = shutil.which(program)
    assert found, f"{package} is installed and {program} is not on PATH"
    return Path(found)
