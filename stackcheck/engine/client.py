"""The one door to Docker: run, inspect, load, save, and build through `buildx bake`.

In: values of this tool. Out: exit codes, facts about images, image layouts. A failure
of the daemon or the network becomes an `EngineError` or `BuildError`; no container outlives its call.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stackcheck.engine import buildx, container, host_setup
from stackcheck.engine import image_files as reading
from stackcheck.engine.buildx import BakeResult
from stackcheck.engine.container import API_TIMEOUT_S, Mount, RunSpec, engine_errors
from stackcheck.engine.image_files import ImageFiles
from stackcheck.errors import EngineError
from stackcheck.oci.image_layout import ImageLayout, unpack

if TYPE_CHECKING:
    from docker import DockerClient


__all__ = ["BakeResult", "Engine", "ImageInfo", "Mount", "RunSpec"]

LOAD_TIMEOUT_S = 1800
OLDEST_SERVER = (20, 10)
SETS_TIMES = (26, 0)  # BuildKit 0.13, the first that sets the times of files in layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageInfo:
    """What the engine knows of an image."""

    id: str  # the engine's id: the manifest's digest in the containerd store, the config's in the classic one
    tags: tuple[str, ...]
    size_bytes: int  # as the engine counts it
    architecture: str
    user: str
    env: Mapping[str, str]
    labels: Mapping[str, str]


class Engine:
    """A Docker daemon that answers, and its client for builds."""

    def __init__(self, client: DockerClient) -> None:
        self._client = client
        with engine_errors("asking the engine for its version"):
            self._info: Mapping[str, Any] = client.info()

    @classmethod
    def connect(cls) -> Engine:
        """The daemon that `DOCKER_HOST`, the Docker context's default or the default socket names.

        Raises:
            EngineError: No daemon answers, or it is too old; the message has the commands to type.
        """
        import docker

        try:
            client = container.opened(API_TIMEOUT_S)
            client.ping()
            answers = client.version()
        except (docker.errors.DockerException, OSError) as error:
            raise host_setup.missing_engine(str(error)) from error
        host_setup.refuse_podman(answers)
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
    def repeats_builds(self) -> bool:
        """Whether two builds of the same inputs have the same digest."""
        return self.version >= SETS_TIMES

    @property
    def containerd_store(self) -> bool:
        """Whether images live in containerd's store, which keeps manifests as they were built."""
        status = self._info.get("DriverStatus") or []
        return any("containerd.snapshotter" in str(row) for row in status)

    @property
    def architecture(self) -> str:
        """The engine's processors as images name them: amd64, arm64."""
        name = str(self._info.get("Architecture", ""))
        return {"x86_64": "amd64", "aarch64": "arm64"}.get(name, name)

    @property
    def description(self) -> str:
        """Name, version and store, for keys and reports."""
        store = "containerd" if self.containerd_store else "classic"
        return f"docker {self._info.get('ServerVersion')} ({store} store)"

    def inspect(self, reference: str) -> ImageInfo:
        """Facts about an image that the engine has."""
        with engine_errors(f"inspecting {reference}"):
            facts = self._client.images.get(reference).attrs
        config = facts.get("Config") or {}
        return ImageInfo(
            id=facts["Id"],
            tags=tuple(facts.get("RepoTags") or ()),
            size_bytes=int(facts.get("Size") or 0),
            architecture=facts.get("Architecture", ""),
            user=config.get("User", ""),
            env={name: value for name, _, value in (e.partition("=") for e in config.get("Env") or ())},
            labels=config.get("Labels") or {},
        )

    def step_sizes(self, reference: str) -> tuple[int, ...]:
        """Unpacked bytes of each step of an image's history, the first step first."""
        with engine_errors(f"measuring {reference}"):
            steps = self._client.images.get(reference).history()
        return tuple(int(step["Size"]) for step in reversed(steps))

    def has(self, reference: str) -> bool:
        """Whether the engine has an image."""
        import docker

        with engine_errors(f"looking for {reference}"):
            try:
                self._client.images.get(reference)
            except docker.errors.ImageNotFound:
                return False
        return True

    def load(self, layout: Path, reference: str) -> None:
        """Load the image of a layout into the engine under a name."""
        with (
            engine_errors(f"loading {reference}"),
            self._long_timeout(),
            ImageLayout(layout).stream(reference) as tar,
        ):
            api: Any = self._client.api  # the stubs know no return type
            for event in api.load_image(tar, quiet=True) or ():
                if "error" in event:
                    raise EngineError("the engine refused an image", where=reference, got=event["error"])

    def save(self, reference: str, layout: Path) -> str:
        """Write an image of the engine as a layout with one manifest.

        A tag may move meanwhile: what it names is read once, and saved and compared by that id.

        Returns:
            The manifest's digest.
        """
        found = self.inspect(reference)
        with engine_errors(f"saving {reference}"), self._long_timeout():
            chunks = self._client.api.get_image(found.id, chunk_size=1 << 20)
            return unpack(chunks, layout, architecture=found.architecture, image_id=found.id)

    def pull(self, reference: str) -> None:
        """Fetch an image from its registry, with the user's own Docker credentials.

        Raises:
            EngineError: No registry gives it, or none answers.
        """
        import docker

        with engine_errors(f"pulling {reference}"), self._long_timeout():
            try:
                self._client.images.pull(reference)
            except docker.errors.APIError as error:
                raise EngineError(
                    "the engine does not have this image and cannot pull it",
                    where=reference,
                    got=str(error.explanation or error),
                    expected="an image that `docker images` lists, or that a registry gives to you",
                    next_step="look at the spelling; for a private registry: docker login HOST",
                ) from error

    def remove(self, reference: str) -> None:
        """Remove a name; the engine deletes the image with its last name."""
        with engine_errors(f"removing {reference}"):
            self._client.images.remove(reference, force=True)

    @contextlib.contextmanager
    def files(self, reference: str) -> Iterator[ImageFiles]:
        """The files of an image, read by the engine: no program of the image runs."""
        with reading.of_image(self._client, reference) as found:
            yield found

    def run(self, spec: RunSpec) -> int:
        """Run a container to its end and remove it; the exit code of its command."""
        return container.run(self._client, spec)

    def run_here(self, spec: RunSpec, *, stop_timeout_s: float) -> int:
        """Run a user's program as if it ran here: its streams, terminal and signals; its exit code."""
        from stackcheck.engine import terminal

        return terminal.run(self._client, spec, stop_timeout_s=stop_timeout_s)

    def bake(
        self,
        definition: Mapping[str, Any],
        targets: Sequence[str],
        *,
        report: Callable[[str], None],
        log: Path | None = None,
        timeout_s: float = buildx.TIMEOUT_S,
    ) -> BakeResult:
        """Build targets of a bake definition."""
        return buildx.bake(definition, targets, report=report, log=log, timeout_s=timeout_s)

    @contextlib.contextmanager
    def _long_timeout(self) -> Iterator[None]:
        """A longer timeout, for calls that move gigabytes."""
        api = self._client.api
        before, api.timeout = api.timeout, LOAD_TIMEOUT_S
        try:
            yield
        finally:
            api.timeout = before
