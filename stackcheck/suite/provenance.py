"""How an image was built, for its SLSA statement.

In: a stack and its built image. Out: a `Provenance`.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping  # pydantic reads annotations at run time

    from stackcheck.imaging.image import Image
    from stackcheck.matrix.stack import Stack


# Parameters that say what a site put in place of a registry (base) and of the indexes (wheels).
SITE_SOURCES = ("baseFrom", "wheelsFrom")


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """How an image was built.

    Args:
        parameters: The cell of the matrix that was built.
        dependencies: URI -> digest (`sha256:…`) of each input: Dockerfile, lock, base image, matrix.
        builder: URI of the builder; the default means "a stackcheck on some machine".
        started: When the build began; None when it is not known.
        finished: When it ended.
    """

    parameters: Mapping[str, Any] = field(default_factory=dict)
    dependencies: Mapping[str, str] = field(default_factory=dict)
    builder: str = "urn:stackcheck:builder:v1"
    started: dt.datetime | None = None
    finished: dt.datetime | None = None


def of_build(stack: Stack, image: Image) -> Provenance:
    """The provenance of an image that was built from a stack.

    It names the matrix that the stack was resolved from. A build refuses a Dockerfile that does not follow
    from that matrix, so the two belong together, even if somebody edits matrix.yaml during the build.
    """
    dependencies = dict(image.inputs)
    if stack.matrix_digest:
        dependencies["file:matrix.yaml"] = stack.matrix_digest
    finished = dt.datetime.fromisoformat(image.built) if image.built else None
    named = {"stack": stack.id, "torch": stack.torch, "python": stack.python, "os": stack.os}
    if image.base_from:
        named["basePackagesFrom"] = image.base_from
    handed_over = {use.name: use.key for use in image.stages if use.how == "handed over"}
    return Provenance(
        parameters={
            **named,
            **site_sources(stack),
            **({"stagesFromWheelCache": handed_over} if handed_over else {}),
        },
        dependencies=dependencies,
        started=finished - dt.timedelta(seconds=image.seconds) if finished else None,
        finished=finished,
    )


def site_sources(stack: Stack) -> Mapping[str, str]:
    """What a site put in place of a registry and the indexes; empty for a stack that came from those."""
    found = {}
    if stack.base.kind == "host":
        found["baseFrom"] = f"the packages of a host ({stack.os}), each file with the MD5 sum that dpkg keeps"
    if stack.wheels_from:
        found["wheelsFrom"] = stack.wheels_from
    return found
