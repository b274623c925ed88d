"""What drawn Triton programs are worth: their trees, worked out in float64 and in integers.

In: a program. Out: each node's numbers for one program of the grid, and how far a right kernel may be off.

Nothing here asks Triton. An error is 0 where the arithmetic is exact: integers wrap, and sums and products of
few bits have no rounding in any order. Elsewhere it grows by each operation, so it is a bound.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

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

FUNCTION = 2.0**-20  # of exp, log, division and their like, relative: hardware's are good to 2^-22
SINE = 2.0**-18  # absolute
# What matrix units drop of each sum, relative to its largest term, and of each operand.
ADDED = {"ieee": 2.0**-24, "tf32": 2.0**-22, "tf32x3": 2.0**-20, "half": 2.0**-22, "eight": 2.0**-12}
OPERAND = {"tf32": 2.0**-9}


@dataclass(frozen=True)
class Value:
    """Numbers in float64 or in their own integers, and how far off each may be."""

    kind: str
    number: torch.Tensor
    error: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The block's sides."""
        return tuple(self.number.shape)

    @property
    def is_exact(self) -> bool:
        """Whether each right kernel has these bits."""
        return self.kind in INTEGERS or not bool(self.error.any())


@dataclass(frozen=True)
class At:
    """Where a node is worked out: a program of the grid, a step of its loop, and what memory has."""

    program: Program
    pid: tuple[int, int]
    memory: Mapping[int, torch.Tensor] = field(hash=False)
    step: int = 0

    def start(self, side: str) -> int:
        """Where this tile begins on a side."""
        at = {"R": self.pid[0], "C": self.pid[1], "K": self.step}[side]
        return self.program.tile[side] * at


def whole(kind: str, number: torch.Tensor) -> Value:
    """A value without an error."""
    dtype = torch.float64 if kind in FLOATS else KINDS[kind]
    return Value(kind, number.to(dtype), torch.zeros(number.shape, dtype=torch.float64))


def unit(kind: str) -> float:
    """The largest relative error of one rounding."""
    return float(torch.finfo(FLOATS[kind]).eps) / 2


def rounded(kind: str, number: torch.Tensor, error: torch.Tensor) -> Value:
    """A result of one rounding; where the type has the number itself, without an error."""
    if kind in INTEGERS:
        return whole(kind, number)
    has = (number.to(FLOATS[kind]).double() == number) & (error == 0)
    off = unit(kind) * (number.abs() + error) + torch.finfo(FLOATS[kind]).tiny
    return Value(kind, number, torch.where(has, 0.0, error + off))


def grain(number: torch.Tensor) -> float:
    """The largest power of two that divides all of these numbers."""
    parts, exponents = torch.frexp(number[number != 0].double())
    if not parts.numel():
        return 1.0
    bits = (parts * 2.0**53).long()
    lowest = torch.frexp((bits & -bits).double())[1] - 1
    return math.ldexp(1.0, int((lowest + exponents - 53).min()))


def fits(most: torch.Tensor, step: float, small: float) -> bool:
    """Whether sums of multiples of `step` have no rounding whose unit is `small`."""
    return not most.numel() or float(most.max()) / step <= 1 / small


