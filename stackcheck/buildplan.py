"""What decides an image, and one key for it: equal keys mean that an image need not be built again.

In: a stack with its rendered files, the engine that will build. Out: a `Plan`, with the base made.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING

from stackcheck import bootstrap
from stackcheck.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from stackcheck.engine import Engine
    from stackcheck.stack import Stack

# Part of every key: raise it when the way of building changes what comes out.
RECIPE = 2
REQUIRED_FILES = ("Dockerfile", "stack.json")
COPIED_FILES = (*REQUIRED_FILES, "requirements.lock", "pins.json")
# Half the time of gzip and three quarters of its size; docker 20.10, podman, skopeo and Apptainer read it.
COMPRESSION = "compression=zstd,oci-mediatypes=true"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One image to make.

    Attributes:
        inputs: URI -> digest of everything that decides the image.
        key: One value for all of them.
    """

    stack: Stack
    folder: Path
    source: Path
    rootfs: bootstrap.RootFs | None
    inputs: Mapping[str, str]
    key: str

    @property
    def target(self) -> str:
        """Its name in the bake definition, which knows no dots."""
        return "image-" + self.key[:16]


def make_plan(stack: Stack, engine: Engine, root: Path, report: Callable[[str], None]) -> Plan:
    """Read a stack's files, make its base, and hash what decides the image.

    Raises:
        BuildError: The stack is not rendered or not locked, or its base cannot be made.
    """
    source = root / "images" / stack.id
    _check_files(stack, source)
    names = [name for name in COPIED_FILES if (source / name).exists() and name != "pins.json"]
    inputs = {f"file:images/{stack.id}/{name}": digest_of((source / name).read_bytes()) for name in names}
    rootfs = None
    if stack.base.kind == "bootstrap":
        assert stack.base.suite
        bases = root / "build" / "bases"
        rootfs = bootstrap.bootstrap(stack.base.suite, stack.base.packages, bases, report=report)
        inputs[f"urn:stackcheck:rootfs:{stack.base.suite}"] = rootfs.digest
    elif stack.base.digest:
        inputs[f"docker:{stack.base.reference}"] = stack.base.digest
    decided = [RECIPE, COMPRESSION, bootstrap.SOURCE_DATE_EPOCH, engine.description, sorted(inputs.items())]
    return Plan(
        stack=stack,
        folder=root / "build" / stack.id,
        source=source,
        rootfs=rootfs,
        inputs=inputs,
        key=hashlib.sha256(json.dumps(decided).encode()).hexdigest(),
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
