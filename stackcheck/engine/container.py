"""One container from start to end, with no more rights than it needs.

In: a `RunSpec`. Out: its lines while it runs, and its exit code. It never outlives the call.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import os
import posixpath
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from stackcheck.engine import interrupts, leftovers, output
from stackcheck.errors import ChecksFailedError, EngineError

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

API_TIMEOUT_S = 120
MEMORY_SHARE = 0.95  # of the host's memory
TMPFS_SHARE = 0.5  # for each tmpfs; what is in it counts as the container's memory too
QUOTA_POLL_S = 1.0
# For any uid in any image: a home that can be written (the container's own tmpfs), and a name: torch asks for
# one, and an image that was not built here has no name for the uid that it runs with.
USER_ENV = {"HOME": "/tmp", "USER": "stackcheck", "LOGNAME": "stackcheck"}  # noqa: S108
# torchrun and gloo look up the name of their own host. Without a network no server answers, and each look-up
# takes ten seconds: so the name is in /etc/hosts, and the name server is one that refuses at once.
OWN_NAME: dict[str, Any] = {
    "hostname": "stackcheck",
    "extra_hosts": {"stackcheck": "127.0.0.1"},
    "dns": ["127.0.0.1"],
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mount:
    """A folder or file of the host in a container."""

    source: Path
    target: str
    read_only: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A container to run; the defaults are the fewest rights that a process needs.

    Attributes:
        entrypoint: The program, before `command`, and no health check. None: both are the image's own, and
            may do anything first.
        env: Variables beside those of the image; with None, the image's own variable of that name is removed.
        tmpfs: Path -> mount options. Programs may be run from /tmp: Triton and Inductor compile there.
        devices: Device nodes of the host, by path, with the same path inside; or CDI names.
        quota_bytes: The container is killed when its writable mounts together hold more; None: no limit.
        ulimits: Name -> soft and hard limit; -1 is unlimited.
        beside: A context of the tool that runs beside the container: entered when the container runs, with a
            function that ends it, and left after its end.
        quota_folders: More folders that `quota_bytes` counts; the container writes there through open files.
        on_start: Called when it runs, before the time that `timeout_s` limits begins; what it raises ends it.
        on_line: Gets each line of output as it appears; `stackcheck.engine.output` limits how much there is.
    """

    image: str
    command: tuple[str, ...]
    entrypoint: tuple[str, ...] | None = None
    user: str | None = None
    env: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    devices: tuple[str, ...] = ()
    group_add: tuple[int, ...] = ()  # numeric groups
    tmpfs: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"/tmp": "rw,exec,nosuid,nodev,mode=1777"}  # noqa: S108  # the container's
    )
    shm_size_bytes: int = 64 << 20
    pids: int = 16_384
    quota_bytes: int | None = None
    network: Literal["none", "bridge", "host"] = "none"
    read_only: bool = True
    cap_drop: tuple[str, ...] = ("ALL",)
    security_opt: tuple[str, ...] = ("no-new-privileges",)
    ulimits: Mapping[str, int] = dataclasses.field(default_factory=dict)
    workdir: str | None = None
    timeout_s: float = 3600.0  # the container is killed after this many seconds
    beside: Callable[[Callable[[], None]], contextlib.AbstractContextManager[None]] | None = None
    quota_folders: tuple[Path, ...] = ()
    on_start: Callable[[], None] | None = None
    on_line: Callable[[str], None] | None = None


def run(client: DockerClient, spec: RunSpec) -> int:
    """Run a container to its end and remove it.

    Returns:
        The exit code of its command.

    Raises:
        EngineError: It could not be started, or the daemon stopped answering.
        ChecksFailedError: It did not end in time.
    """
    with made(client, spec) as (container, signals), signals.let_in():
        return _run(container, spec)


@contextlib.contextmanager
def made(
    client: DockerClient, spec: RunSpec, **more: Any
) -> Iterator[tuple[Container, interrupts.Interrupts]]:
    """A container that is removed at the end, and the signals that are held meanwhile; `more` is Docker's."""
    with engine_errors("making a container"):
        leftovers.sweep(client)
        arguments = _create_arguments(spec) | _limits(client.info(), spec) | more
        volumes = _volumes(client.images.get(spec.image).attrs, spec, arguments["name"])
        arguments["mounts"] += volumes
    names = [volume["Source"] for volume in volumes]
    with interrupts.held() as signals, removed_at_the_end(client, arguments["name"], names):
        with engine_errors("making a container"):
            container = client.containers.create(spec.image, list(spec.command), **arguments)
        yield container, signals


