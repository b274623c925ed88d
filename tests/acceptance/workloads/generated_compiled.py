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
import shutil
import tempfile
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from workloads import (
    device,
    generated,
    generated_compiled_items,
    generated_elsewhere,
    generated_judge,
    generated_left,
    generated_operators,
    generated_processes,
    generated_random,
    generated_trees,
    generated_words,
    synchronize,
)
from workloads.generated_compiled_judge import judge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from workloads.generated_compiled_items import Item
    from workloads.generated_compiled_judge import Judged, Results

TRACED, CODE = "aot_eager_decomp_partition", "inductor"
TOGETHER, SHRINKS = {TRACED: 8, CODE: 16}, {TRACED: 24, CODE: 8}  # programs in one compiled function; tries
DYNAMIC = 0.1  # the share of batches that are compiled for all sizes, at eight times the cost
SECONDS = 180  # of soak, in which batches of generated code begin
TRACED_SHARE = 0.75  # of the table on a processor: a compiler of C++ takes the time of the rest
LEAST = 0.9  # the share of the table that eager mode takes


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


def drawn(job: Job, report: dict[str, Any]) -> list[Item]:
    """The programs of a batch that a processor runs in eager mode; what it refuses is counted."""
    found: list[Item] = []
    for row in rows(job):
        source, item = random.Random(f"{replace(job, alone=None)} {row}"), None
        with generated_left.counted() as counts:
            try:
                with generated_left.refusing(generated_left.CALL, "drawing it is refused"):
                    item = generated_compiled_items.draw(source, *row)
            except Exception as broken:  # noqa: BLE001 an operator may raise anything, anywhere
                report["failed"].append(f"  {' '.join(row)}: {type(broken).__name__}: {broken}")
                continue
        generated_left.add(counts)
        if item:
            found.append(item)
        else:
            generated_left.say("case", generated_left.why(counts))
    report["judged"] = len(report["failed"])
    report["drawn"] = len(found) + report["judged"]
    return found


def _on_device(items: Sequence[Item]) -> list[Item]:
    with _refusing():
        place = functools.partial(_placed, device())
        return [replace(item, call=item.call.mapped(place)) for item in items]


def _placed(on: torch.device, leaf: Any) -> Any:
    return leaf.to(on) if isinstance(leaf, torch.Tensor) else leaf


def has_compiler() -> bool:
    """Whether there is a compiler of C++, which generated code of a processor needs."""
    return shutil.which(os.environ.get("CXX", "g++")) is not None


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
    results = [generated_trees.numbers(one) for one in told]
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


def run(job: Job) -> dict[str, Any]:
    """What one batch says: how many programs were judged, refused, and what failed."""
    with (
        _plain(),
        generated_processes.limited(),
        generated_elsewhere.answering(),
        generated_left.counted() as counts,
    ):
        report = _run(job)
    counts["case", generated_left.JUDGED] = report["judged"]
    return {**report, "asked": len(rows(job)), "left": counts}


def _run(job: Job) -> dict[str, Any]:
    began = time.monotonic()
    report = _report()
    found = drawn(job, report)
    found = [item for _, item in _parts(found, _on_device, report)]
    ready = time.monotonic()
    dynamic = random.Random(f"dynamic {replace(job, alone=None)}").random() < DYNAMIC
    compiled = functools.partial(together, backend=job.backend, dynamic=dynamic)
    items, drawing = ([item for item in found if item.draws is draws] for draws in (False, True))

    def by_itself(given: list[Item]) -> list[Judged | None]:
        torch._dynamo.reset()
        program = generated_compiled_items.program_of(given[0].call)
        own = torch.compile(program.compiled, backend=job.backend, fullgraph=True, dynamic=dynamic)
        return [generated_random.judge(given[0], own, _refusing)]

    if job.backend == CODE:  # what no tracer takes costs no compiler's time
        traced = _parts(items, functools.partial(together, backend=TRACED, dynamic=dynamic), report)
        items = [item for item, _ in traced]
    results = _parts(items, compiled, report)
    compiled_at = time.monotonic()
    told = [(item, _why(judge, item, got)) for item, got in results]
    for one in drawing:
        with generated_left.counted() as counts:
            its = _parts([one], by_itself, report)
        generated_left.add(counts)
        told += [(item, (said, generated_left.why(counts))) for item, said in its]
    for item, (said, why) in told:
        if said is None:
            report["unsure"].append(item.of)
            generated_left.say("case", why)
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


def _why(judging: Callable[..., Judged | None], *given: Any) -> tuple[Judged | None, str]:
    """What a judge says, and why if that is nothing."""
    with generated_left.counted() as counts:
        try:
            said = judging(*given)
        except Exception as broken:  # noqa: BLE001 an operator may raise anything, anywhere
            said = math.inf, f"judging it ends in {type(broken).__name__}: {broken}"
    return said, generated_left.why(counts)


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
            generated_left.say("case", "a compiler refuses it")
            return []
    except Exception as broken:  # noqa: BLE001 an operator may raise anything, anywhere
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
        stack.enter_context(generated_random.own_generators())
        logging.disable(logging.ERROR)
        stack.callback(logging.disable, logging.NOTSET)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        caches = dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), folder)
        stack.enter_context(mock.patch.dict(os.environ, caches))
        stack.enter_context(torch._inductor.config.patch(compile_threads=1, force_disable_caches=True))
        yield


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
            more = {"job": job, "failed": [_ended(job, said.words)]}
            more["left"] = {("case", generated_left.JUDGED): 1}
            parts.append({**_report(), **dict.fromkeys(("asked", "drawn", "judged"), 1), **more})
    counts = {name: sum(part[name] for part in parts) for name in ("asked", "drawn", "judged")}
    names = ("failed", "refused", "unsure")
    lists = {name: list(itertools.chain(*(part[name] for part in parts))) for name in names}
    batches = [(part["job"].backend, part["job"].number, *part["times"]) for part in parts if part["times"]]
    worst = max((part["worst"] for part in parts), default=0.0)
    told = {"worst": worst, "batches": batches, "left": generated_left.summed(part["left"] for part in parts)}
    return {"family": "compiled", "seed": seed, **counts, **lists, **told}


def _parted(job: Job) -> list[Job]:
    """A batch; of programs that draw numbers each by itself, as none is compiled with others."""
    draws = any(row[0].startswith(generated_compiled_items.DRAWING) for row in rows(job))
    return [replace(job, alone=n) for n in range(len(rows(job)))] if draws else [job]


def _report() -> dict[str, Any]:
    lists: dict[str, Any] = {"failed": [], "refused": [], "unsure": [], "times": []}
    return {"drawn": 0, "judged": 0, "worst": 0.0, **lists}


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
