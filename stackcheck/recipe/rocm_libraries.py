"""images/rocm-libraries.yaml -> which shared libraries an image must get from elsewhere, read strictly.

In: the file, a stack. Out: a `Library` for each that its wheels expect, and what is missing: a package of the
distribution that is not in the base, or one of AMD's that the recipe does not take.
"""

from __future__ import annotations

from collections.abc import Mapping  # pydantic reads annotations at run time
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationError

from stackcheck.files import yamlfile
from stackcheck.files.border import Closed
from stackcheck.recipe import rocm
from stackcheck.versions import matches

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stackcheck.matrix.stack import Stack

Who = Literal["torch", "torch-amd", "amdsmi"]
# In every Debian and Ubuntu: dpkg and apt themselves need them.
ALWAYS = frozenset({"libstdc++6", "libgcc-s1", "zlib1g"})


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class Library(Closed):
    """A library that a wheel opens and does not contain, and where it comes from."""

    library: str
    needed_by: tuple[Who, ...] = Field(min_length=1)
    rocm: str
    origin: Mapping[Literal["debian", "amd", "wheel"], str] = Field(alias="from", min_length=1, max_length=1)
    source: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = Field(min_length=1)


class _Brought(Closed):
    rocm: str
    by: tuple[Who, ...]
    source: str
    libraries: tuple[tuple[str, ...], ...]


class Libraries(Closed):
    """The whole file."""

    schema_: Literal["1"] = Field(alias="schema")
    sources: Mapping[str, str]
    expected: tuple[Library, ...]
    brought: _Brought


def load(path: Path) -> Libraries:
    """Read the file.

    Raises:
        ConfigurationError: One line a problem, each with its place.
    """
    try:
        return Libraries.model_validate(yamlfile.load(path))
    except ValidationError as error:
        raise yamlfile.problems(error, path.name) from error


def expected(stack: Stack, found: Libraries) -> tuple[Library, ...]:
    """What the wheels of a stack expect; nothing without a torch for ROCm."""
    if stack.runtime != "rocm" or stack.torch is None or stack.runtime_version is None:
        return ()
    version = stack.runtime_version
    who = {"torch-amd" if stack.wheels == "amd" else "torch", "amdsmi"}
    return tuple(
        row for row in found.expected if who & {*row.needed_by} and matches("rocm", row.rocm, version)
    )


def lacking(stack: Stack, found: Libraries) -> Iterator[str]:
    """One line for each library that an image of the stack would not have."""
    from_amd = {
        *((rocm.SMI,) if rocm.takes_smi(stack) else ()),
        *(rocm.RUNTIME if rocm.takes_runtime(stack) else ()),
    }
    there = {"debian": ALWAYS | {*stack.base.packages}, "amd": from_amd}
    for row in expected(stack, found):
        ((kind, package),) = row.origin.items()
        if kind in there and package not in there[kind]:
            yield f"{row.library} is in {package}, which {stack.id} does not have"
