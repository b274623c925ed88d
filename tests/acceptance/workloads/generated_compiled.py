"""Operators of PyTorch's whole table compiled together, beside the same in eager mode and in float64.

In: a seed. Out: what failed, named by operator. A batch of programs that know nothing of each other is one
compiled function, so that a compiler is started once for all of them:
`python3 -c "from workloads import generated_compiled; print(generated_compiled.repeat(0, 17))"`.

What a compiler refuses is loud, and no failure. A failure is made smaller: the program alone, then without
its surroundings. A compiled program may round in other places than eager mode does: its gate is eager mode's
own distance from float64.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import random
import tempfile
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from workloads import (
    device,
    gates,
    generated,
    generated_compiled_items,
    generated_elsewhere,
    generated_judge,
    generated_operators,
    generated_processes,
    generated_random,
    generated_words,
    synchronize,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from workloads.generated_compiled_items import Item
    from workloads.generated_judge import Call

TRACED, CODE = "aot_eager_decomp_partition", "inductor"
TOGETHER, SHRINKS = {TRACED: 8, CODE: 16}, {TRACED: 24, CODE: 8}  # programs in one compiled function; tries
NEEDED, FACTOR = 4.0, 4.0  # units, as of other generated cases
NEAR = {torch.float32: 8.0, torch.float16: 2.0, torch.bfloat16: 2.0}  # roundings from eager mode that pass
EXCUSED = 512.0  # beyond this, float64 does not say what eager mode means
DYNAMIC = 0.1  # the share of batches that are compiled for all sizes, at eight times the cost
SECONDS = 180  # of soak, in which batches of generated code begin
TRACED_SHARE = 0.75  # of the table on a processor: a compiler of C++ takes the time of the rest
LEAST = 0.9  # the share of the table that eager mode takes
Judged = tuple[float, str]
Results = list[torch.Tensor]


@dataclass(frozen=True)
class Job:
    """A batch by its number, or one of its programs alone."""

    seed: int
    number: int
    backend: str
    alone: int | None = None


def order(seed: int) -> list[tuple[str, str]]:
    """Every operator in float32 and in one of its shorter types, in an order of the seed."""
    source, kinds = random.Random(f"compiled {seed}"), dict[str, list[str]]()
    for name, kind in generated_operators.every_row():
        kinds.setdefault(name, []).append(kind)
    halves = {name: [one for one in found if one != "float32"] for name, found in kinds.items()}
    rows = [(name, "float32") for name, found in kinds.items() if "float32" in found]
    rows += [(name, source.choice(found)) for name, found in halves.items() if found]
    mixed = source.sample(rows, len(rows))
    return sorted(mixed, key=lambda row: not row[0].startswith(generated_compiled_items.DRAWING))


def batches(backend: str) -> int:
    """How many batches have the whole table."""
    return -(-len(order(0)) // TOGETHER[backend])


def rows(job: Job) -> list[tuple[str, str]]:
    """The operators and types of a batch, or of one program of it."""
    many = TOGETHER[job.backend]
    start = job.number % batches(job.backend) * many
    found = order(job.seed)[start : start + many]
    return found if job.alone is None else found[job.alone : job.alone + 1]


def drawn(job: Job) -> list[Item]:
    """The programs of a batch that a processor runs in eager mode."""
    found = [
        generated_compiled_items.draw(random.Random(f"{replace(job, alone=None)} {row}"), *row)
        for row in rows(job)
    ]
    return [one for one in found if one]


def _on_device(item: Item) -> Item:
    place = device()
    call = item.call.mapped(lambda one: one.to(place) if isinstance(one, torch.Tensor) else one)
    return replace(item, call=call)


class Refused(Exception):  # noqa: N818
    """A compiler says that it does not take a program."""


def together(items: Sequence[Item], backend: str, *, dynamic: bool = False) -> list[Results]:
    """Each program's results and gradients, all from one compiled function and its backward pass."""
    torch._dynamo.reset()
    programs = [generated_compiled_items.program_of(item.call) for item in items]

    def whole(given: list[Any]) -> list[Any]:
        return [program.compiled(*one) for program, one in zip(programs, given, strict=True)]

    compiled = torch.compile(whole, backend=backend, fullgraph=True, dynamic=dynamic)
    calls = [generated_random.leaves_of(item.call) for item in items]
    generated_judge.seed_all(0)
    given = [program.prepare(call.args) for program, call in zip(programs, calls, strict=True)]
    with _refusing():
        out = compiled(given)
    told = [(one, program.left(mine)) for program, one, mine in zip(programs, out, given, strict=True)]
    results = [generated_judge.numbers(one) for one in told]
    roots, weights, inputs = list[torch.Tensor](), list[torch.Tensor](), list[list[torch.Tensor]]()
    for call, one in zip(calls, told, strict=True):
        mine, its, given_to = generated_random.rooted(call, one)
        roots += mine
        weights += its
        inputs.append(given_to)
    flat = list(itertools.chain(*inputs))
    grads: Sequence[Any] = [None] * len(flat)
    if roots and flat:
        with _refusing():
            grads = torch.autograd.grad(roots, flat, weights, allow_unused=True, materialize_grads=True)
    each = iter(grads)
    return [one + [next(each) for _ in mine] for one, mine in zip(results, inputs, strict=True)]


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Tell a refusal from a compiler that breaks, and from a device that answers nothing any more."""
    try:
        with generated_elsewhere.answering():
            yield
            synchronize()
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        broken = any(one in words.lower() for one in generated.BROKEN)
        raise (RuntimeError if broken else Refused)(words) from error


def judge(item: Item, got: Results) -> Judged | None:
    """The distance of what a compiler gave as a share of its gate; `None` if nobody can say what is right.

    Then this device refuses what a processor takes, float64 does, or there is too little memory for it.
    """
    try:
        with generated_elsewhere.answering():
            return _judged(item.call, got)
    except Exception:  # noqa: BLE001
        return None


def _judged(call: Call, got: Results) -> Judged | None:
    eager = generated_judge.results(call)
    if [(one.shape, one.dtype) for one in got] != [(one.shape, one.dtype) for one in eager]:
        shapes = [[(tuple(one.shape), str(one.dtype)[6:]) for one in each] for each in (got, eager)]
        return math.inf, f"other shapes or types than in eager mode: {shapes[0]}, not {shapes[1]}"
    pairs = zip(got, eager, strict=True)
    near = max((generated_judge._roundings(a, b, call) for a, b in pairs), default=0.0)
    if near <= NEAR[call.dtype]:
        return near / NEAR[call.dtype] / 4, "near eager mode"
    reference = generated_judge.Reference(call)
    own = generated_judge.distance(call, eager, reference)
    if own is None or own > EXCUSED:
        return None
    bound = FACTOR * max(NEEDED, own)
    units = generated_judge.distance(call, got, reference, enough=bound / 2)
    if units is not None and bound < units <= EXCUSED:
        units = generated_judge.distance(call, got, reference, excused=True, beside=eager)
    if units is None or (units > bound and _cancels(call, got, eager)):
        return None
    return units / bound, f"{units:.3g} units from float64, {bound:.3g} allowed, eager mode {own:.3g}"


def _cancels(call: Call, got: Results, eager: Results) -> bool:
    """Whether a program that normalizes is off by less than a rounding of its largest number.

    Of two numbers that are normalized the gradient is nearly 0: what is left is the rounding of larger terms.
    """
    program = generated_compiled_items.program_of(call)
    most = max((float(one.abs().max()) for one in eager if one.numel()), default=0.0)
    unit = gates.unit_roundoff(call.dtype) * most
    near = all(not a.numel() or float((a - b).abs().max()) <= unit for a, b in zip(got, eager, strict=True))
    return near and generated_operators.NORMALIZES in program.name


def run(job: Job) -> dict[str, Any]:
    """What one batch says: how many programs were judged, refused, and what failed."""
    with _plain(), generated_processes.limited(), generated_elsewhere.answering():
        return _run(job)


def _run(job: Job) -> dict[str, Any]:
    began = time.monotonic()
    found = [_on_device(item) for item in drawn(job)]
    ready = time.monotonic()
    dynamic = random.Random(f"dynamic {replace(job, alone=None)}").random() < DYNAMIC
    report = _report(len(found))
    compiled = functools.partial(together, backend=job.backend, dynamic=dynamic)
    items, drawing = ([item for item in found if item.draws is draws] for draws in (False, True))

    def by_itself(given: list[Item]) -> list[Judged | None]:
        torch._dynamo.reset()
        program = generated_compiled_items.program_of(given[0].call)
        with _refusing():
            own = torch.compile(program.compiled, backend=job.backend, fullgraph=True, dynamic=dynamic)
            return [generated_random.judge(given[0], own)]

    if job.backend == CODE:  # what no tracer takes costs no compiler's time
        traced = _parts(items, functools.partial(together, backend=TRACED, dynamic=dynamic), report)
        items = [item for item, _ in traced]
    results = _parts(items, compiled, report)
    compiled_at = time.monotonic()
    told: list[tuple[Item, Judged | None]] = [(item, judge(item, got)) for item, got in results]
    for one in drawing:
        told += _parts([one], by_itself, report)
    for item, said in told:
        if said is None:
            report["unsure"].append(item.of)
            continue
        report["judged"] += 1
        if said[0] > 1:
            again = by_itself if item.draws else lambda one: [judge(one[0], compiled(one)[0])]
            report["failed"].append(_named(item, said, job, again))
        else:
            report["worst"] = max(report["worst"], said[0])
    report["times"] = [
        round(one, 2) for one in (ready - began, compiled_at - ready, time.monotonic() - compiled_at)
    ]
    return report


def _parts(
    items: list[Item], compiled: Callable[[list[Item]], list[Any]], report: dict[str, Any]
) -> list[tuple[Item, Any]]:
    """The results of a batch; of halves of it, where a compiler refuses it."""
    if not items:
        return []
    try:
        return list(zip(items, compiled(items), strict=True))
    except Refused as refused:
        if len(items) == 1:
            report["refused"].append(f"{items[0].of}: {refused}"[:160])
            return []
    except RuntimeError as broken:
        if len(items) == 1:
            report["failed"].append(f"  {items[0]}: {broken}")
            report["judged"] += 1
            return []
    middle = len(items) // 2
    return [*_parts(items[:middle], compiled, report), *_parts(items[middle:], compiled, report)]


def _named(item: Item, said: Judged, job: Job, judged: Callable[[list[Item]], list[Judged | None]]) -> str:
    """A failure by its operator: alone, and as small as it gets."""
    tries = iter(range(SHRINKS[job.backend]))

    def fails(one: Item) -> Judged | None:
        if next(tries, None) is None:
            return None
        try:
            told = judged([one])[0]
        except Exception:  # noqa: BLE001 another program may be refused
            return None
        return told if told and told[0] > 1 else None

    words = f"  {item} by {job.backend}: {said[1]}"
    again = f"    again: generated_compiled.repeat{job.seed, job.number, job.backend}"
    small, told = item, fails(item)
    if not told:
        return f"{words}\n    only together with the others of its batch\n{again}"
    going = True
    while going:
        going = False
        for other in _smaller(small):
            if found := fails(other):
                small, told, going = other, found, True
                break
    return f"{words}\n    at its smallest {small} {generated_words.shown(small.call)}: {told[1]}\n{again}"


def _smaller(item: Item) -> Iterator[Item]:
    for program in generated_compiled_items.program_of(item.call).smaller():
        yield replace(item, call=replace(item.call, function=program))
    if item.call.gradients:
        yield replace(item, call=replace(item.call, gradients=False))


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    """Run the body without warnings, TF32 and the compiler's caches; its files are gone afterwards."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(generated._plain())
        logging.disable(logging.ERROR)
        stack.callback(logging.disable, logging.NOTSET)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for name, value in (("TORCHINDUCTOR_CACHE_DIR", folder), ("TRITON_CACHE_DIR", folder)):
            was = os.environ.get(name)
            os.environ[name] = value
            stack.callback(_put_back, name, was)
        stack.enter_context(torch._inductor.config.patch(compile_threads=1, force_disable_caches=True))
        yield


