"""The grammar of drawn Triton programs. In: a source of numbers, the types that are there. Out: a program.

Each step adds a node whose numbers are in its type's range for every program of the grid, and whose error is
small beside them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from workloads.generated_triton_draft import Draft, is_number
from workloads.generated_triton_programs import EIGHTS, FLOATS, HALVES, INTEGERS, KINDS, Node, Output, Program
from workloads.generated_triton_steps import (
    binary,
    cast,
    fused,
    index,
    leaf,
    order,
    places,
    reduce,
    scan,
    shape,
    spread,
    unary,
    where,
)

if TYPE_CHECKING:
    import random

WARPS, STAGES = (1, 2, 4, 4, 8), (1, 2, 3, 4)
LOOPS = ("range", "range", "tl.range", "tl.range", "static_range", "while")
BRANCHES = ("constexpr", "program", "count")
FOLDED = {"add": "sum", "maximum": "max"}  # what a loop does with each step -> the reduction that is the same
Loop = tuple[Node, int, list[Node]]  # what it begins with, its name, its body


def _operand(draft: Draft, kind: str) -> list[str]:
    """How a product of float32 may be worked out here."""
    ways = ["ieee", "ieee", *(one for one in ("tf32", "tf32x3") if one in draft.has)]
    return ways if kind == "float32" else [""]


def product(draft: Draft) -> int | None:
    """A product of a value with itself turned, with another, or with a new one."""
    source = draft.source
    name = draft.pick(
        lambda one: one.kind in (*HALVES, "float32") and len(one.shape) == 2 and min(one.shape) >= 16
    )
    if name is None:
        return None
    value = draft.values()[name]
    kind = source.choice((*HALVES, "float32", value.kind))
    small = draft.node("cast", name, kind=kind)
    before = [] if kind == value.kind else [small]
    left = before[-1].name if before else name
    turned = draft.node("permute", left, kind=kind, how=(1, 0))
    tile = draft.program.tile
    if source.random() < 0.5 and value.shape == (tile["R"], tile["C"]):
        right = draft.load(("C", "K"), kind, source.choice(("whole", "few", "normal")))
    else:
        right = turned
    pair = (left, right.name) if right is not turned or source.random() < 0.5 else (right.name, left)
    node = draft.node("dot", *pair, kind="float32", how=source.choice(_operand(draft, kind)))
    return draft.add(*before, right, node)


def summed(draft: Draft) -> int | None:
    """A loop over the inner side: products, sums, extremes, or a recurrence whose order counts."""
    how = draft.source.choice(LOOPS)
    what = draft.source.choice((_products, _products, _twice, _sums, _recurrence))
    start, name, nodes = what(draft)
    return draft.add(start, Node(name, "loop", (start.name,), start.kind, how, tuple(nodes)))


def _products(draft: Draft) -> Loop:
    source = draft.source
    kind = source.choice((*HALVES, *HALVES, "float32", "int8", *EIGHTS))
    out = "int32" if kind == "int8" else "float32"
    start, loop = _start(draft, ("R", "C"), out)
    numbers = source.choice(("whole", "few", *(("normal",) if kind in FLOATS else ())))
    x = [draft.load(("R", "K"), kind, numbers)]
    if kind in HALVES and source.random() < 0.3:  # of eight bits in memory
        x = [draft.load(("R", "K"), "int8", "few")]
        x.append(draft.node("cast", x[0].name, kind=kind))
    if kind in (*HALVES, "float32") and source.random() < 0.3:
        x += [
            number := draft.constant(kind, 0.5, 2, -1),
            draft.node("mul", x[-1].name, number.name, kind=kind),
        ]
    turned = source.random() < 0.4
    y = [draft.load(("C", "K") if turned else ("K", "C"), kind, numbers)]
    y += [draft.node("permute", y[0].name, kind=kind, how=(1, 0))] if turned else []
    how = source.choice(_operand(draft, kind))
    return start, loop, [*x, *y, draft.node("dot", x[-1].name, y[-1].name, loop, kind=out, how=how)]


def _twice(draft: Draft) -> Loop:
    """The result of a product is a factor of the next one, as in attention."""
    source = draft.source
    kind = source.choice((*HALVES, *HALVES, "float32"))
    start, loop = _start(draft, ("R", "C"), "float32")
    how = source.choice(_operand(draft, kind))
    numbers = source.choice(("few", "normal"))
    x, y = draft.load(("R", "C"), kind, numbers), draft.load(("K", "C"), kind, numbers)
    turned = draft.node("permute", y.name, kind=kind, how=(1, 0))
    first = draft.node("dot", x.name, turned.name, kind="float32", how=how)
    nodes = [x, y, turned, first]
    if kind != "float32":
        nodes.append(draft.node("cast", first.name, kind=kind))
    z = draft.load(("K", "C"), kind, numbers)
    return start, loop, [*nodes, z, draft.node("dot", nodes[-1].name, z.name, loop, kind="float32", how=how)]


def _sums(draft: Draft) -> Loop:
    source, kind = draft.source, draft.source.choice(("float32", "int32", "int64", "float16"))
    sides = source.choice((("R", "K"), ("R",)))
    start, loop = _start(draft, sides, kind)
    x = draft.load(("R", "K"), kind, source.choice(("whole", "few")))
    op, reduced = source.choice(("add", "add", "maximum")), source.choice(("sum", "max"))
    nodes = [x]
    # Triton up to 3.9 begins with what is neutral to the reduction and not to the sum: triton#11305.
    if sides != ("R",) or FOLDED[op] != reduced:
        nodes += [y := draft.load(("R", "K"), kind, "few"), draft.node("mul", x.name, y.name, kind=kind)]
    if sides == ("R",):
        nodes.append(draft.node("reduce", nodes[-1].name, kind=kind, how=(reduced, 1)))
    return start, loop, [*nodes, draft.node(op, loop, nodes[-1].name, kind=kind)]


def _recurrence(draft: Draft) -> Loop:
    kind = draft.source.choice(("int32", "int64"))
    sides = draft.source.choice((("R", "K"), ("R", "C")))
    start, loop = _start(draft, sides, kind)
    x, three = draft.load(sides, kind, "whole"), draft.constant(kind, 3, 5)
    scaled = draft.node("mul", loop, three.name, kind=kind)
    return start, loop, [three, x, scaled, draft.node("add", scaled.name, x.name, kind=kind)]


def _start(draft: Draft, sides: tuple[str, ...], kind: str) -> tuple[Node, int]:
    """What a loop begins with, and the loop's name."""
    number = draft.source.choice((0, 0, 0, 1))
    start = draft.node("full", kind=kind, how=(sides, number if kind in INTEGERS else float(number)))
    return start, next(draft.count)


