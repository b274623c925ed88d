"""What decides an image, and one key for it: equal keys mean that an image need not be built again.

In: a stack with its rendered files, the engine that will build, a platform. Out: a `Plan`, with the base made
and the Dockerfile's stages, or, for a dry run, what is known of it without making anything.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING

from stackcheck import vendors
from stackcheck.build import bootstrap, platforms, stages
from stackcheck.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping  # a named tuple's annotations are read at run time
    from pathlib import Path

    from stackcheck.build.stages import Stage
    from stackcheck.matrix.stack import Stack

# Part of every key: raise it when the way of building changes what comes out.
RECIPE = 3
REQUIRED_FILES = ("Dockerfile", "stack.json")
# Half the time of gzip and three quarters of its size; docker 20.10, podman, skopeo and Apptainer read it.
COMPRESSION = "compression=zstd,oci-mediatypes=true"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One image to make.

    Attributes:
        folder: Where its files go: build/<stack-id>, and -arm64 or -amd64 after it when not this host's own.
        rootfs: The bootstrapped base; None where the base is an image of a registry.
        inputs: URI -> digest of everything that decides the image.
        key: One value for all of them.
        engine: What builds, in its own words.
        platform: `linux/amd64`, …
        stages: The Dockerfile's, the last one last; empty in a dry run when the base is not made yet.
    """

    stack: Stack
    folder: Path
    source: Path
    rootfs: bootstrap.RootFs | None
    inputs: Mapping[str, str]
    key: str
    engine: str
    platform: str
    stages: tuple[Stage, ...]

    @property
    def target(self) -> str:
        """Its name in the bake definition, which knows no dots."""
        return "image-" + self.key[:16]

    @property
    def foreign(self) -> bool:
        """Whether it is for another platform than this host's own."""
        return self.platform != platforms.native()


def make_plan(
    stack: Stack, engine: str, root: Path, report: Callable[[str], None], *, platform: str | None = None
) -> Plan:
    """Read a stack's files, make its base, and hash what decides the image.

    Raises:
        BuildError: The stack is not rendered or not locked, or its base cannot be made.
    """
    source = root / "images" / stack.id
    _check_files(stack, source)
    platform = platform or platforms.native()
    rootfs = None
    if stack.base.kind == "bootstrap":
        assert stack.base.suite
        _check_architecture(stack, platform)
        rootfs = bootstrap.bootstrap(
            stack.base.suite, stack.base.packages, bases(root), selected=kernels(stack), report=report
        )
    return _plan(stack, engine, root, rootfs, platform)


def look_ahead(stack: Stack, engine: str, root: Path, *, platform: str | None = None) -> Plan:
    """The same without making anything: where the base is not made yet, no key can be known.

    Raises:
        BuildError: The stack is not rendered or not locked.
    """
    _check_files(stack, root / "images" / stack.id)
    platform = platform or platforms.native()
    rootfs = None
    if stack.base.kind == "bootstrap":
        assert stack.base.suite
        _check_architecture(stack, platform)
        name = bootstrap.key(stack.base.suite, stack.base.packages, kernels(stack))
        rootfs = bootstrap.load(bases(root) / f"{name}.json", reused=True)
    plan = _plan(stack, engine, root, rootfs, platform)
    unknown = stack.base.kind == "bootstrap" and rootfs is None
    return dataclasses.replace(plan, key="", stages=()) if unknown else plan


def kernels(stack: Stack) -> bootstrap.Selected:
    """Of the kernel files of distribution packages, those for the stack's architectures alone."""
    every, wanted = vendors.module(stack.vendor).kernel_files(stack.archs)
    return bootstrap.Selected(excluded=every, included=wanted)


def bases(root: Path) -> Path:
    """Where bootstrapped bases are kept."""
    return root / "build" / "bases"


def _plan(stack: Stack, engine: str, root: Path, rootfs: bootstrap.RootFs | None, platform: str) -> Plan:
    source = root / "images" / stack.id
    names = [path.name for path in context_files(source) if path.name != "pins.json"]
    inputs = {f"file:images/{stack.id}/{name}": digest_of((source / name).read_bytes()) for name in names}
    if rootfs:
        inputs[f"urn:stackcheck:rootfs:{stack.base.suite}"] = rootfs.digest
    elif stack.base.digest:
        inputs[f"docker:{stack.base.reference}"] = stack.base.digest
    decided = [RECIPE, COMPRESSION, bootstrap.SOURCE_DATE_EPOCH, engine, sorted(inputs.items())]
    native = platform == platforms.native()
    files = {path.name: digest_of(path.read_bytes()) for path in context_files(source)}
    files["rootfs.tar"] = rootfs.digest if rootfs else "none"
    return Plan(
        stack=stack,
        folder=root / "build" / (stack.id if native else f"{stack.id}-{platform.partition('/')[2]}"),
        source=source,
        rootfs=rootfs,
        inputs=inputs,
        key=hashlib.sha256(json.dumps(decided if native else [*decided, platform]).encode()).hexdigest(),
        engine=engine,
        platform=platform,
        stages=stages.read((source / "Dockerfile").read_text(encoding="utf-8"), files, platform=platform),
    )


def context_files(source: Path) -> tuple[Path, ...]:
    """The committed files of a stack that its builder sees."""
    return tuple(path for path in sorted(source.iterdir()) if path.is_file() and path.name != "rootfs.tar")


def _check_architecture(stack: Stack, platform: str) -> None:
    if platform != platforms.native():
        raise BuildError(
            "a base is only bootstrapped for this host's own architecture",
            where=stack.id,
            got=platform,
            expected=platforms.native(),
            next_step=f"on a host of {platform}: stackcheck build {stack.id}",
        )


def _check_files(stack: Stack, source: Path) -> None:
    absent = [name for name in REQUIRED_FILES if not (source / name).is_file()]
    if absent:
        raise BuildError(
            "a stack has not been rendered",
            where=str(source),
            got=f"no {' and no '.join(absent)}",
            next_step=f"stackcheck render {stack.id}",
        )
    if stack.missing:
        raise BuildError(
            "a stack is not locked, so its image cannot be built",
            where=stack.id,
            got="\n    ".join(stack.missing),
            expected="every package and base at one digest",
            next_step=f"stackcheck lock {stack.id}, on a machine that reaches what is named above",
        )


def digest_of(data: bytes) -> str:
    """`sha256:…` of some bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()
