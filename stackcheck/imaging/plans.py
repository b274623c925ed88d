"""What decides an image, and one key for it: images with equal keys are the same, so nothing is built twice.

In: a stack with its generated files, the engine that will build, a platform. Out: a `BuildPlan`, with the
base made and the Dockerfile's stages; for a dry run, what is known of it without making anything.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from stackcheck import vendors
from stackcheck.errors import BuildError
from stackcheck.imaging import bootstrap, host_base, platforms, stages
from stackcheck.imaging.stages import Stage
from stackcheck.matrix.stack import Stack
from stackcheck.mirrors import NO_MIRRORS, Mirrors
from stackcheck.oci.documents import sha256
from stackcheck.recipe import render

# Part of every key: raise it when the way of building changes what comes out.
RECIPE = 3
# Half the time of gzip and three quarters of its size; docker 20.10, podman, skopeo and Apptainer read it.
COMPRESSION = "compression=zstd,oci-mediatypes=true"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildPlan:
    """One image to build.

    Attributes:
        folder: Where its files go: build/<stack-id>, with -arm64 or -amd64 when not for this host's platform.
        files: Name -> bytes of the stack's committed files. They were read once: what was checked is what is
            hashed, and what is hashed is what the builder gets.
        stages: The Dockerfile's, the last one last; empty in a dry run when the base is not made yet.
    """

    stack: Stack
    folder: Path
    files: Mapping[str, bytes]
    rootfs: bootstrap.RootFs | None  # the bootstrapped base; None where the base is an image of a registry
    inputs: Mapping[str, str]  # URI -> digest of everything that decides the image
    key: str  # one value for all of them; empty in a dry run when the base is not made yet
    engine: str
    platform: str  # `linux/amd64`, …
    stages: tuple[Stage, ...]

    @property
    def target(self) -> str:
        """The image's name in the bake definition, where a dot is not allowed."""
        return "image-" + self.key[:16]

    @property
    def foreign(self) -> bool:
        """Whether its platform differs from this host's own."""
        return self.platform != platforms.native()


def make_plan(
    stack: Stack,
    engine: str,
    root: Path,
    report: Callable[[str], None] | None = None,
    *,
    platform: str | None = None,
    mirrors: Mirrors = NO_MIRRORS,
) -> BuildPlan:
    """Check and read a stack's files, make its base, and hash what decides the image.

    Without `report` nothing is made: where the base is not made yet, the plan has no key.

    Raises:
        BuildError: The stack is not rendered or not locked, or its base cannot be made or is not here.
    """
    files = checked_files(stack, root)
    platform = platform or platforms.native()
    base, mirror = stack.base, mirrors.apt.get(stack.os, ())
    rootfs = None
    if base.kind in {"host", "bootstrap"}:
        _check_architecture(stack, platform)
    if base.kind == "host":
        rootfs = host_base.load_host_base(stack, bases(root))
    elif base.kind == "bootstrap" and report:
        assert base.suite
        rootfs = bootstrap.bootstrap(
            base.suite,
            base.packages,
            bases(root),
            os_name=stack.os,
            mirror=mirror,
            selected=kernels(stack),
            report=report,
        )
    elif base.kind == "bootstrap":
        assert base.suite
        name = bootstrap.key(base.suite, base.packages, kernels(stack))
        rootfs = bootstrap.load_root_fs(bases(root) / f"{name}.json", reused=True)
        if rootfs is None:
            bootstrap.ready(base.suite, stack.os, mirror)
    plan = _plan(stack, files, engine, root=root, rootfs=rootfs, platform=platform)
    unknown = base.kind == "bootstrap" and rootfs is None
    return dataclasses.replace(plan, key="", stages=()) if unknown else plan


def checked_files(stack: Stack, root: Path) -> Mapping[str, bytes]:
    """The committed files of a stack, if its image may be built from them.

    Raises:
        BuildError: The stack is not rendered or not locked.
    """
    files = _read_files(root / "images" / stack.id)
    absent = [name for name in render.GENERATED if name not in files]
    if absent:
        raise BuildError(
            "a stack has not been rendered",
            where=str(root / "images" / stack.id),
            got=f"no {' and no '.join(absent)}",
            next_step=f"stackcheck render {stack.id}",
        )
    if stack.missing:
        raise BuildError(
            "a stack is not locked, so its image cannot be built",
            where=stack.id,
            got="\n    ".join(stack.missing),
            expected="every package and base with one digest",
            next_step=f"stackcheck lock {stack.id}, on a machine that reaches what is named above",
        )
    render.require_fresh(stack, root / "images", files)
    return files


def kernels(stack: Stack) -> bootstrap.Selected:
    """Of the kernel files in distribution packages, only those for the stack's architectures."""
    every, wanted = vendors.module(stack.vendor).kernel_files(stack.archs)
    return bootstrap.Selected(excluded=every, included=wanted)


def bases(root: Path) -> Path:
    """Where bootstrapped bases are kept."""
    return root / "build" / "bases"


def _read_files(source: Path) -> Mapping[str, bytes]:
    """Name -> bytes of the files that the builder sees; without a base that was made by hand."""
    if not source.is_dir():
        return {}
    paths = (path for path in sorted(source.iterdir()) if path.is_file() and path.name != "rootfs.tar")
    return {path.name: path.read_bytes() for path in paths}


def _plan(
    stack: Stack,
    files: Mapping[str, bytes],
    engine: str,
    *,
    root: Path,
    rootfs: bootstrap.RootFs | None,
    platform: str,
) -> BuildPlan:
    digests = {name: sha256(data) for name, data in files.items()}
    # pins.json repeats what the Dockerfile and the locks pin.
    inputs = {
        f"file:images/{stack.id}/{name}": digest for name, digest in digests.items() if name != "pins.json"
    }
    if rootfs:
        origin = "host:" if stack.base.kind == "host" else ""
        inputs[f"urn:stackcheck:rootfs:{origin}{stack.base.suite}"] = rootfs.digest
    elif stack.base.digest:
        inputs[f"docker:{stack.base.reference}"] = stack.base.digest
    decided = [RECIPE, COMPRESSION, bootstrap.SOURCE_DATE_EPOCH, engine, sorted(inputs.items())]
    native = platform == platforms.native()
    context = {**digests, "rootfs.tar": rootfs.digest if rootfs else "none"}
    return BuildPlan(
        stack=stack,
        folder=root / "build" / (stack.id if native else f"{stack.id}-{platform.partition('/')[2]}"),
        files=files,
        rootfs=rootfs,
        inputs=inputs,
        key=hashlib.sha256(json.dumps(decided if native else [*decided, platform]).encode()).hexdigest(),
        engine=engine,
        platform=platform,
        stages=stages.read_stages(files["Dockerfile"].decode(), context, platform=platform),
    )


def _check_architecture(stack: Stack, platform: str) -> None:
    if platform != platforms.native():
        raise BuildError(
            "a base is only bootstrapped for this host's own architecture",
            where=stack.id,
            got=platform,
            expected=platforms.native(),
            next_step=f"on a host of {platform}: stackcheck build {stack.id}",
        )