def added(kind: str, given: Value, total: torch.Tensor, most: torch.Tensor, error: torch.Tensor) -> Value:
    """A sum in an unknown order; `most` is the sum of its terms' sizes."""
    if given.is_exact and fits(most, grain(given.number), unit(kind)):
        return whole(kind, total)
    count = max(1, given.number.numel() // max(1, total.numel()) if total.ndim < given.number.ndim else 0)
    count = max(count, max(given.shape, default=1))
    return rounded(kind, total, error + (count + 1) * unit(kind) * (most + error))


def _load(node: Node, at: At) -> Value:
    place: Place = node.how
    source = at.memory[node.name]
    sides = [at.program.tile[side] for side in place.sides]
    dtype = torch.float64 if node.kind in FLOATS else KINDS[node.kind]
    tile = torch.full(sides, place.other, dtype=dtype)
    starts = [at.start(side) for side in place.sides]
    inside = [max(0, min(n, size - s)) for n, s, size in zip(sides, starts, source.shape, strict=True)]
    cut = tuple(slice(s, s + n) for s, n in zip(starts, inside, strict=True))
    tile[tuple(slice(0, n) for n in inside)] = source[cut].to(dtype)
    return whole(node.kind, tile)


def _full(node: Node, at: At) -> Value:
    sides, number = node.how
    return whole(node.kind, torch.full([at.program.tile.get(one, one) for one in sides], float(number)))


def _iota(node: Node, at: At) -> Value:
    (side,) = node.how
    return whole(node.kind, torch.arange(at.program.tile[side]) + at.start(side))


def _program(node: Node, at: At) -> Value:
    return whole(node.kind, torch.tensor(at.pid[0] * 3 + at.pid[1] + 1))


def _add(node: Node, x: Value, y: Value) -> Value:
    return rounded(node.kind, x.number + y.number, x.error + y.error)


def _sub(node: Node, x: Value, y: Value) -> Value:
    return rounded(node.kind, x.number - y.number, x.error + y.error)


def _mul(node: Node, x: Value, y: Value) -> Value:
    error = x.number.abs() * y.error + y.number.abs() * x.error + x.error * y.error
    return rounded(node.kind, x.number * y.number, error)


def _fma(node: Node, x: Value, y: Value, z: Value) -> Value:
    return _add(node, _mul(node, x, y), z)


def _div(node: Node, x: Value, y: Value) -> Value:
    number = x.number / y.number
    smallest = y.number.abs() - y.error
    error = (x.error + number.abs() * y.error) / torch.where(smallest > 2.0**-6, smallest, 0.0)
    return Value(node.kind, number, error + FUNCTION * number.abs())


def _larger(node: Node, x: Value, y: Value) -> Value:
    return Value(node.kind, torch.maximum(x.number, y.number), torch.maximum(x.error, y.error))


def _smaller(node: Node, x: Value, y: Value) -> Value:
    return Value(node.kind, torch.minimum(x.number, y.number), torch.maximum(x.error, y.error))


COMPARED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "<": torch.lt, "<=": torch.le, ">": torch.gt, ">=": torch.ge, "==": torch.eq, "!=": torch.ne,
}  # fmt: skip


def _where(node: Node, x: Value, y: Value, yes: Value, no: Value) -> Value:
    chosen = COMPARED[node.how](x.number, y.number)
    return Value(
        node.kind, torch.where(chosen, yes.number, no.number), torch.where(chosen, yes.error, no.error)
    )


# What a function is, how much of its operand's error it hands on, and its own error.
Curve = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
CURVES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Curve]] = {
    "exp": (torch.exp, lambda x, e, v: v * (torch.expm1(e) + FUNCTION * (1 + x.abs() / 4))),
    "exp2": (torch.exp2, lambda x, e, v: v * (torch.expm1(e) + FUNCTION * (1 + x.abs() / 4))),
    "log": (torch.log, lambda x, e, v: e / _above(x - e, 2.0**-6) + FUNCTION * (1 + v.abs())),
    "sqrt": (torch.sqrt, lambda x, e, v: e / (2 * _above(x - e, 2.0**-6).sqrt()) + FUNCTION * v),
    "rsqrt": (torch.rsqrt, lambda x, e, v: v * e / (2 * _above(x - e, 2.0**-6)) + FUNCTION * v),
    "sin": (torch.sin, lambda x, e, _: e + SINE / _above(4 - x.abs(), 0.0).sign()),
    "cos": (torch.cos, lambda x, e, _: e + SINE / _above(4 - x.abs(), 0.0).sign()),
    "sigmoid": (torch.sigmoid, lambda x, e, _: e / 4 + FUNCTION * (1 + x.abs() / 4)),
    "erf": (torch.erf, lambda _, e, __: 1.13 * e + FUNCTION),
}


def _above(x: torch.Tensor, least: float) -> torch.Tensor:
    """Numbers above a bound; 0 below it, so that an error divided by it is infinite and nothing is drawn."""
    return torch.where(x > least, x, 0.0)


def _curve(node: Node, x: Value) -> Value:
    function, error = CURVES[node.op]
    number = function(x.number)
    return Value(node.kind, number, error(x.number, x.error, number).nan_to_num(torch.inf))