def _put_back(name: str, was: str | None) -> None:
    if was is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = was


class _Jobs:
    """Batches, and after one that ended its process each of its programs alone."""

    def __init__(self, jobs: Iterator[Job]) -> None:
        """Those of a table first."""
        self.jobs, self.more = jobs, deque[Job]()

    def __iter__(self) -> _Jobs:
        return self

    def __next__(self) -> Job:
        return self.more.popleft() if self.more else next(self.jobs)


def check(seed: int, traced: range, code: range, *, seconds: float = 0, processes: int = 1) -> dict[str, Any]:
    """Judge batches of a seed: those that are traced, then generated code until the time is over."""

    def numbers() -> Iterator[Job]:
        yield from (Job(seed, number, TRACED) for number in traced)
        began = time.monotonic()
        yield from itertools.takewhile(
            lambda _: time.monotonic() - began < seconds,
            itertools.chain(*(_parted(Job(seed, number, CODE)) for number in code)),
        )

    jobs, parts = _Jobs(numbers()), []
    for job, said in generated_processes.each(run, jobs, processes):
        if not isinstance(said, generated_processes.Ended):
            parts.append({**said, "job": job})
        elif job.alone is None:
            jobs.more.extend(replace(job, alone=n) for n in range(len(rows(job))))
        else:
            parts.append({**_report(1), "judged": 1, "job": job, "failed": [_ended(job, said.words)]})
    counts = {name: sum(part[name] for part in parts) for name in ("drawn", "judged")}
    names = ("failed", "refused", "unsure")
    lists = {name: list(itertools.chain(*(part[name] for part in parts))) for name in names}
    batches = [(part["job"].backend, part["job"].number, *part["times"]) for part in parts if part["times"]]
    worst = max((part["worst"] for part in parts), default=0.0)
    return {"family": "compiled", "seed": seed, **counts, **lists, "worst": worst, "batches": batches}


