"""The text of a drawn Triton program, and the arguments of its launch. In: a program. Out: both."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from workloads.generated_triton_programs import FLOATS, Node, Output, Place, Program, strides

if TYPE_CHECKING:
    from workloads.generated_triton_values import Value

FAR = 3 * 2**31 + 16  # elements that a pointer is moved by, and its offsets back
HEAD = """import triton
import triton.language as tl


@triton.jit
def last(before, now):
    return tl.where(now != 0, now, before)


@triton.jit
def largest(before, now):
    return tl.maximum(before, now)


@triton.jit
def affine(a, b, c, d):
    return a * c, b * c + d


@triton.jit
def kernel(
"""
INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^", "shl": "<<",
    "shr": ">>", "idiv": "//", "mod": "%",
}  # fmt: skip
SIDES = {"R": "rows", "C": "columns", "K": "depth"}
Names = list[str]


def flat(sides: tuple[int, ...]) -> str:
    """The place of each element of a block in a row of all."""
    parts = []
    for axis, side in enumerate(sides):
        index = ", ".join(":" if one == axis else "None" for one in range(len(sides)))
        parts.append(f"tl.arange(0, {side})[{index}] * {math.prod(sides[axis + 1 :])}")
    return " + ".join(parts)


def expression(node: Node, given: Names, shape: tuple[int, ...]) -> str:
    """A node as an expression of its operands."""
    kind = f"tl.{node.kind}"
    if node.op in INFIX:
        return f"({given[0]} {INFIX[node.op]} {given[1]}).to({kind})"
    return EXPRESSIONS.get(node.op, _called)(node, given, shape)


def _called(node: Node, given: Names, _: tuple[int, ...]) -> str:
    return f"tl.{node.op}({', '.join(given)})"


def _reduced(node: Node, given: Names, _: tuple[int, ...]) -> str:
    return f"tl.{node.how[0]}({given[0]}, axis={node.how[1]}).to(tl.{node.kind})"


def _scanned(node: Node, given: Names, _: tuple[int, ...]) -> str:
    what, axis, backwards = node.how
    if what in {"cumsum", "cumprod"}:
        return f"tl.{what}({given[0]}, axis={axis}, reverse={backwards}).to(tl.{node.kind})"
    return f"tl.associative_scan({given[0]}, {axis}, {what}, reverse={backwards})"


def _dot(node: Node, given: Names, _: tuple[int, ...]) -> str:
    how = f', input_precision="{node.how}"' if node.how else ""
    out = f", out_dtype=tl.{node.kind}"
    return f"tl.dot({', '.join(given)}{how}{out})"


Expression = Callable[[Node, Names, tuple[int, ...]], str]
EXPRESSIONS: dict[str, Expression] = {
    "full": lambda node, _, shape: (
        f"tl.full({list(shape)}, {node.how[1]}, tl.{node.kind})"
        if shape
        else f"tl.cast({node.how[1]}, tl.{node.kind})"
    ),
    "neg": lambda _, given, __: f"-{given[0]}",
    "cast": lambda node, given, _: f"{given[0]}.to(tl.{node.kind})",
    "where": lambda node, given, _: f"tl.where({given[0]} {node.how} {given[1]}, {given[2]}, {given[3]})",
    "reduce": _reduced,
    "scan": _scanned,
    "sort": lambda node, given, _: f"tl.sort({given[0]}, descending={node.how})",
    "histogram": lambda node, given, _: f"tl.histogram({given[0]}, {node.how})",
    "gather": lambda node, given, _: f"tl.gather({given[0]}, {given[1]}, {node.how})",
    "dot": _dot,
    "expand": lambda node, given, _: f"tl.expand_dims({given[0]}, {node.how})",
    "permute": lambda node, given, _: f"tl.permute({given[0]}, {node.how})",
    "reshape": lambda node, given, _: f"tl.reshape({given[0]}, {node.how})",
    "flip": lambda node, given, _: f"tl.flip({given[0]}, {node.how})",
    "broadcast": lambda _, given, shape: f"tl.broadcast_to({given[0]}, {list(shape)})",
    "program": lambda *_: "p0 * 3 + p1 + 1",
}


class Text:
    """The text of a program, line by line."""

    def __init__(self, program: Program, values: Mapping[int, Value]) -> None:
        """Values are those of any program of the grid: their shapes are in the text."""
        self.program, self.values = program, values
        self.top: list[str] = []

    def whole(self) -> str:
        """All of it."""
        body = self.block(self.program.nodes, "0")
        for number, output in enumerate(self.program.outputs):
            body += self.stored(number, output)
        lines = ["p0 = tl.program_id(0)", "p1 = tl.program_id(1)", *self.top, *body]
        given = [f"    {name},\n" for name in arguments(self.program, self.values)]
        return (
            HEAD + "".join(given) + "    FLAG: tl.constexpr,\n):\n" + "".join(f"    {one}\n" for one in lines)
        )

    def block(self, nodes: tuple[Node, ...], step: str) -> list[str]:
        """The lines of some nodes, in a loop's step."""
        return [line for node in nodes for line in self.lines(node, step)]

    def lines(self, node: Node, step: str) -> list[str]:
        """The lines of a node."""
        if node.body:
            return self.nested(node)
        if node.op == "load":
            return self.loaded(node, step)
        if node.op == "iota":
            return [f"v{node.name} = {self.offsets(node.how[0], step)}"]
        given = [f"v{one}" for one in node.of]
        if node.op == "split":
            names = [f"v{node.name}", f"w{node.name}"][:: 1 - 2 * node.how]
            return [f"{', '.join(names)} = tl.split({given[0]})"]
        if node.op == "affine":
            return [
                f"w{node.name}, v{node.name} = tl.associative_scan(({', '.join(given)}), {node.how}, affine)"
            ]
        return [f"v{node.name} = {expression(node, given, self.values[node.name].shape)}"]

    def nested(self, node: Node) -> list[str]:
        """A loop or a branch: what it carries has its name."""
        begun, step = f"v{node.name} = v{node.of[0]}", f"k{node.name}"
        body = [*self.block(node.body, step), f"v{node.name} = v{node.body[-1].name}"]
        head, after = {
            "constexpr": ("if FLAG:", []),
            "program": ("if p0 % 2 == 0:", []),
            "count": ("if steps > 1:", []),
            "range": (f"for {step} in range(0, steps):", []),
            "tl.range": (f"for {step} in tl.range(0, steps, num_stages={self.program.stages}):", []),
            "static_range": (f"for {step} in tl.static_range({self.program.steps}):", []),
            "while": (f"while {step} < steps:", [f"{step} += 1"]),
        }[node.how]
        first = [f"{step} = 0"] if node.how == "while" else []
        return [begun, *first, head, *(f"    {one}" for one in (*body, *after))]

    def start(self, side: str, step: str) -> str:
        """Where the tile of this program begins on a side."""
        return f"{ {'R': 'p0', 'C': 'p1', 'K': step}[side] } * {self.program.tile[side]}"

    def offsets(self, side: str, step: str) -> str:
        """The places of a tile on a side of the whole tensor."""
        return f"{self.start(side, step)} + tl.arange(0, {self.program.tile[side]})"

    def addressed(self, label: str, sides: tuple[str, ...], step: str) -> tuple[list[str], str, str]:
        """Lines that name the places on each side; their sum; and a mask of those that are there."""
        lines, parts, masks = [], [], []
        for axis, side in enumerate(sides):
            lines.append(f"{label}_{axis} = {self.offsets(side, step)}")
            index = f"[{', '.join(':' if one == axis else 'None' for one in range(len(sides)))}]"
            parts.append(f"{label}_{axis}{index} * {label}_s{axis}")
            if self.program.missing[side]:
                masks.append(f"({label}_{axis}{index} < {SIDES[side]})")
        return lines, " + ".join(parts), " & ".join(masks)

    def block_pointer(self, label: str, sides: tuple[str, ...], step: str) -> str:
        """A pointer to a block."""
        steps = [f"{label}_s{axis}" for axis in range(len(sides))]
        starts = [self.start(side, step) for side in sides]
        tile, order = [self.program.tile[side] for side in sides], list(range(len(sides)))[::-1]
        parts = ", ".join(f"({', '.join(one)},)" for one in ([SIDES[side] for side in sides], steps, starts))
        return f"tl.make_block_ptr({label}, {parts}, {tuple(tile)}, {tuple(order)})"

    def described(self, label: str, sides: tuple[str, ...]) -> None:
        """A descriptor, made once."""
        shape = ", ".join(SIDES[side] for side in sides)
        tile = [self.program.tile[side] for side in sides]
        self.top.append(f"{label}_d = tl.make_tensor_descriptor({label}, [{shape}], [{label}_s0, 1], {tile})")

    def bounded(self, sides: tuple[str, ...]) -> str:
        """The sides of which a block pointer's ends are checked."""
        axes = tuple(axis for axis, side in enumerate(sides) if self.program.missing[side])
        return f", boundary_check={axes}" if axes else ""

    def loaded(self, node: Node, step: str) -> list[str]:
        """A tile of a tensor."""
        place: Place = node.how
        label = f"x{node.name}"
        if place.form == "block":
            check = self.bounded(place.sides)
            padding = ', padding_option="zero"' if check else ""
            return [f"v{node.name} = tl.load({self.block_pointer(label, place.sides, step)}{check}{padding})"]
        if place.form == "descriptor":
            self.described(label, place.sides)
            starts = ", ".join(self.start(side, step) for side in place.sides)
            return [f"v{node.name} = {label}_d.load([{starts}])"]
        lines, address, mask = self.addressed(label, place.sides, step)
        where = f"{label} + {address}"
        if place.form == "far":
            where = f"({label} + far) + (({address}).to(tl.int64) - far)"
        other = float(place.other) if node.kind in FLOATS else place.other
        masked = f", mask={mask}, other={other}" if mask else ""
        return [*lines, f"v{node.name} = tl.load({where}{masked})"]

    def stored(self, number: int, output: Output) -> list[str]:
        """What is done with a value."""
        label, value = f"y{number}", f"v{output.of}"
        if output.form in TILED:
            return self.tiled(label, value, output)
        shape = self.values[output.of].shape
        address = flat(shape) if shape else "0"
        lines = [f"{label}_0 = {address}"]
        mask = f"{label}_0 < {math.prod(shape) - output.cut}"
        masked = f", mask={mask}" if output.cut else ""
        if output.form == "slots":
            slot = f"(p0 * {self.program.grid[1]} + p1) * {math.prod(shape)}"
            return [*lines, f"tl.store({label} + {slot} + {label}_0, {value}{masked})"]
        if output.form == "lock":
            other = f"{masked}, other=0" if masked else ""
            return [
                *lines,
                f"while tl.atomic_cas({label}_lock, 0, 1) == 1:",
                "    pass",
                f"{label}_v = tl.load({label} + {label}_0{other})",
                f"tl.store({label} + {label}_0, {label}_v + {value}{masked})",
                "tl.debug_barrier()",
                f"tl.atomic_xchg({label}_lock, 0)",
            ]
        return [*lines, f"tl.atomic_{output.form}({label} + {label}_0, {value}{masked})"]

    def tiled(self, label: str, value: str, output: Output) -> list[str]:
        """A tile of a matrix is stored."""
        sides = ("R", "C")
        if output.form == "block":
            return [f"tl.store({self.block_pointer(label, sides, '0')}, {value}{self.bounded(sides)})"]
        if output.form == "descriptor":
            self.described(label, sides)
            return [f"{label}_d.store([{self.start('R', '0')}, {self.start('C', '0')}], {value})"]
        lines, address, mask = self.addressed(label, sides, "0")
        masked = f", mask={mask}" if mask else ""
        return [*lines, f"tl.store({label} + {address}, {value}{masked})"]


TILED = ("pointer", "block", "descriptor")
ADDING = ("add", "max", "min", "and", "or", "xor", "lock")


def text(program: Program, values: Mapping[int, Value]) -> str:
    """A program as Triton reads it."""
    return Text(program, values).whole()


def room(
    program: Program, output: Output, values: Mapping[int, Value]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes and strides of a result."""
    if output.form in TILED:
        sizes = (program.extent("R"), program.extent("C"))
        return sizes, strides(sizes, output.layout)
    count = math.prod(values[output.of].shape)
    count *= 1 if output.form in ADDING else program.grid[0] * program.grid[1]
    return (count,), (1,)


def arguments(program: Program, values: Mapping[int, Value]) -> dict[str, Any]:
    """Names of arguments and what they are: numbers; of a tensor its kind and its node or output."""
    given: dict[str, Any] = {}
    for node in program.all():
        if node.op == "load":
            sizes = tuple(program.extent(side) for side in node.how.sides)
            given[f"x{node.name}"] = (node.kind, node)
            given |= {f"x{node.name}_s{n}": one for n, one in enumerate(strides(sizes, node.how.layout))}
    for number, output in enumerate(program.outputs):
        given[f"y{number}"] = (values[output.of].kind, output)
        if output.form == "lock":
            given[f"y{number}_lock"] = ("int32", None)
        if output.form in TILED:
            given |= {f"y{number}_s{n}": one for n, one in enumerate(room(program, output, values)[1])}
    numbers = {name: program.extent(side) for side, name in SIDES.items()}
    return {**given, **numbers, "steps": program.steps, "far": FAR}
