"""An image that is to be judged: by whose checks, how thoroughly, and where its files go.

In: a built stack, or any image of the engine, and the user's choices. Out: a `Candidate`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from stackcheck import build, vendors
from stackcheck.errors import ConfigurationError
from stackcheck.predicates import Provenance
from stackcheck.stack import STACK_LABEL

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from stackcheck.build import Image
    from stackcheck.matrix import Matrix, TestTarget
    from stackcheck.stack import Stack
    from stackcheck.suite import Tier
    from stackcheck.verdict import Waiver


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a user can choose.

    Attributes:
        root: The checkout.
        target: Where to publish (`oci:DIR` or `HOST/REPO`).
        key: Signing key, PEM; made on first use.
        tier: How thorough the suites are.
        vendor: The vendor whose checks run; None means the stack's own.
        waivers: Named exceptions; each is signed into the certificate.
        force: Run again even when nothing changed.
        build: How images are built.
    """

    root: Path
    target: str
    key: Path
    tier: Tier = "smoke"
    vendor: vendors.Vendor | None = None
    waivers: tuple[Waiver, ...] = ()
    force: bool = False
    build: build.Options = build.DEFAULTS

    def folder(self, name: str) -> Path:
        """Where the steps of one stack or image leave their files."""
        return self.root / "build" / name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """An image that is to be judged, and by what.

    Attributes:
        name: Stack id, or a file-safe form of the reference.
        image: The image, with its layout.
        vendor: Whose checks run.
        required: The checks that have to pass.
        machines: Where they have to: one of those that the stack names. None for an image without a stack.
        provenance: How it came to be.
        experimental: Whether the matrix itself calls the combination unproven.
    """

    name: str
    image: Image
    vendor: vendors.Vendor
    required: tuple[str, ...]
    machines: tuple[TestTarget, ...] | None
    provenance: Provenance
    experimental: bool = False


def of_stack(stack: Stack, image: Image, settings: Settings) -> Candidate:
    """A built stack as a candidate, with the provenance that its files give."""
    return Candidate(
        name=stack.id,
        image=image,
        vendor=settings.vendor or stack.vendor,
        required=stack.required_checks,
        machines=stack.tested_on,
        provenance=build.provenance(stack, image, root=settings.root),
        experimental=stack.experimental,
    )


def foreign(
    image: Image, name: str, matrix: Matrix, settings: Settings, stack: Stack | None = None
) -> Candidate:
    """An image by its reference, whose making is not known.

    What it says of itself binds it: one that names a stack is held to that stack's checks and machines. For
    any other the vendor's required checks hold, on any machine.
    """
    vendor = settings.vendor or (stack.vendor if stack else vendors.detect())
    return Candidate(
        name=name,
        image=image,
        vendor=vendor,
        required=stack.required_checks if stack else matrix.required[vendor],
        machines=stack.tested_on if stack else None,
        provenance=Provenance(
            parameters={
                "origin": "not built in this checkout" if stack else "not built by this project",
                "reference": image.reference,
            }
        ),
        experimental=stack.experimental if stack else False,
    )


def declared(labels: Mapping[str, str], stacks: Iterable[Stack], reference: str) -> Stack | None:
    """The stack that an image's label names; None where it names none.

    Raises:
        ConfigurationError: The matrix has no such stack.
    """
    name = labels.get(STACK_LABEL)
    found = next((stack for stack in stacks if stack.id == name), None)
    if name and not found:
        raise ConfigurationError(
            "the image is of a stack that the matrix lacks",
            where=reference,
            got=name,
            expected="a stack whose checks and machines are known",
            next_step="stackcheck list",
        )
    return found
