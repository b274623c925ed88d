"""Matrix -> cells: the axes of its blocks expanded.

In: a `Matrix`. Out: `Cell`s, one a combination of a block's axes, with the exclusions taken out; and the
settings of a cell, with the overrides put in. Whether a cell may exist is judged later (resolve.py). Pure.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from stackcheck.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stackcheck.matrix import Block, Matrix, Runtime, Settings

# A matrix of more cells than this is a mistake, and would run for minutes.
MAX_CELLS = 20_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination of a block's axes, not yet judged.

    Attributes:
        place: Where it stands in the file, for messages: `stacks[3]`.
        block: The entry it comes from; its settings hold.
    """

    place: str
    block: Block
    runtime: Runtime
    version: str | None
    torch: str | None
    python: str
    os: str
    wheels: str
    flash_attn: str | None

    @functools.cached_property
    def id(self) -> str:
        """The stack id: what differs, in a fixed order."""
        if self.block.id:
            return self.block.id
        return "-".join(
            part
            for part in (
                f"{self.runtime}{self.version or ''}",
                self.torch and f"torch{self.torch}",
                self.flash_attn and f"fa{self.flash_attn}",
                f"py{self.python}",
                self.os,
                "amd" if self.wheels == "amd" else None,
            )
            if part
        )


def expand(matrix: Matrix, name: str = "matrix.yaml") -> tuple[Cell, ...]:
    """Every cell: the products of `stacks` less `exclude`, then `include`, each id once.

    Raises:
        ConfigurationError: Two cells have one id, or there are more than `MAX_CELLS`.
    """
    kept = [cell for cell in _cells("stacks", matrix.stacks) if not _excluded(cell, matrix)]
    kept += _cells("include", matrix.include)
    places: dict[str, str] = {}
    problems = []
    for cell in kept:
        if cell.id in places:
            problems.append(f"{name}: {cell.place}: {cell.id} stands already at {places[cell.id]}")
        places[cell.id] = cell.place
    if problems:
        raise ConfigurationError("\n".join(problems))
    return tuple(kept)


def _cells(section: str, blocks: tuple[Block, ...]) -> Iterator[Cell]:
    count = 0
    for index, block in enumerate(blocks):
        axes = (
            block.version or (None,),
            block.torch or (None,),
            block.python,
            block.os,
            block.wheels or ("none",),
            block.flash_attn or (None,),
        )
        for version, torch, python, os, wheels, flash_attn in itertools.product(*axes):
            count += 1
            if count > MAX_CELLS:
                raise ConfigurationError(f"matrix.yaml: {section}: more than {MAX_CELLS} combinations")
            yield Cell(
                place=f"{section}[{index}]",
                block=block,
                runtime=block.runtime,
                version=version,
                torch=torch,
                python=python,
                os=os,
                wheels=wheels,
                flash_attn=flash_attn,
            )


def _excluded(cell: Cell, matrix: Matrix) -> bool:
    return any(
        all(getattr(cell, axis) == value for axis, value in exclude.when.items())
        for exclude in matrix.exclude
    )


def settings_of(cell: Cell, matrix: Matrix) -> Settings:
    """The block's settings with the overrides that select this cell; a later override wins."""
    changed = {
        key: value
        for override in matrix.overrides
        if fnmatchcase(cell.id, override.select)
        for key, value in override.set
        if value is not None
    }
    return cell.block.model_copy(update=changed) if changed else cell.block
