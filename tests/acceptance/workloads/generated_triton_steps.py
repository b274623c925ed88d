"""The steps that drawn Triton programs grow by. In: a draft. Out: the name of a new value.

A step that finds nothing to work on adds nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from workloads.generated_triton_draft import ARITHMETIC, Draft, is_number, matches
from workloads.generated_triton_programs import EIGHTS, FLOATS, HALVES, INTEGERS
from workloads.generated_triton_values import COMPARED, CURVES

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence


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
    name = draft.pick(is_number)
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


def binary(draft: Draft) -> int | None:
    """Two values, or one and a number."""
    name = draft.pick(is_number)
    if name is None:
        return None
    kind = draft.values()[name].kind
    if draft.source.random() < 0.3:
        return _with_constant(draft, name, kind)
    other = draft.pick(matches(draft.values()[name]))
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
    name = draft.pick(is_number)
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
    name = draft.pick(is_number)
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
    name = draft.pick(lambda one: is_number(one) and max(one.shape) > 1)
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
    name = draft.pick(lambda one: is_number(one) and max(one.shape) > 1 and one.kind not in {"int8", "int16"})
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
        lambda one: is_number(one) and one.shape[-1] > 1 and math.prod(one.shape) <= draft.most_steps
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
    name = draft.pick(lambda one: is_number(one) and one.shape == shape)
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
    name = draft.pick(lambda one: is_number(one) and math.prod(one.shape) > 1)
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
    name = draft.pick(lambda one: is_number(one) and 1 in one.shape)
    if name is None:
        return None
    value = draft.values()[name]
    other = draft.pick(lambda one: one.shape != value.shape and matches(replace(one, kind=value.kind))(value))
    return None if other is None else draft.add(draft.node("broadcast", name, other, kind=value.kind))
