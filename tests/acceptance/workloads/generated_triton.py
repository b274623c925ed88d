"""Drawn Triton programs, launched and judged. In: a seed and a number. Out: how near the gate a program came.

A program is a tree (drawn by `generated_triton_draws`) that is worked out in float64 and integers
(`generated_triton_values`), and written as Triton's text (`generated_triton_text`). It runs several times,
each time with new memory: exact numbers must be these bits, others within the bound of their operations, and
memory around and between results must not change. A processor compiles it for the architectures of COMPILED,
or runs it in Triton's interpreter: `TRITON_INTERPRET=1 python3 -c "from workloads import generated_triton;
print(generated_triton.repeat(0, 17))"`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.compiler import ASTSource

from workloads import arch, device, generated_left, generated_triton_draws, machine_code, synchronize
from workloads.gates import bits
from workloads.generated_elsewhere import answering
from workloads.generated_triton_draft import is_sound
from workloads.generated_triton_programs import (
    EIGHTS,
    FLOATS,
    GUARD,
    INTEGERS,
    KINDS,
    Node,
    Output,
    Program,
    memory,
    poisoned,
    span,
)
from workloads.generated_triton_text import ADDING, TILED, arguments, room, text
from workloads.generated_triton_values import Value, everywhere, fits, grain, unit

COMPILED = ("sm_90", "gfx942")  # what a processor compiles for
RUNS = 3
SHRINKS, SHRINK_S = 80, 25.0
BROKEN = ("illegal memory", "misaligned", "internal assert", "unspecified launch failure", "device-side")
COMBINED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add, "lock": torch.add, "max": torch.maximum, "min": torch.minimum,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
}  # fmt: skip
Values = Mapping[tuple[int, int], Mapping[int, Value]]
Judged = tuple[float, str]


class Refused(Exception):  # noqa: N818
    """The compiler says that it does not take a program."""


@dataclass(frozen=True)
class Expected:
    """What a result's memory holds at the end: where it was written, the number there and its bound."""

    number: torch.Tensor
    error: torch.Tensor
    written: torch.Tensor


def is_interpreted() -> bool:
    """Whether Triton runs its kernels on a processor, as its interpreter does."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def has() -> frozenset[str]:
    """The types and forms of access that programs here may have.

    The interpreter has no bfloat16, and rounds 8 bits otherwise. Triton 3.9 has no block pointers.
    """
    forms = {"pointer"} | ({"block"} if hasattr(tl, "advance") else set())
    forms |= {"descriptor"} if hasattr(tl, "make_tensor_descriptor") else set()
    forms |= {"tf32", "tf32x3"} if is_interpreted() or arch.has_tf32() else set()
    lacking = {*EIGHTS, "bfloat16"} if is_interpreted() else set()
    if device().type == "cuda" and arch.fp8() is None:
        lacking |= set(EIGHTS)
    return frozenset({*KINDS, *forms} - lacking)


def draw(seed: int, number: int) -> Program:
    """A program by its number."""
    return generated_triton_draws.draw(
        random.Random(f"triton {seed} {number}"), seed * 100_003 + number, has()
    )


def one(seed: int, number: int) -> Judged | None:
    """How near a program came to its gate, and words; `None` if the compiler refuses it."""
    program = draw(seed, number)
    try:
        said = judged(program)
    except Refused:
        generated_left.say(generated_left.CALL, "the compiler refuses it")
        return None
    if said[0] <= 1:
        return said
    small = shrunk(program)
    told = f"  {said[1]}\n    at its smallest, {launch_words(small)}: {tried(small) or said}\n"
    return said[0], f"{told}{shown(small)}    again: generated.repeat('triton', {seed}, {number})"


def repeat(seed: int, number: int) -> str:
    """One program again, in words."""
    program = draw(seed, number)
    said = one(seed, number)
    return f"{launch_words(program)}\n{shown(program)}{said or 'refused by the compiler'}"


def launch_words(program: Program) -> str:
    """How a program is launched."""
    grid = f"grid {program.grid}, {program.warps} warps, {program.stages} stages"
    return f"{grid}, {program.launches} launches, {program.steps} steps, data of seed {program.seed}"


def shown(program: Program) -> str:
    """The text of a program and its arguments, to be read."""
    values = everywhere(program)[0, 0]
    source = text(program, values).partition("@triton.jit\ndef kernel(")[2]
    given = {
        name: one[0] if isinstance(one, tuple) else one for name, one in arguments(program, values).items()
    }
    return f"def kernel({source}    # {given}\n"


def judged(program: Program) -> Judged:
    """The distance of a program's results from what its tree says, as a share of the bound."""
    values = everywhere(program)
    source = text(program, values[0, 0])
    if device().type == "cpu" and not is_interpreted():
        for target in COMPILED:
            compiled(program, source, values[0, 0], target)
        return 0.0, "compiled"
    with kernel(source) as function:
        runs = [launched(program, function, values[0, 0]) for _ in range(RUNS)]
    found = [
        compared(program, output, number, [run[number] for run in runs], values)
        for number, output in enumerate(program.outputs)
    ]
    return max(found, key=lambda said: said[0])


