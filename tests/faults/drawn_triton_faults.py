"""Faults of a compiler of Triton: what a node does otherwise, where, and in which programs. In: a seed.

Out: changes of a program's text between its tree and its launch. `python drawn_triton_faults.py SEED COUNT`
says how many drawn faults a run of the check finds (in Triton's interpreter, so set TRITON_INTERPRET=1).
"""

# ruff: noqa: E501 - a table of faults reads in rows
from __future__ import annotations

import contextlib
import itertools
import math
import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "acceptance"))

import torch

from workloads import generated_processes, generated_triton
from workloads.generated_triton_programs import FLOATS, INTEGERS, Node, Output, Program
from workloads.generated_triton_text import Text, flat, text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROGRAMS = 60  # of one run of the check
TRIES = 6  # programs of one seed in which a fault is planted
VALUES = ("add", "sub", "mul", "fma", "cast", "reduce", "scan", "dot", "load", "where", "gather", "maximum")
CONDITIONS: dict[str, Callable[[Program, Node], bool]] = {
    "always": lambda *_: True,
    "8 warps": lambda program, _: program.warps == 8,
    "one warp": lambda program, _: program.warps == 1,
    "more than 2 stages": lambda program, _: program.stages > 2,
    "one stage": lambda program, _: program.stages == 1,
    "rows that end in a tile": lambda program, _: program.missing["R"] > 0,
    "columns that end in a tile": lambda program, _: program.missing["C"] > 0,
    "more than one column of programs": lambda program, _: program.grid[1] > 1,
    "tiles of 64 rows or more": lambda program, _: program.tile["R"] >= 64,
    "tiles of 16 columns": lambda program, _: program.tile["C"] == 16,
    "numbers of 16 bits": lambda _, node: node.kind in {"float16", "int16"},
    "numbers of 32 bits": lambda _, node: node.kind in {"float32", "int32"},
    "whole numbers": lambda _, node: node.kind in INTEGERS,
    "floats": lambda _, node: node.kind in FLOATS,
}
Lines = list[str]


