"""The only module that talks to Docker: run, inspect, load, save, and build through `buildx bake`.

In: values of this tool. Out: exit codes, facts about images, image layouts. What the daemon or the network
does wrong becomes an `EngineError` or `BuildError`; no container outlives the call that started it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any, Literal

from stackcheck import archive, host_setup
from stackcheck.buildlog import BuildLog
from stackcheck.errors import BuildError, ChecksFailedError, EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from docker import DockerClient
    from docker.models.containers import Container

LABEL = "org.stackcheck.run"
API_TIMEOUT_S = 120
LOAD_TIMEOUT_S = 1800
BUILD_TIMEOUT_S = 4 * 3600.0
OLDEST_SERVER = (20, 10)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mount:
    """A folder or file of the host in a container."""

    source: Path
    target: str
    read_only: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A container to run; the defaults are the least that a process can do with.

    Attributes:
        tmpfs: Path -> mount options. Programs may be run from /tmp: Triton and Inductor compile there.
        devices: Device nodes of the host, by path, with the same path inside.
        group_add: Numeric groups.
        ulimits: Name -> soft and hard limit; -1 is unlimited.
        timeout_s: The container is killed after this many seconds.
        on_line: Gets each line of output as it appears.
    """

    image: str
    command: tuple[str, ...]
    user: str | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    devices: tuple[str, ...] = ()
    group_add: tuple[int, ...] = ()
    tmpfs: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"/tmp": "rw,exec,nosuid,nodev,mode=1777"}  # noqa: S108  # the container's
    )
    shm_size_bytes: int = 64 << 20
    network: Literal["none", "bridge", "host"] = "none"
    read_only: bool = True
    cap_drop: tuple[str, ...] = ("ALL",)
    security_opt: tuple[str, ...] = ("no-new-privileges",)
    ulimits: Mapping[str, int] = dataclasses.field(default_factory=dict)
    workdir: str | None = None
    timeout_s: float = 3600.0
    on_line: Callable[[str], None] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageInfo:
    """What the engine knows of an image.

    Attributes:
        id: The engine's id: the manifest's digest in the containerd store, the config's in the classic one.
        size_bytes: As the engine counts it.
    """

    id: str
    tags: tuple[str, ...]
    size_bytes: int
    architecture: str
    user: str
    env: Mapping[str, str]
    labels: Mapping[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BakeResult:
    """What a build did: steps in all, and those that were there already."""

    steps: int
    cached: int
    seconds: float


class Engine:
    """A Docker daemon that answers, and its client for builds."""

    def __init__(self, client: DockerClient) -> None:
        self._client = client
        with _talking("asking the engine what it is"):
            self._info: Mapping[str, Any] = client.info()

    @classmethod
    def connect(cls) -> Engine:
        """The daemon that `DOCKER_HOST`, the Docker context's default or the default socket names.

        Raises:
            EngineError: None answers, or it is too old; the message has the commands to type.
        """
        import docker

        try:
            client = docker.from_env(timeout=API_TIMEOUT_S)
            client.ping()
        except (docker.errors.DockerException, OSError) as error:
            raise host_setup.missing_engine(str(error)) from error
        engine = cls(client)
        if engine.version < OLDEST_SERVER:
            raise EngineError(
                "the Docker daemon is too old",
                got=str(engine._info.get("ServerVersion")),
                expected=f"{OLDEST_SERVER[0]}.{OLDEST_SERVER[1]} or newer",
                next_step="update Docker, or point DOCKER_HOST at a newer daemon",
            )
        return engine

    @property
    def version(self) -> tuple[int, ...]:
        """The server's version."""
        head = str(self._info.get("ServerVersion", "0")).split("+")[0].split("-")[0]
        return tuple(int(part) for part in head.split(".") if part.isdigit())

    @property
    def containerd_store(self) -> bool:
        """Whether images live in containerd's store, which keeps manifests as they were built."""
        status = self._info.get("DriverStatus") or []
        return any("containerd.snapshotter" in str(row) for row in status)

    @property
    def description(self) -> str:
        """Name, version and store, for keys and reports."""
        store = "containerd" if self.containerd_store else "classic"
        return f"docker {self._info.get('ServerVersion')} ({store} store)"

    def run(self, spec: RunSpec) -> int:
        """Run a container to its end and remove it.

        Returns:
            The exit code of its command.

        Raises:
            EngineError: It could not be started, or the daemon stopped answering.
            ChecksFailedError: It did not end in time.
        """
        with self._container(spec) as container:
            with _talking("starting a container"):
                _start(container, spec)
            timer = threading.Timer(spec.timeout_s, _kill, [container])
            timer.start()
            start = time.monotonic()
            try:
                with _talking("reading a container's output"):
                    _stream(container, spec.on_line)
                    code = int(container.wait(timeout=API_TIMEOUT_S)["StatusCode"])
            finally:
                timer.cancel()
            if code and time.monotonic() - start >= spec.timeout_s:
                raise ChecksFailedError(
                    "the container did not end in time and was killed",
                    where=" ".join(spec.command[:4]),
                    expected=f"an end within {spec.timeout_s:.0f} s",
                )
            return code

    def inspect(self, reference: str) -> ImageInfo:
        """Facts about an image that the engine has.

        Raises:
            EngineError: It has no such image.
        """
        with _talking(f"inspecting {reference}"):
            facts = self._client.images.get(reference).attrs
        config = facts.get("Config") or {}
        return ImageInfo(
            id=facts["Id"],
            tags=tuple(facts.get("RepoTags") or ()),
            size_bytes=int(facts.get("Size") or 0),
            architecture=facts.get("Architecture", ""),
            user=config.get("User", ""),
            env=dict(entry.split("=", 1) for entry in config.get("Env") or ()),
            labels=config.get("Labels") or {},
        )

    def step_sizes(self, reference: str) -> tuple[int, ...]:
        """Unpacked bytes of each step of an image's history, the first step first."""
        with _talking(f"measuring {reference}"):
            steps = self._client.images.get(reference).history()
        return tuple(int(step["Size"]) for step in reversed(steps))

    def has(self, reference: str) -> bool:
        """Whether the engine has an image."""
        import docker

        with _talking(f"looking for {reference}"):
            try:
                self._client.images.get(reference)
            except docker.errors.ImageNotFound:
                return False
        return True

    def load(self, layout: Path, reference: str) -> None:
        """Give the engine the image of a layout under a name."""
        with _talking(f"loading {reference}"), self._patience(), archive.stream(layout, reference) as tar:
            api: Any = self._client.api  # the stubs know no return type
            for event in api.load_image(tar, quiet=True) or ():
                if "error" in event:
                    raise EngineError("the engine refused an image", where=reference, got=event["error"])

    def save(self, reference: str, layout: Path) -> str:
        """Write an image of the engine as a layout with one manifest.

        Returns:
            The manifest's digest.
        """
        architecture = self.inspect(reference).architecture
        with _talking(f"saving {reference}"), self._patience():
            chunks = self._client.api.get_image(reference, chunk_size=1 << 20)
            return archive.unpack(chunks, layout, architecture=architecture)

    def pull(self, reference: str) -> None:
        """Fetch an image from its registry, with the user's own Docker credentials."""
        with _talking(f"pulling {reference}"), self._patience():
            self._client.images.pull(reference)

    def remove(self, reference: str) -> None:
        """Take a name away from the engine; the image goes when it was the last one."""
        with _talking(f"removing {reference}"):
            self._client.images.remove(reference, force=True)

    def bake(
        self,
        definition: Mapping[str, Any],
        targets: Sequence[str],
        *,
        report: Callable[[str], None],
        log: Path | None = None,
        timeout_s: float = BUILD_TIMEOUT_S,
    ) -> BakeResult:
        """Build targets of a bake definition.

        Raises:
            BuildError: A step failed (the message has its stage, last lines and place), or time ran out.
            EngineError: buildx is missing or the daemon stopped.
        """
        start = time.monotonic()
        seen = BuildLog(report)
        process = _spawn_bake(targets)
        timer = threading.Timer(timeout_s, process.kill)
        timer.start()
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it ended at once: its output says why
                process.stdin.write(json.dumps(definition))
                process.stdin.close()
            with log.open("w", encoding="utf-8") if log else contextlib.nullcontext() as file:
                for line in process.stdout or ():
                    seen.feed(line)
                    if file:
                        file.write(line)
            code = process.wait(timeout=30)
        finally:
            timer.cancel()
            _end(process)
        seconds = time.monotonic() - start
        if code:
            self._raise_build_error(seen, log, seconds, timeout_s)
        return BakeResult(steps=len(seen.steps), cached=len(seen.cached & seen.steps), seconds=seconds)

    def _raise_build_error(self, seen: BuildLog, log: Path | None, seconds: float, timeout_s: float) -> None:
        if seconds >= timeout_s:
            raise BuildError("the build did not end in time", expected=f"an end within {timeout_s:.0f} s")
        if not host_setup.socket_answers():
            raise EngineError(
                "the engine stopped in the middle of a build",
                got=seen.failure().message,
                next_step="stackcheck doctor --fix, then the same command: finished steps are kept",
            )
        failure = seen.failure()
        text = "\n    ".join(failure.last_lines)
        full = "no space left on device" in f"{text} {failure.message}"
        place = f"{failure.file}:{failure.line}" if failure.file else None
        stage = f"stage {failure.stage}" if failure.stage else None
        raise BuildError(
            "the disk is full" if full else f"a build step failed: {failure.step or failure.message}",
            where=", ".join(part for part in (place, stage) if part) or None,
            got=f"{failure.message}; it wrote last:\n    {text}",
            next_step=(
                "free space: docker builder prune" if full else f"read {log}" if log else "run it again"
            ),
        )

    @contextlib.contextmanager
    def _patience(self) -> Iterator[None]:
        """Gigabytes take longer than a question."""
        api = self._client.api
        before, api.timeout = api.timeout, LOAD_TIMEOUT_S
        try:
            yield
        finally:
            api.timeout = before

    @contextlib.contextmanager
    def _container(self, spec: RunSpec) -> Iterator[Container]:
        with _talking("making a container"):
            container = self._client.containers.create(
                spec.image, list(spec.command), **_create_arguments(spec)
            )
        try:
            yield container
        finally:
            import docker

            # A daemon that died took the container along; the error above says so already.
            with contextlib.suppress(docker.errors.DockerException, OSError):
                container.remove(force=True)


def _create_arguments(spec: RunSpec) -> dict[str, Any]:
    from docker import types

    return {
        "name": f"stackcheck-{uuid.uuid4().hex[:12]}",
        "labels": {LABEL: str(os.getpid())},
        "user": spec.user,
        "environment": dict(spec.env),
        "mounts": [
            types.Mount(m.target, str(m.source.absolute()), type="bind", read_only=m.read_only)
            for m in spec.mounts
        ],
        "devices": [f"{device}:{device}:rwm" for device in spec.devices],
        "group_add": list(spec.group_add),
        "tmpfs": dict(spec.tmpfs),
        "shm_size": spec.shm_size_bytes,
        "network_mode": spec.network,
        "read_only": spec.read_only,
        "cap_drop": list(spec.cap_drop),
        "security_opt": list(spec.security_opt),
        "ulimits": [types.Ulimit(name=n, soft=limit, hard=limit) for n, limit in spec.ulimits.items()],
        "working_dir": spec.workdir,
        "init": True,  # reaps what a killed rank leaves behind
    }


def _start(container: Container, spec: RunSpec) -> None:
    import docker

    try:
        container.start()
    except docker.errors.APIError as error:
        if "rlimit" in str(error):
            raise EngineError(
                "this daemon may not raise the limits that the container asks for",
                where=", ".join(f"{name}={limit}" for name, limit in spec.ulimits.items()),
                got=str(error.explanation or error),
                expected="a daemon with CAP_SYS_RESOURCE (not one inside a restricted container)",
                next_step="leave the limit out: memlock is only needed for RDMA",
            ) from error
        raise


def _stream(container: Container, on_line: Callable[[str], None] | None) -> None:
    """Hand over whole lines; the engine's chunks may end anywhere."""
    rest = b""
    for chunk in container.logs(stream=True, follow=True):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if on_line:
                on_line(line.decode("utf-8", errors="replace").rstrip("\r"))
    if rest and on_line:
        on_line(rest.decode("utf-8", errors="replace"))


def _kill(container: Container) -> None:
    import docker

    with contextlib.suppress(docker.errors.DockerException, OSError):  # it may just have ended by itself
        container.kill()


def _spawn_bake(targets: Sequence[str]) -> subprocess.Popen[str]:
    command = ["docker", "buildx", "bake", "--builder", "default", "--file", "-", "--progress", "plain"]
    command += ["--provenance=false", "--sbom=false", *targets]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise host_setup.missing_engine(f"the docker client cannot be started: {error}") from error


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()


@contextlib.contextmanager
def _talking(doing: str) -> Iterator[None]:
    """Turn what the SDK raises into an error of ours."""
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