@contextlib.contextmanager
def kernel(source: str) -> Iterator[Any]:
    """A kernel from its text. Triton reads a file, and keeps what it compiles in a folder."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": folder}):
        path = Path(folder) / "drawn.py"
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location("drawn", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is no module")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module.kernel


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Tell a refusal, which is loud, from a kernel that breaks, and from a device that is lost."""
    try:
        with answering():
            yield
            synchronize()
    # Over the releases the compiler's errors have no common type.
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())[-400:]
        if any(one in words.lower() for one in BROKEN):
            raise
        raise Refused(words) from error


def compiled(program: Program, source: str, values: Mapping[int, Value], target: str) -> None:
    """Compile for a device that need not be here, as a launch there would. Raises `Refused`."""
    types: dict[str, str] = {}
    constants: dict[str, int] = {"FLAG": program.flag}
    aligned: list[int] = []
    for number, (name, given) in enumerate(arguments(program, values).items()):
        if isinstance(given, tuple):
            types[name] = "*" + POINTED[given[0]]
        elif given == 1:
            types[name], constants[name] = "constexpr", 1
        else:
            types[name] = "i64" if given >= 2**31 else "i32"
        aligned += [number] if isinstance(given, tuple) or given % 16 == 0 else []
    attributes = {(number,): [["tt.divisibility", 16]] for number in aligned}
    with kernel(source) as function, refusing():
        read = ASTSource(function, {**types, "FLAG": "constexpr"}, constants, attributes)
        options = {"num_warps": program.warps, "num_stages": program.stages}
        triton.compile(read, target=machine_code._target(target), options=options)


POINTED = {
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float8e5": "fp8e5", "float8e4nv": "fp8e4nv",
    "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64",
}  # fmt: skip


def launched(program: Program, function: Any, values: Mapping[int, Value]) -> list[torch.Tensor]:
    """The memory of each result after all launches, with what is around it."""
    given, results = [], []
    for named in arguments(program, values).values():
        if not isinstance(named, tuple):
            given.append(named)
        elif isinstance(named[1], Node):
            given.append(memory(program, named[1])[0].to(device())[GUARD:])
        elif named[1] is None:
            given.append(torch.zeros(4, dtype=torch.int32, device=device()))
        else:
            results.append(empty(program, named[1], values).to(device()))
            given.append(results[-1][GUARD:])
    if hasattr(triton, "set_allocator"):
        triton.set_allocator(lambda size, *_: torch.empty(size, dtype=torch.int8, device=device()))
    with refusing():
        for _ in range(program.launches):
            function[program.grid](*given, program.flag, num_warps=program.warps, num_stages=program.stages)
    return [result.cpu() for result in results]


def empty(program: Program, output: Output, values: Mapping[int, Value]) -> torch.Tensor:
    """A result's memory before the launch: what adds up begins with what changes nothing."""
    kind, count = values[output.of].kind, span(*room(program, output, values))
    whole = poisoned(kind, count + 2 * GUARD)
    if output.form in ADDING:
        ends = torch.iinfo(INTEGERS[kind]) if kind in INTEGERS else None
        first = {"max": ends and ends.min, "min": ends and ends.max, "and": -1}.get(output.form, 0)
        whole[GUARD : GUARD + count] = first
    return whole


def expected(program: Program, output: Output, values: Values) -> Expected:
    """What the tree says of a result."""
    first = values[0, 0]
    kind, (sizes, steps) = first[output.of].kind, room(program, output, first)
    start = empty(program, output, first)[GUARD:-GUARD]
    number = start.double() if kind in FLOATS else start.clone()
    error, written = (
        torch.zeros(number.shape, dtype=torch.float64),
        torch.zeros(number.shape, dtype=torch.bool),
    )
    terms = [values[pid][output.of] for pid in program.places()]
    if output.form in ADDING:
        count = number.numel() - output.cut
        flat = [one.number.reshape(-1)[:count] for one in terms] * program.launches
        for one in flat:
            number[:count] = COMBINED[output.form](number[:count], one)
        written[:count] = True
        most = sum(one.abs() for one in flat)
        if kind in FLOATS and not fits(most, min(grain(one) for one in flat), unit(kind)):
            error[:count] = len(flat) * unit(kind) * most
        return Expected(number, error, written)
    for pid, one in zip(program.places(), terms, strict=True):
        for whole, part in (
            (number, one.number),
            (error, one.error),
            (written, torch.ones(one.shape).bool()),
        ):
            if output.form in TILED:
                tile = whole.as_strided(sizes, steps)
                rows, columns = (slice(pid[n] * one.shape[n], (pid[n] + 1) * one.shape[n]) for n in (0, 1))
                there = tile[rows, columns]
                there.copy_(part[: there.shape[0], : there.shape[1]])
            else:
                at, size = pid[0] * program.grid[1] + pid[1], one.number.numel()
                whole[at * size : (at + 1) * size - output.cut] = part.reshape(-1)[: size - output.cut]
    return Expected(number, error, written)