def _cast(node: Node, x: Value) -> Value:
    if x.kind in FLOATS and node.kind in INTEGERS:
        return whole(node.kind, x.number.trunc())
    if node.kind in INTEGERS:
        return whole(node.kind, x.number)
    number = x.number.double()
    if x.is_exact:
        near = number.to(FLOATS[node.kind]).double()
        if node.kind in EIGHTS:  # before sm_90, float32 becomes float16 first
            return Value(node.kind, near, (number.half().to(FLOATS[node.kind]).double() - near).abs())
        return whole(node.kind, near)
    return rounded(node.kind, number, x.error)


def _by_bits(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., Value]:
    return lambda node, x, y: whole(node.kind, function(x.number, y.number))


def _negated(node: Node, x: Value) -> Value:
    return Value(node.kind, -x.number, x.error)


def _sized(node: Node, x: Value) -> Value:
    return Value(node.kind, x.number.abs(), x.error)


def _stepped(node: Node, x: Value) -> Value:
    return whole(node.kind, x.number.floor() if node.op == "floor" else x.number.ceil())


def _reduced(node: Node, x: Value) -> Value:
    what, axis = node.how
    number = x.number
    if what == "sum":
        total = number.sum(axis) if node.kind in FLOATS else number.sum(axis, dtype=number.dtype)
        sizes = number.double().abs().sum(axis)
        return (
            added(node.kind, x, total, sizes, x.error.sum(axis))
            if node.kind in FLOATS
            else whole(node.kind, total)
        )
    if what in {"argmax", "argmin"}:
        return whole(node.kind, number.argmax(axis) if what == "argmax" else number.argmin(axis))
    if what == "xor_sum":
        return whole(node.kind, functools.reduce(torch.bitwise_xor, number.unbind(axis)))
    return Value(node.kind, number.amax(axis) if what == "max" else number.amin(axis), x.error.amax(axis))


def _scanned(node: Node, x: Value) -> Value:
    what, axis, backwards = node.how
    number = x.number.flip(axis) if backwards else x.number
    if what == "cumsum" and node.kind in FLOATS:
        error = x.error.flip(axis) if backwards else x.error
        found = added(node.kind, x, number.cumsum(axis), number.abs().cumsum(axis), error.cumsum(axis))
    elif what == "cumsum":
        found = whole(node.kind, number.cumsum(axis, dtype=number.dtype))
    elif what == "cumprod":
        found = whole(node.kind, number.cumprod(axis, dtype=number.dtype))
    else:
        combine = {"last": _last, "largest": torch.maximum}[what]
        found = whole(node.kind, torch.stack(list(itertools.accumulate(number.unbind(axis), combine)), axis))
    back = (axis,) if backwards else ()
    return Value(node.kind, found.number.flip(back), found.error.flip(back))