def branch(draft: Draft) -> int | None:
    """Something that is done in some programs of the grid, launches or builds only."""
    name = draft.pick(is_number)
    if name is None:
        return None
    value, how = draft.values()[name], draft.source.choice(BRANCHES)
    own = next(draft.count)
    number = draft.constant(value.kind, 2, 3)
    nodes = [number, draft.node(draft.source.choice(("add", "mul")), own, number.name, kind=value.kind)]
    other = draft.pick(lambda one: one.kind == value.kind and one.shape == value.shape)
    if other is not None and draft.source.random() < 0.5:
        nodes.append(draft.node("sub", nodes[-1].name, other, kind=value.kind))
    return draft.add(Node(own, "branch", (name,), value.kind, how, tuple(nodes)))


STEPS = (
    *(leaf, unary, cast, reduce, shape) * 2,
    *(binary,) * 4,
    *(index, fused, where, scan, order, places, spread, product, summed, branch),
)
FOCI = (
    STEPS,
    (summed, *STEPS),
    (summed, summed, product, *STEPS),
    (reduce, scan, order, places, leaf, shape, cast, binary),
)


def draw(source: random.Random, seed: int, has: frozenset[str]) -> Program:
    """A program of the types and forms that are there: a few leaves, then steps, then what is stored."""
    while True:
        draft = Draft(source, _launch(source, seed), has)
        steps = source.choice(FOCI)
        first = summed if summed in steps[:1] else leaf
        for step in (first, leaf, *(source.choice(steps) for _ in range(source.randint(3, 14)))):
            step(draft)
        if draft.nodes:
            return trimmed(replace(draft.program, nodes=tuple(draft.nodes), outputs=_outputs(draft)))


def _launch(source: random.Random, seed: int) -> Program:
    tile = {
        "R": source.choice((16, 32, 64, 128)),
        "C": source.choice((16, 32, 64)),
        "K": source.choice((32, 64)),
    }
    grid = (source.randint(1, 3), source.randint(1, 3))
    missing = {side: source.choice((0, 0, 1, 5, size // 2 + 1)) for side, size in tile.items()}
    steps, launches = source.choice((1, 2, 3, 4, 5)), source.choice((1, 1, 2, 3))
    flag = source.random() < 0.5
    how = (steps, source.choice(WARPS), source.choice(STAGES), launches)
    return Program((), (), tile, grid, missing, *how, seed=seed, flag=flag)


def _outputs(draft: Draft) -> tuple[Output, ...]:
    """Values that nothing uses, and one that something does."""
    used = {name for node in draft.nodes for one in node.all() for name in one.of if name != node.name}
    ends = [node.name for node in draft.nodes if node.name not in used]
    chosen = {ends[-1], *draft.source.sample(ends, min(3, len(ends))), draft.source.choice(draft.nodes).name}
    return tuple(_output(draft, name) for name in sorted(chosen))


def _output(draft: Draft, name: int) -> Output:
    source, value, tile = draft.source, draft.values()[name], draft.program.tile
    adds = _adding(value.kind)
    if adds and value.shape and draft.is_exact(name) and source.random() < 0.3:
        return Output(name, source.choice(adds), cut=source.choice((0, 1)))
    if value.shape == (tile["R"], tile["C"]) and source.random() < 0.8:
        form = source.choice(("pointer", "pointer", "block", "descriptor"))
        form = "pointer" if form == "descriptor" and tile["C"] * KINDS[value.kind].itemsize < 16 else form
        form = form if form in draft.has else "pointer"
        layout = "aligned" if form == "descriptor" else source.choice(("rows", "columns", "padded"))
        return Output(name, form, layout)
    return Output(name, "slots", cut=source.choice((0, 1, 3)) if math.prod(value.shape) > 4 else 0)


def _adding(kind: str) -> tuple[str, ...]:
    """What memory adds up: floats only if all sums are exact, in any order."""
    return {
        "int32": ("add", "max", "min", "and", "or", "xor", "lock"),
        "int64": ("add", "max", "lock"),
        "float32": ("add", "add", "lock"),
    }.get(kind, ())


def trimmed(program: Program) -> Program:
    """The program without nodes that nothing uses."""
    used = {output.of for output in program.outputs}
    kept: list[Node] = []
    for node in reversed(program.nodes):
        if node.name in used:
            kept.insert(0, node)
            used |= {name for one in node.all() for name in one.of}
    return replace(program, nodes=tuple(kept))
