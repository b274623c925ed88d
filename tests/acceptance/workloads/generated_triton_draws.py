"""The grammar of drawn Triton programs. In: a source of numbers, the types that are there. Out: a program.

Each step adds a node whose numbers are in its type's range for every program of the grid, and whose error is
small beside them; a step that finds nothing to work on adds nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from workloads.generated_triton_values import (
    COMPARED,
    CURVES,
    EIGHTS,
    FLOATS,
    HALVES,
    INTEGERS,
    KINDS,
    At,
    Node,
    Output,
    Place,
    Program,
    Value,
    memories,
    work_out,
)

if TYPE_CHECKING:
    import random

MOST = 2**13  # elements of a value
BLIND = 2.0**-3  # of the largest number: an error that large shows nothing
WARPS, STAGES = (1, 2, 4, 4, 8), (1, 2, 3, 4)
LOOPS = ("range", "range", "tl.range", "tl.range", "static_range", "while")
BRANCHES = ("constexpr", "program", "count")
ARITHMETIC = (*HALVES, "float32", *INTEGERS)
Pick = Callable[[Value], bool]
Loop = tuple[Node, int, list[Node]]  # what it begins with, its name, its body


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


def _is_number(value: Value) -> bool:
    return value.kind in ARITHMETIC and bool(value.shape)


def leaf(draft: Draft) -> int | None:
    """A tile is loaded; of some it is cast at once, where each rounding is known to the bit."""
    sides = draft.source.choice((("R", "C"), ("R", "C"), ("C",), ("R",)))
    way = draft.source.random()
    if way < 0.15:
        first = draft.load(sides, draft.source.choice(EIGHTS))
        return draft.add(
            first, draft.node("cast", first.name, kind=draft.source.choice(("float16", "float32")))
        )
    if way < 0.4:
        first = draft.load(sides, "float32", "normal")
        short = draft.node("cast", first.name, kind=draft.source.choice((*HALVES, *EIGHTS)))
        return draft.add(first, short, draft.node("cast", short.name, kind="float32"))
    return draft.add(draft.load(sides, draft.kind()))


def index(draft: Draft) -> int | None:
    """The places of a side, as numbers."""
    if draft.source.random() < 0.3:
        return draft.add(draft.node("program", kind="int32"))
    return draft.add(draft.node("iota", kind="int32", how=(draft.source.choice("RC"),)))


def unary(draft: Draft) -> int | None:
    """A function of each number."""
    name = draft.pick(_is_number)
    if name is None:
        return None
    value = draft.values()[name]
    choices = ["neg", "abs"] if value.kind not in HALVES else ["neg"]
    if value.kind == "float32":
        choices += [*CURVES, *CURVES, *(("floor", "ceil") if draft.is_exact(name) else ())]
    op = draft.source.choice(choices)
    small = []
    if op in {"exp", "exp2", "sin", "cos", "log", "sqrt", "rsqrt"}:  # to where they are defined
        least, most = draft.constant("float32", 0.25, 0.5), draft.constant("float32", 2, 3)
        low = draft.node("maximum", name, least.name, kind="float32")
        small = [least, most, low, draft.node("minimum", low.name, most.name, kind="float32")]
    return draft.add(*small, draft.node(op, small[-1].name if small else name, kind=value.kind))


def _matches(value: Value) -> Pick:
    def matches(other: Value) -> bool:
        if other.kind != value.kind or len(other.shape) not in {0, len(value.shape)}:
            return False
        return all(
            one in {1, size} for one, size in zip(other.shape, value.shape[-len(other.shape) :], strict=False)
        )

    return matches


def binary(draft: Draft) -> int | None:
    """Two values, or one and a number."""
    name = draft.pick(_is_number)
    if name is None:
        return None
    kind = draft.values()[name].kind
    if draft.source.random() < 0.3:
        return _with_constant(draft, name, kind)
    other = draft.pick(_matches(draft.values()[name]))
    if other is None:
        return None
    choices = ["add", "sub", "mul", "maximum", "minimum"]
    choices += ["and", "or", "xor"] if kind in INTEGERS else []
    choices += ["div"] if kind == "float32" else []
    pair = (name, other) if draft.source.random() < 0.5 else (other, name)
    return draft.add(draft.node(draft.source.choice(choices), *pair, kind=kind))


def _with_constant(draft: Draft, name: int, kind: str) -> int | None:
    if kind in FLOATS:
        number = draft.constant(kind, 0.5, 2, 3, -1.5, 0.75)
        return draft.add(
            number, draft.node(draft.source.choice(("add", "mul", "sub")), name, number.name, kind=kind)
        )
    op = draft.source.choice(("add", "mul", "idiv", "mod", "shl", "shr", "and"))
    numbers = {"shl": (1, 3), "shr": (1, 2, 5), "idiv": (3, 7, 8), "mod": (5, 8, 16)}.get(op, (3, 7, 11, 31))
    number = draft.constant(kind, *numbers)
    return draft.add(number, draft.node(op, name, number.name, kind=kind))


def fused(draft: Draft) -> int | None:
    """x * y + z."""
    name = draft.pick(lambda one: one.kind == "float32" and bool(one.shape))
    if name is None:
        return None
    shape = draft.values()[name].shape
    others = [draft.pick(lambda one: one.kind == "float32" and one.shape == shape) for _ in range(2)]
    return draft.add(draft.node("fma", name, *(one or name for one in others), kind="float32"))


def where(draft: Draft) -> int | None:
    """One of two values, by two exact ones."""
    name = draft.pick(_is_number)
    if name is None:
        return None
    value = draft.values()[name]
    same = [
        one for one, each in draft.values().items() if each.shape == value.shape and each.kind in ARITHMETIC
    ]
    exact = [one for one in same if draft.is_exact(one)]
    if not exact:
        return None
    left = draft.source.choice(exact)
    right = draft.source.choice(
        [one for one in exact if draft.values()[one].kind == draft.values()[left].kind]
    )
    other = draft.source.choice([one for one in same if draft.values()[one].kind == value.kind])
    number = draft.constant(draft.values()[left].kind, 0, 1, 3)
    right, before = (right, []) if right != left else (number.name, [number])
    how = draft.source.choice(list(COMPARED))
    return draft.add(*before, draft.node("where", left, right, name, other, kind=value.kind, how=how))


def cast(draft: Draft) -> int | None:
    """Another type."""
    name = draft.pick(_is_number)
    if name is None:
        return None
    value = draft.values()[name]
    choices = [one for one in (*ARITHMETIC, "float32", *HALVES) if one != value.kind]
    kind = draft.source.choice(choices)
    if value.kind in FLOATS and kind in INTEGERS:
        return _to_integer(draft, name, kind)
    if value.kind in INTEGERS and kind in FLOATS:
        if value.kind == "int64" or (kind != "float32" and value.kind == "int32"):
            return None
    elif draft.source.random() < 0.25 and value.kind != "bfloat16" and kind in FLOATS:
        through = draft.node("cast", name, kind=draft.source.choice(EIGHTS))
        return draft.add(through, draft.node("cast", through.name, kind=value.kind))
    return draft.add(draft.node("cast", name, kind=kind))


def _to_integer(draft: Draft, name: int, kind: str) -> int | None:
    most = torch.iinfo(INTEGERS[kind]).max / 2
    inside = all(float(one[name].number.abs().max()) < most for one in draft.found.values())
    if not draft.is_exact(name) or not inside:
        return None
    return draft.add(draft.node("cast", name, kind=kind))


def reduce(draft: Draft) -> int | None:
    """A block without one of its sides, most often put back as a side of one."""
    name = draft.pick(lambda one: _is_number(one) and max(one.shape) > 1)
    if name is None:
        return None
    value = draft.values()[name]
    axis = draft.source.randrange(len(value.shape))
    choices = ["sum", "sum", "max", "min"]
    choices += ["argmax", "argmin"] if draft.is_exact(name) else []
    choices += ["xor_sum"] if value.kind in INTEGERS else []
    what = draft.source.choice(choices)
    kind = "int32" if what.startswith("arg") else value.kind
    node = draft.node("reduce", name, kind=kind, how=(what, axis))
    if len(value.shape) > 1 and draft.source.random() < 0.7:
        return draft.add(node, draft.node("expand", node.name, kind=kind, how=axis))
    return draft.add(node)


def scan(draft: Draft) -> int | None:
    """Sums, products and their like from the first element to each."""
    source = draft.source
    name = draft.pick(
        lambda one: _is_number(one) and max(one.shape) > 1 and one.kind not in {"int8", "int16"}
    )
    if name is None:
        return None
    value = draft.values()[name]
    axis = source.randrange(len(value.shape))
    is_small = math.prod(value.shape) <= draft.most_steps
    if value.kind == "int32" and is_small and source.random() < 0.3:
        other = draft.pick(lambda one: one.kind == "int32" and one.shape == value.shape)
        return draft.add(draft.node("affine", name, other or name, kind="int32", how=axis))
    choices = ["cumsum", "cumsum"] + (["cumprod"] if value.kind in INTEGERS else [])
    choices += ["last", "largest"] if value.kind == "int32" and is_small else []
    how = (source.choice(choices), axis, source.random() < 0.3)
    return draft.add(draft.node("scan", name, kind=value.kind, how=how))


def order(draft: Draft) -> int | None:
    """Sorted along the last side."""
    name = draft.pick(
        lambda one: _is_number(one) and one.shape[-1] > 1 and math.prod(one.shape) <= draft.most_steps
    )
    if name is None:
        return None
    kind = draft.values()[name].kind
    return draft.add(draft.node("sort", name, kind=kind, how=draft.source.random() < 0.5))


def places(draft: Draft) -> int | None:
    """Numbers at drawn places, or how many there are of each."""
    number = draft.pick(lambda one: one.kind == "int32" and bool(one.shape))
    if number is None:
        return None
    shape = draft.values()[number].shape
    axis = draft.source.randrange(len(shape))
    name = draft.pick(lambda one: _is_number(one) and one.shape == shape)
    if name is None or shape[axis] < 2:
        return None
    most = draft.node("full", kind="int32", how=((), shape[axis] - 1))
    inside = draft.node("and", number, most.name, kind="int32")
    if len(shape) == 1 and draft.source.random() < 0.5 and shape[0] <= 128:
        return draft.add(most, inside, draft.node("histogram", inside.name, kind="int32", how=shape[0]))
    kind = draft.values()[name].kind
    return draft.add(most, inside, draft.node("gather", name, inside.name, kind=kind, how=axis))


def shape(draft: Draft) -> int | None:
    """The same numbers in other places."""
    source = draft.source
    name = draft.pick(lambda one: _is_number(one) and math.prod(one.shape) > 1)
    if name is None:
        return None
    value = draft.values()[name]
    rank, last = len(value.shape), value.shape[-1]
    choices: list[tuple[str, Any]] = [("reshape", _other_shape(source, value.shape))]
    choices += [("permute", tuple(source.sample(range(rank), rank)))] if rank > 1 else []
    choices += [("expand", source.randrange(2))] if rank == 1 else []
    choices += [("split", source.randrange(2))] * 3 if last == 2 and rank > 1 else []
    choices += [("flip", source.randrange(rank))] if math.prod(value.shape) <= draft.most_steps else []
    choices += [("join", None), ("interleave", None)] if rank < 3 else []
    op, how = source.choice(choices)
    of: tuple[int, ...] = (name,)
    if op in {"join", "interleave"}:
        other = draft.pick(lambda one: one.shape == value.shape and one.kind == value.kind)
        of = (name, other or name)
    return draft.add(draft.node(op, *of, kind=value.kind, how=how))


def _other_shape(source: random.Random, shape: Sequence[int]) -> tuple[int, ...]:
    count = math.prod(shape)
    first = 2 ** source.randrange(int(math.log2(count)) + 1)
    second = 2 ** source.randrange(int(math.log2(count // first)) + 1)
    return source.choice(((count,), (first, count // first), (first, second, count // first // second)))


def spread(draft: Draft) -> int | None:
    """A value with sides of one as wide as another."""
    name = draft.pick(lambda one: _is_number(one) and 1 in one.shape)
    if name is None:
        return None
    value = draft.values()[name]
    other = draft.pick(
        lambda one: one.shape != value.shape and _matches(replace(one, kind=value.kind))(value)
    )
    return None if other is None else draft.add(draft.node("broadcast", name, other, kind=value.kind))


def _operand(kind: str) -> list[str]:
    return {"float32": ["ieee", "ieee", "tf32", "tf32x3"]}.get(kind, [""])


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
    node = draft.node("dot", *pair, kind="float32", how=source.choice(_operand(kind)))
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
    how = source.choice(_operand(kind))
    return start, loop, [*x, *y, draft.node("dot", x[-1].name, y[-1].name, loop, kind=out, how=how)]


def _twice(draft: Draft) -> Loop:
    """The result of a product is a factor of the next one, as in attention."""
    source = draft.source
    kind = source.choice((*HALVES, *HALVES, "float32"))
    start, loop = _start(draft, ("R", "C"), "float32")
    how = source.choice(_operand(kind))
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
    nodes = [x]
    if sides == ("R",):
        nodes.append(draft.node("reduce", x.name, kind=kind, how=(source.choice(("sum", "max")), 1)))
    else:
        nodes += [y := draft.load(("R", "K"), kind, "few"), draft.node("mul", x.name, y.name, kind=kind)]
    op = source.choice(("add", "add", "maximum"))
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
    name = draft.pick(_is_number)
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