def _run(container: Container, spec: RunSpec) -> int:
    """Start a container, and wait for its end."""
    with engine_errors("starting a container"):
        # Before the start, so that nothing is lost: no log keeps what it prints.
        frames: Any = container.attach(stream=True, stdout=True, stderr=True, demux=True)
        start(container, spec)
    if spec.on_start:
        spec.on_start()
    timer = threading.Timer(spec.timeout_s, _kill, [container])
    timer.start()
    quota = _Quota(container, spec)
    quota.start()
    begin = time.monotonic()
    try:
        ended = functools.partial(_kill, container)
        beside = spec.beside(ended) if spec.beside else contextlib.nullcontext()
        with beside, engine_errors("reading a container's output"), _drained(container, frames):
            output.read(frames, spec.on_line or (lambda _line: None), _name(spec))
            code = int(container.wait(timeout=API_TIMEOUT_S)["StatusCode"])
    finally:
        timer.cancel()
        quota.stop()
    quota.check()
    if code and time.monotonic() - begin >= spec.timeout_s:
        raise ChecksFailedError(
            "the container did not end in time and was killed",
            where=_name(spec),
            expected=f"an end within {spec.timeout_s:.0f} s",
        )
    return code


@contextlib.contextmanager
def _drained(container: Container, frames: Iterable[object]) -> Iterator[None]:
    """If the body raises, end the container and read the rest: the engine ends none whose reader stopped."""
    try:
        yield
    except ChecksFailedError:
        killer = threading.Thread(target=_kill, args=[container])
        killer.start()
        collections.deque(frames, maxlen=0)
        killer.join()
        raise


@contextlib.contextmanager
def removed_at_the_end(client: DockerClient, name: str, volumes: Iterable[str] = ()) -> Iterator[None]:
    """Remove the container of this name when the body ends, in whatever way."""
    try:
        yield
    finally:
        leftovers.remove(client.api, name, volumes)


def _create_arguments(spec: RunSpec) -> dict[str, Any]:
    from docker import types

    return {
        "name": f"stackcheck-{uuid.uuid4().hex[:12]}",
        "labels": leftovers.labels(),
        "entrypoint": None if spec.entrypoint is None else list(spec.entrypoint),
        # An image's health check is one more program of the image that would run beside ours.
        "healthcheck": None if spec.entrypoint is None else {"test": ["NONE"]},
        "user": spec.user,
        "environment": dict(spec.env),
        "mounts": [
            types.Mount(m.target, str(m.source.absolute()), type="bind", read_only=m.read_only)
            for m in spec.mounts
        ],
        "devices": [f"{device}:{device}:rwm" for device in spec.devices if "=" not in device],
        "device_requests": [
            types.DeviceRequest(driver="cdi", device_ids=[name]) for name in spec.devices if "=" in name
        ],
        "group_add": list(spec.group_add),
        "tmpfs": dict(spec.tmpfs),
        "shm_size": spec.shm_size_bytes,
        "network_mode": spec.network,
        **(OWN_NAME if spec.network == "none" else {}),
        "read_only": spec.read_only,
        "cap_drop": list(spec.cap_drop),
        "security_opt": list(spec.security_opt),
        "ulimits": [types.Ulimit(name=n, soft=limit, hard=limit) for n, limit in spec.ulimits.items()],
        "working_dir": spec.workdir,
        "log_config": types.LogConfig(type="none"),  # its output is read as it comes, and kept on no disk
        "init": True,  # reaps what a killed rank leaves behind
    }


def _limits(info: Mapping[str, Any], spec: RunSpec) -> dict[str, Any]:
    """Limits by the memory of the engine's host: without them one container can stop all others there."""
    memory = int(info["MemTotal"] * MEMORY_SHARE)
    tmpfs_bytes = int(info["MemTotal"] * TMPFS_SHARE)
    limits: dict[str, Any] = {
        "tmpfs": {path: f"{options},size={tmpfs_bytes}" for path, options in spec.tmpfs.items()}
    }
    if info.get("PidsLimit"):
        limits["pids_limit"] = spec.pids
    if info.get("MemoryLimit"):
        limits["mem_limit"] = memory
    if info.get("SwapLimit"):
        limits["memswap_limit"] = memory  # no swap on top
    return limits


