"""Run a command on a fabricated host.

In: a state, a library and a command. Out: the finished process. Everything happens in private mount and PID
namespaces: nothing of this machine's /sys and /dev is touched, and nothing outlives the command.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fakeamd import rootfs
from fakeamd.rootfs import FakeAmdError, Library
from fakeamd.states import STATES, HostState

NAMESPACES = ("--mount", "--pid", "--fork", "--kill-child", "--propagation", "private")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The JSON argument of `python -m fakeamd.enter`."""

    state: str
    root: str
    shim: str
    metrics_revision: int
    command: tuple[str, ...]
    environment: Mapping[str, str]
    binds: Mapping[str, str] = field(default_factory=dict)  # name below /stackcheck -> folder here
    writable: tuple[str, ...] = ()  # which of them
    over: Mapping[str, str] = field(default_factory=dict)  # file below /stackcheck -> file here
    recorded: str = ""  # a file of `stackcheck first-host` in place of a state


def require_root() -> None:
    """Raise `FakeAmdError` if this machine cannot make namespaces and device nodes."""
    if os.geteuid() != 0:
        raise FakeAmdError(
            "a fabricated AMD host needs root: it mounts a private /sys and makes device nodes"
            f" (CAP_SYS_ADMIN, CAP_MKNOD); this is uid {os.geteuid()}. Run as root, or drop these tests with"
            " -k 'not amd_hosts'"
        )
    if shutil.which("unshare") is None:
        raise FakeAmdError("unshare is not installed; on Debian: apt-get install util-linux")


def run(
    state: HostState | Path,
    library: Library,
    command: Sequence[str],
    *,
    binds: Mapping[str, Path] | None = None,
    writable: Sequence[str] = (),
    over: Mapping[str, Path] | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 300,  # a whole run of the suites, beside others
) -> subprocess.CompletedProcess[str]:
    """Run `command` where AMD's library sees `state`; stdout and stderr come back together in `stdout`.

    A path is a file of `stackcheck first-host`.

    Raises `FakeAmdError` if this machine cannot, `TimeoutExpired` if the command does not end.
    """
    require_root()
    entry = Entry(
        state=state.name if isinstance(state, HostState) else "",
        recorded=str(state) if isinstance(state, Path) else "",
        root=str(rootfs.ensure(library)),
        shim=str(rootfs.shim(library)),
        metrics_revision=library.metrics_revision,
        command=tuple(command),
        environment={"PYTHONPATH": library.python_path, **(environment or {})},
        binds={name: str(folder) for name, folder in (binds or {}).items()},
        writable=tuple(writable),
        over={name: str(file) for name, file in (over or {}).items()},
    )
    return subprocess.run(
        ["unshare", *NAMESPACES, sys.executable, "-m", "fakeamd.enter", json.dumps(vars(entry))],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(rootfs.HERE.parent)},
    )


def state(name: str) -> HostState | Path:
    """The state of that name, or the file of a recorded host."""
    if Path(name).is_file():
        return Path(name).resolve()
    if name not in STATES:
        raise FakeAmdError(
            f"unknown state {name!r}: expected a file of `first-host`, or one of {', '.join(STATES)}"
        )
    return STATES[name]