def _after(change: str) -> Callable[[Text, Node, Lines], Lines]:
    """A value is changed when it is there; `{last}` is true at its last element."""

    def changed(text: Text, node: Node, lines: Lines) -> Lines:
        shape = text.values[node.name].shape
        if not shape:
            return lines
        count = math.prod(shape)
        where = {"v": f"v{node.name}", "kind": f"tl.{node.kind}", "flat": f"({flat(shape)})", "count": count}
        last = f"({flat(shape)} == {count - 1})"
        return [*lines, f"v{node.name} = " + change.format(**where, last=last, half=count // 2)]

    return changed


def _replaced(pattern: str, by: str) -> Callable[[Text, Node, Lines], Lines]:
    """The text of a node is another one."""
    return lambda _, __, lines: [re.sub(pattern, by, line) for line in lines]


def _short_scan(text: Text, node: Node, lines: Lines) -> Lines:
    """Sums begin again at the middle."""
    shape = text.values[node.name].shape
    what, axis, _ = node.how
    if what != "cumsum":
        return lines
    index = ", ".join(":" if one == axis else "None" for one in range(len(shape)))
    late = f"(tl.arange(0, {shape[axis]})[{index}] >= {shape[axis] // 2})"
    before = f"tl.expand_dims(tl.sum(tl.where({late}, v{node.of[0]} * 0, v{node.of[0]}), {axis}), {axis})"
    name = f"v{node.name}"
    return [*lines, f"{name} = tl.where({late}, {name} - {before}, {name}).to(tl.{node.kind})"]


def _short_dot(text: Text, node: Node, lines: Lines) -> Lines:
    """The last eight terms of a product are lost."""
    count = text.values[node.of[0]].shape[1]
    kept = f"tl.where(tl.arange(0, {count})[None, :] < {count - 8}, v{node.of[0]}, v{node.of[0]} * 0)"
    return [
        f"z{node.name} = {kept}",
        *(line.replace(f"tl.dot(v{node.of[0]},", f"tl.dot(z{node.name},") for line in lines),
    ]


def _other_axis(text: Text, node: Node, lines: Lines) -> Lines:
    """A reduction of a square block is over its other side."""
    shape = text.values[node.of[0]].shape
    if len(shape) != 2 or shape[0] != shape[1]:
        return lines
    return [line.replace(f"axis={node.how[1]}", f"axis={1 - node.how[1]}") for line in lines]


def _cut_cast(text: Text, node: Node, lines: Lines) -> Lines:
    """A cast of float32 to float16 drops bits."""
    if text.values[node.of[0]].kind != "float32" or node.kind != "float16":
        return lines
    cut = f"((v{node.of[0]}.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True))"
    return [f"v{node.name} = {cut}.to(tl.float16)"]


EFFECTS: dict[str, tuple[tuple[str, ...], Callable[[Text, Node, Lines], Lines]]] = {
    "its last element is 0": (VALUES, _after("tl.where({last}, {v} * 0, {v})")),
    "its last element is one more": (VALUES, _after("tl.where({last}, {v} + 1, {v}).to({kind})")),
    "its first element is negative": (VALUES, _after("tl.where({flat} == 0, -{v}, {v})")),
    "half of it is twice as large": (VALUES, _after("tl.where({flat} >= {half}, {v} * 2, {v}).to({kind})")),
    "program 1 of a row gives 0": (VALUES, _after("tl.where(p1 == 1, {v} * 0, {v})")),
    "its mask is ignored": (("load",), _replaced(r", mask=.*\)$", ")")),
    "what is outside is 0": (("load",), _replaced(r"other=[\d.]+", "other=0")),
    "its mask is one element too wide": (("load",), _replaced(r" < (rows|columns|depth)\)", r" < \1 + 1)")),
    "its places are counted in 32 bits": (("load",), _replaced(r"to\(tl.int64\) - far", "to(tl.int64) - far.to(tl.int32)")),
    "it has one step too few": (("loop",), _replaced(r"(?<!a)range\((0, )?(\w+)", r"range(\1\2 - 1")),
    "a product drops its last terms": (("dot",), _short_dot),
    "it is over the other side": (("reduce",), _other_axis),
    "sums begin again in the middle": (("scan",), _short_scan),
    "a cast drops bits": (("cast",), _cut_cast),
    "it is sorted the other way": (("sort",), _replaced(r"descending=\w+", "descending=True")),
    "it is done in every program": (("branch",), _replaced(r"if p0 % 2 == 0:|if FLAG:", "if steps > 0:")),
    "an addition is lost": (("output",), _replaced(r"(tl\.atomic_(?:add|or|xor|max).*)", r"if p0 + p1 > 0:\n        \1")),
    "a store ignores its mask": (("output",), _replaced(r", mask=.*\)$", ")")),
    "a store's mask lacks the last element": (("output",), _replaced(r" < (rows|columns)\)", r" < \1 - 1)")),
}  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """A node, a condition and what is done otherwise."""

    op: str
    condition: str
    effect: str

    def __str__(self) -> str:
        """It in words."""
        return f"{self.op}, {self.condition}: {self.effect}"

    @contextlib.contextmanager
    def planted(self) -> Iterator[list[int]]:
        """Every text has the fault where its condition holds; the list has the nodes that it changed."""
        lines, stored, struck = Text.lines, Text.stored, list[int]()

        def changed(text: Text, node: Node, right: Lines) -> Lines:
            ops = EFFECTS[self.effect][0]
            if node.op != self.op or self.op not in ops or not CONDITIONS[self.condition](text.program, node):
                return right
            wrong = EFFECTS[self.effect][1](text, node, right)
            struck.extend([node.name] if wrong != right else [])
            return wrong

        def of_node(text: Text, node: Node, step: str) -> Lines:
            return changed(text, node, lines(text, node, step))

        def of_output(text: Text, number: int, output: Output) -> Lines:
            kind = text.values[output.of].kind
            return changed(text, Node(output.of, "output", kind=kind), stored(text, number, output))

        with mock.patch.object(Text, "lines", of_node), mock.patch.object(Text, "stored", of_output):
            yield struck


def draw(source: random.Random) -> Drawn:
    """One fault: each effect, node that it can be of, and condition is as likely as any other."""
    effect = source.choice(list(EFFECTS))
    return Drawn(source.choice(EFFECTS[effect][0]), source.choice(list(CONDITIONS)), effect)


def faults(seed: int, count: int) -> list[Drawn]:
    """The first faults of a seed, each once."""
    source = random.Random(f"triton faults {seed}")
    every = dict.fromkeys(draw(source) for _ in range(count * 3))
    return list(itertools.islice(every, count))


def drawn(run: int) -> list[tuple[Program, Any]]:
    """The programs of one run of the check, and their values."""
    programs = [generated_triton.draw(run, number) for number in range(PROGRAMS)]
    return [(program, generated_triton.everywhere(program)[0, 0]) for program in programs]


def strikes(fault: Drawn, program: Program, values: Any) -> bool:
    """Whether a program's text has the fault."""
    with fault.planted() as struck:
        text(program, values)
    return bool(struck)


def fails(job: tuple[Drawn, int, int]) -> str:
    """How a program fails with a fault planted; without one it must pass."""
    fault, seed, number = job
    with generated_processes.limited(), fault.planted():
        try:
            said = generated_triton.judged(generated_triton.draw(seed, number))
        except generated_triton.Refused:
            return ""
    return said[1] if said[0] > 1 else ""


def looked_for(fault: Drawn, seed: int, programs: list[tuple[Program, Any]]) -> tuple[int, str]:
    """How many programs of a seed a fault strikes, and how the first of them fails by it."""
    struck = [number for number, program in enumerate(programs) if strikes(fault, *program)]
    jobs = [(fault, seed, number) for number in struck[:TRIES]]
    for job, said in generated_processes.each(fails, jobs, 1):
        words = said.words if isinstance(said, generated_processes.Ended) else said
        if words:
            return len(struck), f"program {job[2]}: {words}"
    return len(struck), ""


def main(seed: int, count: int, run: int = 0) -> None:
    """Print what one run finds of drawn faults."""
    torch.set_num_threads(1)
    programs, found = drawn(run), []
    for fault in faults(seed, count):
        struck, words = looked_for(fault, run, programs)
        found.append((struck, words))
        sys.stdout.write(f"{'found' if words else 'MISSED'} {fault}; {struck} programs; {words}\n")
        sys.stdout.flush()
    caught, met = (sum(bool(one[n]) for one in found) for n in (1, 0))
    sys.stdout.write(f"{caught} of {count} found, {met} strike one of {PROGRAMS} programs\n")


NAMED: dict[str, Drawn] = {
    "a mask is ignored at the edge": Drawn("load", "columns that end in a tile", "its mask is ignored"),
    "a dot drops its last terms": Drawn("dot", "always", "a product drops its last terms"),
    "a reduction is over the other side": Drawn("reduce", "always", "it is over the other side"),
    "a cast truncates": Drawn("cast", "always", "a cast drops bits"),
    "a scan begins again in the middle": Drawn("scan", "always", "sums begin again in the middle"),
    "an atomic addition is lost": Drawn("output", "always", "an addition is lost"),
    "a loop is one step short": Drawn("loop", "more than 2 stages", "it has one step too few"),
    "places wrap at 32 bits": Drawn("load", "always", "its places are counted in 32 bits"),
}

if __name__ == "__main__":
    main(*(int(one) for one in sys.argv[1:]))
