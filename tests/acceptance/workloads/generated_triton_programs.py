"""Drawn Triton programs: a tree of nodes, and the memory that they read. In: sizes. Out: tensors."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FLOATS = {
    "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32,
    "float8e5": torch.float8_e5m2, "float8e4nv": torch.float8_e4m3fn,
}  # fmt: skip
INTEGERS = {"int8": torch.int8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64}
KINDS = {**FLOATS, **INTEGERS}
EIGHTS = ("float8e5", "float8e4nv")
HALVES = ("float16", "bfloat16")
GUARD = 64


@dataclass(frozen=True)
class Place:
    """A tensor in memory: which sides of the grid it has, how it is laid out, read, and filled."""

    sides: tuple[str, ...]
    form: str = "pointer"
    layout: str = "rows"
    numbers: str = "whole"
    other: int = 0


@dataclass(frozen=True)
class Node:
    """An operation on values that have names; in a loop's body, the loop's own name is what it carries."""

    name: int
    op: str
    of: tuple[int, ...] = ()
    kind: str = ""
    how: Any = None
    body: tuple[Node, ...] = ()

    def all(self) -> tuple[Node, ...]:
        """This node and those of its body."""
        return (*itertools.chain(*(one.all() for one in self.body)), self)


@dataclass(frozen=True)
class Output:
    """A value that is stored: as a tile of a matrix, or flat in a place of its program's, or added up."""

    of: int
    form: str
    layout: str = "rows"
    cut: int = 0


@dataclass(frozen=True)
class Program:
    """A kernel, its grid and how it is launched. `missing` is what the last tiles lack of their sides."""

    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    tile: Mapping[str, int] = field(hash=False)
    grid: tuple[int, int]
    missing: Mapping[str, int] = field(hash=False)
    steps: int
    warps: int
    stages: int
    launches: int
    seed: int = 0
    flag: bool = False

    def extent(self, side: str) -> int:
        """How many elements a side of the whole tensor has."""
        many = {"R": self.grid[0], "C": self.grid[1], "K": self.steps}[side]
        return max(1, self.tile[side] * many - self.missing[side])

    def all(self) -> tuple[Node, ...]:
        """Every node, in the order of the text."""
        return tuple(itertools.chain(*(one.all() for one in self.nodes)))

    def places(self) -> list[tuple[int, int]]:
        """The programs of the grid."""
        return list(itertools.product(range(self.grid[0]), range(self.grid[1])))


def strides(sizes: Sequence[int], layout: str) -> tuple[int, ...]:
    """How far the neighbours of an element lie."""
    if len(sizes) == 1:
        return (2,) if layout == "columns" else (1,)
    wide = {"rows": sizes[1], "padded": sizes[1] + 3, "aligned": -(-sizes[1] // 16) * 16, "still": 0}
    return (1, sizes[0]) if layout == "columns" else (wide[layout], 1)


def span(sizes: Sequence[int], steps: Sequence[int]) -> int:
    """How many elements of memory that takes."""
    return 1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))


def poisoned(kind: str, count: int) -> torch.Tensor:
    """Memory that nobody should read, or write: NaN, or a number that is not drawn."""
    if kind in INTEGERS:
        return torch.full((count,), 85, dtype=INTEGERS[kind])
    return torch.full((count,), torch.nan).to(FLOATS[kind])


def memory(program: Program, node: Node) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    """A tensor that a program reads: the whole buffer, and its view's sizes and strides."""
    place: Place = node.how
    sizes = tuple(program.extent(side) for side in place.sides)
    steps = strides(sizes, place.layout)
    buffer = poisoned(node.kind, span(sizes, steps) + 2 * GUARD)
    source = torch.Generator().manual_seed(program.seed * 1009 + node.name)
    drawn = tuple(1 if step == 0 else size for size, step in zip(sizes, steps, strict=True))
    view = buffer.as_strided(drawn, steps, GUARD)
    if node.kind in INTEGERS:
        most = {"whole": 5, "few": 2, "wide": torch.iinfo(INTEGERS[node.kind]).max}[place.numbers]
        view.copy_(torch.randint(-most, most, drawn, generator=source, dtype=torch.int64))
    elif place.numbers == "normal":
        view.copy_(torch.randn(drawn, generator=source).to(FLOATS[node.kind]))
    else:
        most = 2 if place.numbers == "few" else 4
        view.copy_((torch.randint(-most, most + 1, drawn, generator=source) / 2).to(FLOATS[node.kind]))
    return buffer, sizes, steps


def memories(program: Program) -> dict[int, torch.Tensor]:
    """What the loads of a program see, in float64 or in their integers."""
    found = {}
    for node in program.all():
        if node.op == "load":
            buffer, sizes, steps = memory(program, node)
            wide = buffer.double() if node.kind in FLOATS else buffer
            found[node.name] = wide.as_strided(sizes, steps, GUARD)
    return found
