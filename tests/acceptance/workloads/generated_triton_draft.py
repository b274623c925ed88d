"""A drawn Triton program as it grows. In: nodes. Out: those whose numbers show something, with values."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from workloads.generated_triton_programs import (
    EIGHTS,
    FLOATS,
    HALVES,
    INTEGERS,
    KINDS,
    Node,
    Place,
    Program,
    memories,
)
from workloads.generated_triton_values import At, Value, work_out

if TYPE_CHECKING:
    import random

MOST = 2**13  # elements of a value
BLIND = 2.0**-3  # of the largest number: an error that large shows nothing
ARITHMETIC = (*HALVES, "float32", *INTEGERS)
Pick = Callable[[Value], bool]


def is_sound(value: Value) -> bool:
    """Whether every number is in its type's range, and its error is small enough to show something."""
    if value.kind in INTEGERS:
        return True
    size, most = value.number.abs(), torch.finfo(FLOATS[value.kind]).max / 8
    if not bool((size + value.error <= most).all()):  # NaN is not
        return False
    return not value.error.numel() or float(value.error.max()) <= BLIND * max(float(size.max()), 2.0**-10)


class Draft:
    """A program as it grows, and its values for every program of the grid."""

    def __init__(self, source: random.Random, program: Program, has: frozenset[str]) -> None:
        """Begin without nodes."""
        # Triton's interpreter, which has no bfloat16, runs Python for each element of some operations.
        self.most_steps = 2**10 if "bfloat16" in has else 2**6
        self.source, self.program, self.has = source, program, has
        self.nodes: list[Node] = []
        self.found: dict[tuple[int, int], dict[int, Value]] = {pid: {} for pid in program.places()}
        self.count = itertools.count(1)
        self.kinds = source.sample(ARITHMETIC, 2)

    def values(self) -> dict[int, Value]:
        """The values of the first program, without those inside of bodies."""
        first = self.found[0, 0]
        return {node.name: first[node.name] for node in self.nodes}

    def kind(self) -> str:
        """A type of this program."""
        return self.source.choice(self.kinds)

    def node(self, op: str, *of: int, kind: str, how: Any = None) -> Node:
        """A node with a new name; of float16, where this device lacks its type."""
        return Node(next(self.count), op, of, kind if kind in self.has else "float16", how)

    def add(self, *nodes: Node) -> int | None:
        """Keep nodes if the numbers of all are sound everywhere; the name of the last one."""
        grown = replace(self.program, nodes=(*self.nodes, *nodes))
        seen = memories(replace(grown, nodes=nodes))
        tried = {}
        for pid, before in self.found.items():
            tried[pid] = dict(before)
            work_out(nodes, tried[pid], At(grown, pid, seen))
            new = [tried[pid][one.name] for node in nodes for one in node.all()]
            if not all(is_sound(one) and one.number.numel() <= MOST for one in new):
                return None
        self.nodes += nodes
        self.found = tried
        return nodes[-1].name

    def pick(self, fits: Pick) -> int | None:
        """A value that fits, rather a late one."""
        names = [name for name, value in self.values().items() if fits(value)]
        return names[-1 - min(int(self.source.expovariate(0.7)), len(names) - 1)] if names else None

    def is_exact(self, name: int) -> bool:
        """Whether a value is exact everywhere."""
        return all(values[name].is_exact for values in self.found.values())

    def load(self, sides: tuple[str, ...], kind: str, numbers: str = "") -> Node:
        """A tile of memory of its own."""
        source, width = self.source, self.program.tile[sides[-1]]
        form = source.choice(("pointer", "pointer", "pointer", "far", "block", "descriptor"))
        layout = source.choice(("rows", "rows", "columns", "padded", "aligned", "still"))
        if form == "descriptor" and (len(sides) < 2 or width * KINDS[kind].itemsize < 16):
            form = "block"
        form = form if form in {*self.has, "far"} else "pointer"
        layout = "aligned" if form == "descriptor" else layout
        layout = layout if len(sides) == 2 else {"still": "rows"}.get(layout, layout)
        usual = ("whole", "normal", "few") if kind in FLOATS else ("whole", "wide", "few")
        other = source.choice((0, 0, 1, 2)) if form in {"pointer", "far"} and kind not in EIGHTS else 0
        place = Place(sides, form, layout, numbers or source.choice(usual), other)
        return self.node("load", kind=kind, how=place)

    def constant(self, kind: str, *numbers: float) -> Node:
        """A number as a node."""
        number = self.source.choice(numbers)
        return self.node("full", kind=kind, how=((), int(number) if kind in INTEGERS else float(number)))


def is_number(value: Value) -> bool:
    return value.kind in ARITHMETIC and bool(value.shape)


def matches(value: Value) -> Pick:
    def matches(other: Value) -> bool:
        if other.kind != value.kind or len(other.shape) not in {0, len(value.shape)}:
            return False
        return all(
            one in {1, size} for one, size in zip(other.shape, value.shape[-len(other.shape) :], strict=False)
        )

    return matches
