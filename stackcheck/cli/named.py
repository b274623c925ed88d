"""What STACK|IMAGE on the command line stands for: a stack of the matrix, or an image from anywhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from stackcheck import resolve
from stackcheck.errors import ConfigurationError, NothingSelectedError
from stackcheck.image import load_image
from stackcheck.tags import label

if TYPE_CHECKING:
    from stackcheck.image import Image
    from stackcheck.stack import Stack


def is_reference(name: str) -> bool:
    """Whether a name is an image and no stack: stack ids hold neither `/`, `:` nor `@`."""
    return re.search(r"[/:@]", name) is not None


def stack(name: str, root: Path) -> Stack | None:
    """The stack that a name selects; None for an image.

    Raises:
        NothingSelectedError: There is no such stack, or there are several.
    """
    if is_reference(name):
        return None
    found = resolve.load_stacks(root, (name,))
    if len(found) > 1:
        raise NothingSelectedError(
            f"{name} matches {len(found)} stacks, and this verb takes one",
            got=", ".join(stack.id for stack in found),
        )
    return found[0]


def image(name: str, root: Path) -> Image:
    """The image of it that `build` or `test` left here.

    Raises:
        NothingSelectedError: There is no such stack, or there are several.
        ConfigurationError: It has not been built here, or not been tested here.
    """
    folder = root / "build" / label(name)
    if not (folder / "image.json").exists():  # an image outlives its stack, so the matrix is asked second
        found = stack(name, root)
        if found is None:
            raise ConfigurationError(
                "the image has not been tested here", got=name, next_step=f"stackcheck test {name}"
            )
        folder = root / "build" / found.id
    return load_image(folder / "image.json")
