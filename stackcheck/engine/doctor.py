"""What this host has and lacks, each with the command that fixes it.

In: the host. Out: `HostFinding`s in a fixed order. Nothing is changed here: `host_setup` does that.
"""

import dataclasses
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import requests

from stackcheck.engine import host_setup
from stackcheck.engine.client import Engine
from stackcheck.errors import StackcheckError

# The cpu stack with its base, build cache and published copy; GPU stacks ask for several times this.
DISK_NEEDED_BYTES = 15 * 10**9
MEMORY_NEEDED_BYTES = 4 * 10**9
REGISTRY_TIMEOUT_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostFinding:
    """One thing that was looked at."""

    name: str
    ok: bool
    needed: bool  # whether the cpu stack can be built without it
    found: str  # what is there, in a few words
    fix: str | None = None  # the command to type, or None


def examine(
    root: Path, registries: Iterable[str] = (), *, room_bytes: int = DISK_NEEDED_BYTES
) -> tuple[HostFinding, ...]:
    """Look at everything: `registries` are where the matrix publishes to, `room_bytes` must be free."""
    return (
        *_engine(),
        _buildx(),
        _mmdebstrap(),
        *_vendors(),
        _disk(root, room_bytes),
        _memory(),
        *(_registry(host) for host in registries),
    )


def _engine() -> Iterator[HostFinding]:
    try:
        engine = Engine.connect()
    except StackcheckError as error:
        got = error.got or error.what
        first, *_ = (error.next_step or host_setup.DOCTOR).splitlines()
        yield HostFinding(name="engine", ok=False, needed=True, found=got, fix=first)
        return
    yield HostFinding(name="engine", ok=True, needed=True, found=engine.description)
    yield HostFinding(
        name="same digest",
        ok=engine.repeats_builds,
        needed=False,
        found="two builds of the same inputs have one digest"
        if engine.repeats_builds
        else "Docker before 26 keeps the time of the build in layers: each build has another digest",
        fix=None if engine.repeats_builds else "update Docker to 26 or newer",
    )
    yield HostFinding(
        name="containerd store",
        ok=engine.containerd_store,
        needed=False,
        found="on" if engine.containerd_store else "off: layouts come from `docker save`, which is slower",
        fix=None
        if engine.containerd_store
        else f'put {{"features": {{"containerd-snapshotter": true}}}} into {host_setup.DAEMON_FILE}',
    )


def _buildx() -> HostFinding:
    ok = host_setup.has_buildx()
    return HostFinding(
        name="buildx",
        ok=ok,
        needed=True,
        found=_first_line(["docker", "buildx", "version"]),  # or why it cannot tell
        fix=None if ok else "stackcheck doctor --fix",
    )


def _mmdebstrap() -> HostFinding:
    ok = shutil.which("mmdebstrap") is not None
    return HostFinding(
        name="mmdebstrap",
        ok=ok,
        needed=False,
        found=_first_line(["mmdebstrap", "--version"])
        if ok
        else "not installed; a build installs it when a base needs it",
        fix=None if ok else "apt-get install -y mmdebstrap",
    )


def _vendors() -> Iterator[HostFinding]:
    from stackcheck import vendors

    for name in ("amd", "nvidia"):
        backend = vendors.module(name)
        present = backend.present()
        driver = backend.driver()
        found = "no device"
        if present:
            models = [device.model for device in backend.devices()]
            found = f"{len(models)} x {models[0] if models else 'unknown'}, driver {driver or 'not loaded'}"
        yield HostFinding(name=f"{name} GPUs", ok=present, needed=False, found=found)


def free_room(root: Path) -> tuple[int, Path]:
    """The bytes that are free, and where: the engine's data and `build/` may lie on two disks."""
    places = [path for path in (root, Path("/var/lib/docker"), Path("/var/lib")) if path.exists()]
    return min((shutil.disk_usage(path).free, path) for path in places)


def _disk(root: Path, room_bytes: int) -> HostFinding:
    free, place = free_room(root)
    # Of a daemon that stackcheck started, `--fix` has already removed the build cache.
    fix = "docker builder prune" if host_setup.daemon_pid() is None else f"free space under {place}"
    return HostFinding(
        name="disk",
        ok=free >= room_bytes,
        needed=True,
        found=f"{free / 1e9:.0f} GB free at {place}, {room_bytes / 1e9:.0f} GB needed",
        fix=None if free >= room_bytes else fix,
    )


def _memory() -> HostFinding:
    total = psutil.virtual_memory().total
    return HostFinding(
        name="memory",
        ok=total >= MEMORY_NEEDED_BYTES,
        needed=True,
        found=f"{total / 1e9:.0f} GB, {MEMORY_NEEDED_BYTES / 1e9:.0f} GB needed",
    )


def _registry(host: str) -> HostFinding:
    try:
        answer = requests.get(f"https://{host}/v2/", timeout=REGISTRY_TIMEOUT_S)
    except requests.RequestException as error:
        return HostFinding(
            name=f"registry {host}",
            ok=False,
            needed=False,
            found=f"does not answer: {type(error).__name__}",
            fix="check the proxy and certificate settings, or publish to oci:dist",
        )
    ok = answer.status_code in {200, 401}  # 401: it answers, and asks for credentials
    return HostFinding(name=f"registry {host}", ok=ok, needed=False, found=f"HTTP {answer.status_code}")


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, errors="replace", check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return next(iter((done.stdout + done.stderr).strip().splitlines()), f"{command[0]} prints nothing")
