"""The image under test. In: STACK|IMAGE as typed, or a built stack. Out: image, checks and machines."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from stackcheck import vendors
from stackcheck.build import provenance
from stackcheck.build.image import load_image
from stackcheck.errors import ConfigurationError, NothingSelectedError
from stackcheck.matrix import resolve
from stackcheck.matrix.stack import STACK_LABEL
from stackcheck.oci.tags import label

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from stackcheck.build.image import Image
    from stackcheck.build.provenance import Provenance
    from stackcheck.matrix.matrix import Matrix, TestTarget
    from stackcheck.matrix.stack import Stack
    from stackcheck.vendors import Vendor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """An image under test, and what it is held to.

    Attributes:
        name: Stack id, or a file-safe form of the reference; also the folder under `build/`.
        image: The image, with its layout.
        vendor: The vendor whose checks run.
        required: The checks that must pass.
        machines: Device model and count that the stack names; the run must be on one of them. None, for an
            image without a stack: any machine.
        provenance: How the image came to be.
        experimental: Whether the matrix marks the combination as experimental.
    """

    name: str
    image: Image
    vendor: Vendor
    required: tuple[str, ...]
    machines: tuple[TestTarget, ...] | None
    provenance: Provenance
    experimental: bool = False


def of_stack(stack: Stack, image: Image, *, vendor: Vendor | None = None) -> Subject:
    """A stack that was built here; `vendor` overrides the stack's own."""
    return Subject(
        name=stack.id,
        image=image,
        vendor=vendor or stack.vendor,
        required=stack.required_checks,
        machines=stack.tested_on,
        provenance=provenance.of_build(stack, image),
        experimental=stack.experimental,
    )


def foreign(
    image: Image, matrix: Matrix, stack: Stack | None, *, name: str, vendor: Vendor | None
) -> Subject:
    """An image by its reference; how it was built is not known.

    If its label names a stack, that stack's checks and machines apply. Any other image gets the checks that
    its vendor requires, on any machine.
    """
    chosen = vendor or (stack.vendor if stack else vendors.detect())
    return Subject(
        name=name,
        image=image,
        vendor=chosen,
        required=stack.required_checks if stack else matrix.required_of(chosen),
        machines=stack.tested_on if stack else None,
        provenance=provenance.Provenance(
            parameters={
                "origin": "not built in this checkout" if stack else "not built by this project",
                "reference": image.reference,
            }
        ),
        experimental=stack.experimental if stack else False,
    )


def declared(labels: Mapping[str, str], stacks: Iterable[Stack], reference: str) -> Stack | None:
    """The stack that an image's label names; None if it has no such label.

    Raises:
        ConfigurationError: The matrix has no such stack.
    """
    name = labels.get(STACK_LABEL)
    found = next((stack for stack in stacks if stack.id == name), None)
    if name and not found:
        raise ConfigurationError(
            "the image's stack is not in matrix.yaml",
            where=f"{reference}, label {STACK_LABEL}",
            got=name,
            expected="a stack id that `stackcheck list` shows",
            next_step="add the stack to matrix.yaml, or test an image without this label",
        )
    return found


def is_reference(name: str) -> bool:
    """Whether a name is an image reference: stack ids contain neither `/`, `:` nor `@`."""
    return re.search(r"[/:@]", name) is not None


def find_stack(name: str, root: Path) -> Stack | None:
    """The one stack that a name selects; None for an image reference.

    Raises:
        NothingSelectedError: The name matches no stack, or several.
    """
    if is_reference(name):
        return None
    found = resolve.load_stacks(root, (name,))
    if len(found) > 1:
        raise NothingSelectedError(
            f"{name} matches {len(found)} stacks; this command takes one",
            got=", ".join(stack.id for stack in found),
            next_step=f"repeat the command with one of them, for example {found[0].id}",
        )
    return found[0]


def find_image(name: str, root: Path) -> Image:
    """The image that `build` or `test` left under `build/`.

    Raises:
        NothingSelectedError: The name matches no stack, or several.
        ConfigurationError: The image was not built or tested in this checkout.
    """
    folder = root / "build" / label(name)
    if not (folder / "image.json").exists():  # an image outlives its stack, so the matrix is read second
        found = find_stack(name, root)
        if found is None:
            raise ConfigurationError(
                "this image has not been tested in this checkout",
                got=name,
                expected=str(folder / "image.json"),
                next_step=f"stackcheck test {name}",
            )
        folder = root / "build" / found.id
    return load_image(folder / "image.json")
