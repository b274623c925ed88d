"""images/<stack-id>/pins.json -> Pins: what `lock` found out about a stack, read strictly.

In: a checkout. Out: for each stack id what the rest of the tool needs of the file. Every value is held to a
narrow pattern, because it ends up in a Dockerfile.
"""

import json
from collections.abc import Mapping  # pydantic reads annotations at run time
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from stackcheck.errors import ConfigurationError
from stackcheck.files import yamlfile
from stackcheck.matrix.matrix import Digest, Reference, Token  # as above

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
# One line: it is written into a comment of the Dockerfile.
Reason = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f\u0085\u2028\u2029]+$", max_length=1000)]


class _Lenient(BaseModel):
    """A part of the file; other members are read by `lock` only."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class Source(_Lenient):
    """A package that is compiled: the archive it is compiled from."""

    sha256: Sha256 | None = None


class HostBase(_Lenient):
    """A base that was cut from the packages of a host: the digest of its tar."""

    from_: Literal["host"] = Field(alias="from")
    digest: Digest


class Pins(_Lenient):
    """The lock of one stack.

    Attributes:
        missing: What could not be found out, one reason each; empty when the stack is locked.
        bases: Image name and tag -> digest; None where the registry was out of reach.
        wheels_from: Where its wheels come from, if that is no index: one sentence for people.
    """

    schema_: Literal[1] = Field(alias="schema")
    missing: Annotated[tuple[Reason, ...], Field(strict=False)]
    bases: Mapping[Reference, Digest | None] = Field(default_factory=dict)
    sources: Mapping[Token, Source] = Field(default_factory=dict)  # package name -> its source archive
    rootfs: HostBase | None = None  # what replaces the base of the matrix, if a site has cut one from a host
    wheels_from: Reason | None = None


def read_pins(root: Path) -> dict[str, Pins]:
    """Stack id -> what `lock` wrote for it.

    Raises:
        ConfigurationError: A file is not readable, or holds what `lock` does not write.
    """
    return {path.parent.name: _pins(path) for path in sorted((root / "images").glob("*/pins.json"))}


def _pins(path: Path) -> Pins:
    try:
        return Pins.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        raise yamlfile.problems(error, f"images/{path.parent.name}/pins.json") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            "cannot read the pins of a stack",
            where=str(path),
            got=str(error),
            next_step=f"stackcheck lock {path.parent.name}",
        ) from error