def _parted(job: Job) -> list[Job]:
    """A batch; of programs that draw numbers each by itself, as none is compiled with others."""
    draws = any(row[0].startswith(generated_compiled_items.DRAWING) for row in rows(job))
    return [replace(job, alone=n) for n in range(len(rows(job)))] if draws else [job]


def _report(count: int) -> dict[str, Any]:
    lists: dict[str, Any] = {"failed": [], "refused": [], "unsure": [], "times": []}
    return {"drawn": count, "judged": 0, "worst": 0.0, **lists}


def _ended(job: Job, words: str) -> str:
    again = f"generated_compiled.repeat{job.seed, job.number, job.backend, job.alone}"
    return f"  {' '.join(rows(job)[0])} by {job.backend}: {words}\n    again: {again}"


def of_soak(seed: int) -> dict[str, Any]:
    """What soak draws: the table traced, then generated code until the time is over."""
    processes = min(len(os.sched_getaffinity(0)), generated.MOST_PROCESSES)
    share = 1 if device().type != "cpu" else TRACED_SHARE
    traced = range(int(share * batches(TRACED)))
    report = check(seed, traced, range(batches(CODE)), seconds=SECONDS, processes=processes)
    return {**report, "least": LEAST * share * len(order(seed))}


def repeat(seed: int, number: int, backend: str = TRACED, alone: int | None = None) -> str:
    """One batch again, or one program of it, in words."""
    report = run(Job(seed, number, backend, alone))
    return "\n".join([f"{len(report['failed'])} of {report['judged']} failed", *report["failed"]])
