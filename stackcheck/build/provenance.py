"""How an image came to be. In: a stack and its built image. Out: a `Provenance`, the content of SLSA's statement."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stackcheck.build.plans import digest_of

if TYPE_CHECKING:
    from collections.abc import Mapping  # noqa: TC003  # pydantic reads annotations at run time
    from pathlib import Path

    from stackcheck.build.image import Image
    from stackcheck.matrix.stack import Stack


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """How an image came to be.

    Args:
        parameters: What was asked for: the cell of the matrix.
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


def of_build(stack: Stack, image: Image, *, root: Path) -> Provenance:
    """The provenance of an image that was built in the checkout `root`."""
    matrix = root / "matrix.yaml"
    dependencies = dict(image.inputs)
    if matrix.exists():
        dependencies["file:matrix.yaml"] = digest_of(matrix.read_bytes())
    finished = dt.datetime.fromisoformat(image.built) if image.built else None
    return Provenance(
        parameters={"stack": stack.id, "torch": stack.torch, "python": stack.python, "os": stack.os},
        dependencies=dependencies,
        started=finished - dt.timedelta(seconds=image.seconds) if finished else None,
        finished=finished,
    )