def _volumes(image: Mapping[str, Any], spec: RunSpec, name: str) -> list[Any]:
    """The volumes that an image declares, read-only like its root.

    The engine would make anonymous ones, which are writable, may not be read-only, and stay. These have
    names.

    Raises:
        ChecksFailedError: One is at, below or above a mount of stackcheck, so it could replace stackcheck's
            files.
    """
    from docker import types

    declared = (image.get("Config") or {}).get("Volumes") or {}
    for path, mount in itertools.product(declared, spec.mounts):
        own, theirs = PurePosixPath(mount.target), PurePosixPath(posixpath.normpath(path))
        if own.is_relative_to(theirs) or theirs.is_relative_to(own):
            raise ChecksFailedError(
                "the image declares a volume where a folder of this tool is mounted",
                where=spec.image,
                got=f"VOLUME {path}",
                expected=f"no volume at, below or above {mount.target}",
                next_step="build the image without this volume",
            )
    paths = [path for path in declared if posixpath.normpath(path) not in spec.tmpfs]
    return [
        types.Mount(path, f"{name}-{number}", type="volume", read_only=True)
        for number, path in enumerate(paths)
    ]


class _Quota:
    """Kills a container whose writable mounts hold too much: a bind mount has no limit of its own."""

    def __init__(self, container: Container, spec: RunSpec) -> None:
        self._container, self._limit = container, spec.quota_bytes
        writable = (mount.source for mount in spec.mounts if not mount.read_only)
        self._folders = [*writable, *spec.quota_folders]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        if self._limit is not None:
            self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._limit is not None:
            self._thread.join()

    def check(self) -> None:
        """Compare what the mounts hold with the limit once more; called after the end too."""
        if self._limit is not None and (held := _held(self._folders)) > self._limit:
            raise ChecksFailedError(
                "the container wrote too much into its output folder and was killed",
                where=", ".join(map(str, self._folders)),
                got=f"{held} bytes",
                expected=f"at most {self._limit} bytes",
                next_step="look at what the image writes there, then remove it",
            )

    def _watch(self) -> None:
        while not self._ended.wait(QUOTA_POLL_S):
            if self._limit is not None and _held(self._folders) > self._limit:
                _kill(self._container)
                return


def _held(folders: Iterable[Path]) -> int:
    """Bytes on disk, without holes of sparse files and without files that are removed meanwhile."""
    total = 0
    for place, _, names in (found for folder in folders for found in os.walk(folder)):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512  # noqa: PTH118  # a hot path
    return total


def start(container: Container, spec: RunSpec) -> None:
    """Start a container; a limit that the daemon may not raise is named."""
    import docker

    try:
        container.start()
    except docker.errors.APIError as error:
        if "rlimit" in str(error):
            raise EngineError(
                "this daemon is not allowed to raise the limits that the container needs",
                where=", ".join(f"{name}={limit}" for name, limit in spec.ulimits.items()),
                got=str(error.explanation or error),
                expected="a daemon with CAP_SYS_RESOURCE (not one inside a restricted container)",
                next_step="use a daemon of the host itself: device checks pin gigabytes of memory",
            ) from error
        raise


def _name(spec: RunSpec) -> str:
    return " ".join((*(spec.entrypoint or ()), *spec.command)[:4])


def _kill(container: Container) -> None:
    import docker

    with contextlib.suppress(docker.errors.DockerException, OSError):  # it may just have ended by itself
        container.kill()


def opened(timeout_s: float) -> DockerClient:
    """A client of the daemon that `DOCKER_HOST` names, or else of the default socket.

    Raises:
        EngineError: `DOCKER_HOST` or docker's own configuration is wrong; the SDK checks neither.
    """
    import docker

    try:
        return docker.from_env(timeout=timeout_s)  # type: ignore[arg-type]
    except (docker.errors.DockerException, OSError):
        raise
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise EngineError(
            "docker's settings cannot be read",
            where="DOCKER_HOST, DOCKER_CONFIG or ~/.docker/config.json",
            got=str(error),
            next_step="docker info, which names the one that is wrong",
        ) from error


@contextlib.contextmanager
def engine_errors(doing: str) -> Iterator[None]:
    """Turn exceptions of the Docker SDK into errors of stackcheck."""
    import docker
    import requests

    try:
        yield
    except docker.errors.ImageNotFound as error:
        raise EngineError(
            "the engine has no such image",
            where=doing,
            got=str(error.explanation),
            next_step="docker images, or stackcheck build STACK",
        ) from error
    except docker.errors.APIError as error:
        raise EngineError("the engine refused", where=doing, got=str(error.explanation or error)) from error
    except requests.HTTPError as error:
        raise EngineError("the engine refused", where=doing, got=error.response.text[-500:]) from error
    except (docker.errors.DockerException, requests.RequestException, ConnectionError) as error:
        raise EngineError(
            "the engine stopped answering", where=doing, got=str(error), next_step="stackcheck doctor --fix"
        ) from error