def padding(
    program: Program, output: Output, memory: torch.Tensor, values: Mapping[int, Value]
) -> torch.Tensor:
    """Where a descriptor's store may write beside its rows, up to 16 bytes (triton-lang/triton#11583)."""
    found, (sizes, steps) = torch.zeros(memory.shape, dtype=torch.bool), room(program, output, values)
    if output.form == "descriptor" and arch.has_tma():
        more = -sizes[1] * memory.element_size() % 16 // memory.element_size()
        found.as_strided((sizes[0], more), steps, GUARD + sizes[1]).fill_(True)
    return found


def compared(
    program: Program, output: Output, number: int, runs: list[torch.Tensor], values: Values
) -> Judged:
    """One result of every run: its numbers, the memory around them, and the same bits each time."""
    right, before = expected(program, output, values), empty(program, output, values[0, 0])
    what = f"result {number} ({output.form} of v{output.of})"
    untouched = torch.cat((torch.ones(GUARD), ~right.written, torch.ones(GUARD))).bool()
    untouched &= ~padding(program, output, before, values[0, 0])
    first = runs[0]
    changed = (bits(first) != bits(before)) & untouched
    if bool(changed.any()):
        place = int(changed.int().argmax()) - GUARD
        return math.inf, f"{what}: {int(changed.sum())} elements were changed outside, the first at {place}"
    got = first[GUARD:-GUARD]
    off = (got.double() - right.number).abs() if got.is_floating_point() else (got != right.number).double()
    off = torch.where(right.written, off, 0.0).nan_to_num(math.inf, math.inf)
    wrong = off > right.error
    if bool(wrong.any()):
        return _worst(what, got, right, off, wrong)
    again = [n for n, run in enumerate(runs) if not bool((bits(run) == bits(first)).all())]
    if again and not (output.form in ADDING and bool(right.error.any())):
        return math.inf, f"{what}: other bits in run {again[0]}"
    share = off / torch.where(right.error > 0, right.error, 1.0)
    return float(share.max()), f"{what}: in its bounds"


def _worst(what: str, got: torch.Tensor, right: Expected, off: torch.Tensor, wrong: torch.Tensor) -> Judged:
    share = torch.where(wrong, off / right.error.clamp_min(1e-300), 0.0)
    place = int(share.argmax())
    bound = float(right.error[place])
    return float(share[place]) if bound else math.inf, (
        f"{what}: {int(wrong.sum())} of {wrong.numel()} wrong, at {place} {got[place].item()!r} for "
        f"{right.number[place].item()!r}, {bound:.3g} allowed"
    )


def tried(program: Program) -> Judged | None:
    """What a program says; `None` if nobody takes it: a smaller one may have shapes that do not meet."""
    try:
        if not all(is_sound(one) for values in everywhere(program).values() for one in values.values()):
            return None
        return judged(program)
    except (Refused, RuntimeError, ValueError, IndexError, KeyError, TypeError):
        return None


def shrunk(program: Program) -> Program:
    """The same failure with fewer nodes, results, programs and elements."""
    tries, ends, going = itertools.count(), time.monotonic() + SHRINK_S, True
    while going:
        going = False
        for other in smaller(program):
            if next(tries) > SHRINKS or time.monotonic() > ends:
                return program
            said = tried(other)
            if said and said[0] > 1:
                program, going = other, True
                break
    return program


def smaller(program: Program) -> Iterator[Program]:
    """Programs with less in them, the shortest first."""
    trimmed = generated_triton_draws.trimmed
    if len(program.outputs) > 1:
        yield from (trimmed(replace(program, outputs=(one,))) for one in program.outputs)
    for node in program.nodes[:-1]:  # a result in the middle
        for output in program.outputs[:1]:
            yield trimmed(replace(program, outputs=(replace(output, of=node.name, form="slots", cut=0),)))
    for node in program.nodes:
        for name in node.of:
            yield trimmed(renamed(program, node.name, name))
    once = (replace(program, launches=1), replace(program, steps=1), replace(program, stages=1))
    yield from (one for one in once if one != program)
    yield from (replace(program, grid=grid) for grid in ((1, 1), (1, program.grid[1])) if grid < program.grid)
    for side, size in program.tile.items():
        if size > 16:
            less = {**program.missing, side: min(program.missing[side], size // 2 - 1)}
            yield replace(program, tile={**program.tile, side: size // 2}, missing=less)
        if program.missing[side]:
            yield replace(program, missing={**program.missing, side: 0})
    if program.warps > 1:
        yield replace(program, warps=program.warps // 2)


def renamed(program: Program, name: int, other: int) -> Program:
    """Without a node: what used it uses another one."""

    def changed(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        return tuple(
            replace(one, of=tuple(other if each == name else each for each in one.of), body=changed(one.body))
            for one in nodes
            if one.name != name
        )

    outputs = tuple(replace(one, of=other) if one.of == name else one for one in program.outputs)
    return replace(program, nodes=changed(program.nodes), outputs=outputs)
