"""Matrix -> cells: one for every combination of the axes.

In: a `Matrix`. Out: `Cell`s without the excluded ones; and the settings of a cell, with the overrides
applied. Whether a cell may exist is judged later (resolve.py). Pure.
"""

import dataclasses
import fnmatch
import functools
import itertools
import re
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,  # pydantic reads annotations at run time
    Sequence,
)
from typing import Any

from stackcheck.errors import ConfigurationError
from stackcheck.files import yamlfile
from stackcheck.matrix.matrix import Block, Exclude, Matrix, Runtime, StackSettings

# A matrix of more cells than this is a mistake, and would run for minutes.
MAX_CELLS = 20_000
# The id of a stack is the repository part of its image's name, its tag where it is published, and a folder.
MAX_ID = 128
_ID = re.compile(r"[a-z0-9]+([._-][a-z0-9]+)*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination of a block's axes, not yet judged."""

    place: str  # its place in the file, for messages: `stacks[3]`
    block: Block  # the entry it comes from; its settings hold
    runtime: Runtime
    version: str | None
    torch: str | None
    python: str
    os: str
    wheels: str
    flash_attn: str | None
    nccl: str | None = None  # chosen by the matrix; None where torch's own is installed. `triton`, too
    triton: str | None = None

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
                self.nccl and f"nccl{self.nccl}",
                self.triton and f"triton{self.triton}",
                f"py{self.python}",
                self.os,
                "amd" if self.wheels == "amd" else None,
            )
            if part
        )


def expand(matrix: Matrix, name: str = "matrix.yaml") -> tuple[Cell, ...]:
    """Every cell: the products of `stacks` less `exclude`, then `include`, each id once.

    Raises:
        ConfigurationError: Two cells have one id, or one that is not a valid image name; an exclusion or
            an override that matches no cell; more than `MAX_CELLS`.
    """
    product, included = [*_cells("stacks", matrix.stacks)], [*_cells("include", matrix.include)]
    kept = [*(cell for cell in product if exclusion(cell, matrix) is None), *included]
    problems = [*_bad_ids(kept), *_idle(matrix, product, included)]
    if problems:
        raise yamlfile.refused(f"{name}: {problem}" for problem in problems)
    return tuple(kept)


def candidates(matrix: Matrix) -> Iterator[Cell]:
    """The cells of `expand`, and those that `exclude` leaves out."""
    yield from _cells("stacks", matrix.stacks)
    yield from _cells("include", matrix.include)


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
            block.nccl or (None,),
            block.triton or (None,),
        )
        for version, torch, python, os, wheels, flash_attn, nccl, triton in itertools.product(*axes):
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
                nccl=nccl,
                triton=triton,
            )


def exclusion(cell: Cell, matrix: Matrix) -> Exclude | None:
    """The exclusion that leaves a cell out, if there is one."""
    if cell.place.startswith("include"):
        return None
    return next((exclude for exclude in matrix.exclude if _excluded(cell, exclude)), None)


def _excluded(cell: Cell, exclude: Exclude) -> bool:
    return all(getattr(cell, axis) == value for axis, value in exclude.when.items())


def _bad_ids(cells: Iterable[Cell]) -> Iterator[str]:
    places: dict[str, str] = {}
    for cell in cells:
        if cell.id in places:
            yield f"{cell.place}: {cell.id} is already at {places[cell.id]}"
        places[cell.id] = cell.place
        if len(cell.id) > MAX_ID or _ID.fullmatch(cell.id) is None:
            yield (
                f"{cell.place}: {cell.id[:160]} is not a valid image name: "
                f"at most {MAX_ID} lower-case letters and digits, with one of . _ - between them"
            )


def _idle(matrix: Matrix, product: Sequence[Cell], included: Sequence[Cell]) -> Iterator[str]:
    """An exclusion or an override that matches no cell is a mistake."""
    for index, exclude in enumerate(matrix.exclude):
        if not any(_excluded(cell, exclude) for cell in product):
            yield f"exclude[{index}]: no combination of `stacks` matches"
    for index, override in enumerate(matrix.overrides):
        if not any(fnmatch.fnmatchcase(cell.id, override.select) for cell in (*product, *included)):
            yield f"overrides[{index}].select: no stack's id matches {override.select}"


def settings(matrix: Matrix) -> Callable[[Cell], StackSettings]:
    """What gives a cell the settings of its block, with the overrides that select it; a later override wins.

    Variables and packages are added to those that are there; everything else is replaced. Cells of one block
    with the same overrides share their settings.
    """
    selectors = [re.compile(fnmatch.translate(override.select)).match for override in matrix.overrides]
    known: dict[tuple[object, ...], StackSettings] = {}

    def of(cell: Cell) -> StackSettings:
        key = (cell.place, *(selects(cell.id) is not None for selects in selectors))
        if key not in known:
            chosen = [override.set for override, hit in zip(matrix.overrides, key[1:], strict=True) if hit]
            known[key] = _overridden(cell.block, chosen)
        return known[key]

    return of


def settings_of(cell: Cell, matrix: Matrix) -> StackSettings:
    """The settings of one cell; `settings` is for many."""
    return settings(matrix)(cell)


def _overridden(block: Block, overrides: Iterable[StackSettings]) -> StackSettings:
    changed: dict[str, Any] = {}
    for override in overrides:
        for key in override.model_fields_set:
            value = getattr(override, key)
            before = changed.get(key, getattr(block, key))
            both = isinstance(before, Mapping) and isinstance(value, Mapping)
            changed[key] = {**before, **value} if both else value
    return block.model_copy(update=changed) if changed else block