def _last(before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    return torch.where(now != 0, now, before)


def _affine(node: Node, x: Value, y: Value) -> Value:
    """The second of a pair: what comes of `x * before + y` from the first element on."""
    carried, out = torch.zeros_like(y.number.select(node.how, 0)), []
    for a, b in zip(x.number.unbind(node.how), y.number.unbind(node.how), strict=True):
        carried = a * carried + b
        out.append(carried)
    return whole(node.kind, torch.stack(out, node.how))


def _sorted(node: Node, x: Value) -> Value:
    number = x.number.sort(-1, descending=node.how).values
    return Value(node.kind, number, x.error.amax(-1, keepdim=True).expand(number.shape))


def _counted(node: Node, x: Value) -> Value:
    return whole(node.kind, torch.bincount(x.number.long().clamp(0, node.how - 1), minlength=node.how))


def _gathered(node: Node, x: Value, places: Value) -> Value:
    index = places.number.long().clamp(0, x.shape[node.how] - 1)
    return Value(node.kind, x.number.gather(node.how, index), x.error.gather(node.how, index))


def _moved(function: Callable[..., torch.Tensor]) -> Callable[..., Value]:
    """What only moves numbers moves their errors too."""

    def moved(node: Node, *given: Value) -> Value:
        number = function(node, *(one.number for one in given))
        return Value(node.kind, number, function(node, *(one.error for one in given)))

    return moved


def arithmetic(node: Node, kind: str) -> str:
    """What a product's unit adds up with."""
    return "eight" if kind in EIGHTS else "half" if kind in HALVES else node.how or "ieee"


def _dot(node: Node, x: Value, y: Value, *before: Value) -> Value:
    if node.kind in INTEGERS:
        total = (x.number.double() @ y.number.double()).to(KINDS[node.kind])
        return whole(node.kind, total + before[0].number if before else total)
    total, most = x.number @ y.number, x.number.abs() @ y.number.abs()
    error = x.number.abs() @ y.error + x.error @ (y.number.abs() + y.error)
    step = grain(x.number) * grain(y.number)
    for one in before:
        total, most, error = total + one.number, most + one.number.abs(), error + one.error
        step = min(step, grain(one.number))
    how = arithmetic(node, x.kind)
    short = all(fits(one.number.abs(), grain(one.number), 2.0**-8) for one in (x, y))
    if not bool(error.any()) and fits(most, step, ADDED[how]) and (short or how not in OPERAND):
        return whole(node.kind, total)
    dropped = (x.shape[1] + 2) * ADDED[how] + OPERAND.get(how, 0.0)
    return rounded(node.kind, total, error + dropped * (most + error))


LEAVES: dict[str, Callable[[Node, At], Value]] = {
    "load": _load, "full": _full, "iota": _iota, "program": _program,
}  # fmt: skip
VALUES: dict[str, Callable[..., Value]] = {
    "add": _add, "sub": _sub, "mul": _mul, "fma": _fma, "div": _div,
    "maximum": _larger, "minimum": _smaller, "where": _where,
    **dict.fromkeys(CURVES, _curve),
    "neg": _negated, "abs": _sized, "floor": _stepped, "ceil": _stepped, "cast": _cast,
    "and": _by_bits(torch.bitwise_and), "or": _by_bits(torch.bitwise_or), "xor": _by_bits(torch.bitwise_xor),
    "shl": _by_bits(torch.bitwise_left_shift), "shr": _by_bits(torch.bitwise_right_shift),
    "idiv": _by_bits(lambda x, y: torch.div(x, y, rounding_mode="trunc")), "mod": _by_bits(torch.fmod),
    "reduce": _reduced, "scan": _scanned, "affine": _affine, "sort": _sorted,
    "histogram": _counted, "gather": _gathered, "dot": _dot,
    "expand": _moved(lambda node, x: x.unsqueeze(node.how)),
    "permute": _moved(lambda node, x: x.permute(node.how)),
    "reshape": _moved(lambda node, x: x.reshape(node.how)),
    "flip": _moved(lambda node, x: x.flip(node.how)),
    "broadcast": _moved(lambda _, x, y: x.expand(torch.broadcast_shapes(x.shape, y.shape))),
    "join": _moved(lambda _, x, y: torch.stack((x, y), -1)),
    "interleave": _moved(lambda _, x, y: torch.stack((x, y), -1).flatten(-2)),
    "split": _moved(lambda node, x: x[..., node.how]),
}  # fmt: skip


def taken(node: Node, program: Program, pid: tuple[int, int]) -> int:
    """How many times a body runs."""
    if node.op == "loop":
        return program.steps
    return int({"constexpr": program.flag, "program": pid[0] % 2 == 0, "count": program.steps > 1}[node.how])


def work_out(nodes: Sequence[Node], found: dict[int, Value], at: At) -> None:
    """Each node's value by its name. A body is worked out once more than it runs, for its shapes."""
    for node in nodes:
        if node.op in LEAVES:
            found[node.name] = LEAVES[node.op](node, at)
        elif node.body:
            carried = found[node.of[0]]
            for step in range(max(1, taken(node, at.program, at.pid))):
                found[node.name] = carried
                work_out(node.body, found, At(at.program, at.pid, at.memory, step))
                carried = found[node.body[-1].name]
            found[node.name] = carried if taken(node, at.program, at.pid) else found[node.of[0]]
        else:
            found[node.name] = VALUES[node.op](node, *(found[one] for one in node.of))


def everywhere(program: Program) -> dict[tuple[int, int], dict[int, Value]]:
    """Every value of every program of the grid."""
    seen, found = memories(program), {}
    for pid in program.places():
        found[pid] = dict[int, Value]()
        work_out(program.nodes, found[pid], At(program, pid, seen))
    return found
