"""Layouts of training that nobody named, and checkpoints between them.

In: family, seed, first, count, and a folder for checkpoints (else TMPDIR has them). Out: a JSON line.

A torchrun program. A case is a small model with drawn conditions, a type, and a layout of torch itself with
drawn options. Each step is judged at the weights that the job has before it: losses and gradients beside
one rank with all data in float64, with one rank in the same type as the yardstick, and, where the same
kernels run, within the roundings of the sum in the type asked for; then what AdamW makes of them, and
whether all ranks have the same bits. AdamW's epsilon is as large as the gradients, so no rounding of a small
one decides a step. In the family `checkpoints` the state goes between the steps through
torch.distributed.checkpoint into another layout, or to one rank alone, and after them back: no bit of it may
change. A case that fails is made smaller for as long as it fails; one that hangs ends the ranks, and is
named. Repeat a case alone, in tests/acceptance, with what is printed:
`PYTHONPATH=. torchrun --nproc-per-node 2 workloads/generated_layouts.py '{"numbers": …}'`.
"""

import contextlib
import itertools
import json
import math
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from workloads.collective_groups import Watch, watched
from workloads.gates import Reading, checksum, exact, relative_error, unit_roundoff
from workloads.generated_layout_cases import draw, fits, given, known, smaller, told
from workloads.layout_checkpoints import LatePlanner, Notes
from workloads.layout_jobs import Job, Step
from workloads.layout_models import LR, TYPES, Adam, Alone, Case, Layout, Model, Tensors
from workloads.layout_options import groups_of
from workloads.layout_pipelines import job_of
from workloads.ranks import Book, Ranks, joined
from workloads.time_limits import scaled

FACTOR = 4.0  # beside the worst tensor of one rank in the same type: other orders of sums, other kernels
LOSS = 8.0  # roundings
SUM = 4.0  # roundings of a sum beside one for each of its terms: a scale, a mean, a cast
ADAM = 64.0  # roundings of what a step moves
# How much of a gradient that several backward passes in bfloat16 add to in float32 may be numbers of
# bfloat16. A third of the sums of two such numbers are; all of them are where the sum is rounded.
ROUNDED, COUNTED = 0.9, 64
MATRICES = re.compile(r"(norm|up|down)\.(weight|bias)$|^head\.weight$")
LIMIT_S = 120.0
SAVED = "saved by rank 0 alone"  # the key of its sums
SHOWN, SHRINKS = 6, 60  # failed readings of a case; tries to make one smaller


def farthest(out: torch.Tensor, ref: torch.Tensor) -> float:
    """The largest error of one element, of the root mean square of the reference."""
    usual = ref.double().square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    return float((out.double() - ref.double()).abs().max() / usual)


def beside(what: str, got: Tensors, right: Tensors, eager: Tensors, slack: Tensors) -> Iterator[Reading]:
    """Each tensor as near to float64 as the worst one of one rank, or as the roundings of its sum allow."""
    some = {name: one for name, one in right.items() if one.any()}
    for way, measure in (("", relative_error), (" elementwise", farthest)):
        bound = FACTOR * max((measure(eager[name], one) for name, one in some.items()), default=0.0)
        for name, one in some.items():
            most = max(bound, measure(one + slack[name], one))
            yield Reading(f"{what} of {name}{way}", measure(got[name], one), most)
    for name in right.keys() - some.keys():
        yield Reading(f"{what} of {name}: not zero", float(got[name].abs().max()), 0.0)


@dataclass
class Chain:
    """A job beside one rank that has all data: every step is judged at the weights before it."""

    ranks: Ranks
    case: Case
    tag: str

    def __post_init__(self) -> None:
        """Two jobs of one rank, and the first gradient, by whose size AdamW's epsilon and the norm go."""
        layout, device = self.case.layouts[0], self.ranks.device
        self.right, self.eager = Alone(self.case, device, torch.float64), Alone(self.case, device)
        weights = {n: one.detach() for n, one in Model(self.case, self.case.numbers).named_parameters()}
        groups = groups_of(layout, self.ranks.size)
        begun = Alone(self.case, device, torch.float64).chunk_by_chunk(weights, 0, layout, groups)
        parts = [part for _, part in begun]
        first = torch.cat([one.flatten() for one in total(parts).values()]) / groups
        self.adam, self.most = Adam(float(first.square().mean().sqrt())), float(first.norm()) / 2

    def readings(self, job: Job, number: int) -> Iterator[Reading]:
        """All of one step."""
        before, layout, groups = job.weights(), job.now(), job.groups
        # Where not the products but the weights are cast.
        self.eager.kind = torch.bfloat16 if self.case.kind == "bfloat16" and not job.autocast else None
        right = list(self.right.chunk_by_chunk(before, number, layout, groups))
        eager = list(self.eager.chunk_by_chunk(before, number, layout, groups))
        step = job.step(number, self.most)
        losses = torch.stack([loss for loss, _ in right][job.group :: groups])
        error = float((step.losses / losses - 1).abs().max())
        yield Reading(f"losses {number}", error, LOSS * rounding(self.case))
        parts = [[part for _, part in of] for of in (right, eager)]
        yield from self._gradients(number, job, step.gradients, parts)
        is_alone = layout.parallel == "alone"
        yield from self._moved(number, before, job.weights(), step, is_alone=is_alone)
        for name, one in job.buffers().items():
            wanted, bound = self.right.buffers[job.group][name], LOSS * rounding(self.case)
            yield Reading(f"buffer {name} {number}", relative_error(one, wanted), bound)

    def _gradients(
        self, number: int, job: Job, got: Tensors, parts: list[list[Tensors]]
    ) -> Iterator[Reading]:
        layout, groups, case = job.layout, job.groups, self.case
        right = {name: one / groups for name, one in total(parts[0]).items()}
        usual = {name: one / groups for name, one in total(parts[1]).items()}
        kinds = {name: summed(case, layout, one.dtype, groups) for name, one in parts[1][0].items()}
        rounded = {
            name: total([{name: p[name].to(kinds[name])} for p in parts[1]], kinds[name])[name] / groups
            for name in usual
        }
        slack = {}
        for name, kind in kinds.items():
            size, limits = sum(part[name].double().abs() for part in parts[1]) / groups, torch.finfo(kind)
            slack[name] = (
                unit_roundoff(kind) * (case.chunks + SUM) * size + case.chunks * limits.tiny * limits.eps
            )
        if "gain" in slack:
            slack["gain"] += unit_roundoff(torch.float32) * SUM * self.right.terms / groups
        yield from beside(f"gradient {number}", got, right, rounded, slack)
        for name, one in usual.items():
            if layout.memory != "compiled" and "tensor" not in layout.parallel:
                allowed = slack[name] + torch.finfo(torch.float32).tiny
                error = float(((got[name].double() - one).abs() / allowed).max())
                yield Reading(
                    f"gradient {number} of {name}: roundings of its sum in {kinds[name]}", error, 1.0
                )
        if case.kind == "bfloat16" and all(kind == torch.float32 for kind in kinds.values()):
            yield from self._in_float32(number, got, layout)

    def _in_float32(self, number: int, gradients: Tensors, layout: Layout) -> Iterator[Reading]:
        """Sums of bfloat16 have bits that bfloat16 has not. An embedding has few sums."""
        split = layout["sequence"] and layout["inner"] != 1
        for name, one in gradients.items():
            some = one[one != 0]
            sums = self.case.chunks > 1 or (split and "norm" in name)
            if sums and MATRICES.search(name) and some.numel() >= COUNTED:
                share = float((some == some.bfloat16()).double().mean())
                yield Reading(f"gradient {number} of {name}: share of bfloat16", share, ROUNDED)

    def _moved(
        self, number: int, before: Tensors, after: Tensors, step: Step, *, is_alone: bool
    ) -> Iterator[Reading]:
        total_norm = float(torch.cat([one.flatten().double() for one in step.gradients.values()]).norm())
        factor = 1.0
        if step.norm is not None:
            lowest = max(unit_roundoff(one.dtype) for one in step.gradients.values())
            error = abs(step.norm - total_norm) / max(total_norm, sys.float_info.min)
            yield Reading(f"norm {number}", error, max(1e-5, 4 * lowest))
            factor = min(1.0, self.most / (step.norm + 1e-6))
        for name, one in after.items():
            gradient = step.gradients.get(name)
            wanted, unit = before[name].double(), unit_roundoff(one.dtype)
            allowed = torch.full_like(wanted, sys.float_info.min)
            if gradient is not None:
                wanted = self.adam.moved(name, before[name], gradient.double() * factor, one)
                allowed = 2 * unit * wanted.abs() + ADAM * unit * LR
            error = float(((one.double() - wanted).abs() / allowed).max())
            yield Reading(f"weight {name} after step {number}", error, 1.0)
        if not is_alone:  # nothing makes ranks equal that train by themselves: kernels may add in any order
            mine = str([checksum(one) for one in after.values()])
            every = self._of_every_rank(f"{self.tag}/{number}", mine)
            yield Reading(f"ranks with other weights after step {number}", float(len(set(every)) - 1), 0.0)

    def _of_every_rank(self, key: str, mine: str) -> list[str]:
        self.ranks.store.set(f"{key}/{self.ranks.rank}", mine)
        return [self.ranks.store.get(f"{key}/{rank}").decode() for rank in range(self.ranks.size)]


def rounding(case: Case) -> float:
    """One rounding of the coarsest type that the products of a case have."""
    return unit_roundoff(torch.bfloat16 if case["mixed"] else TYPES[case.kind])


def total(parts: list[Tensors], kind: torch.dtype = torch.float64) -> Tensors:
    """The sum of each gradient, added up in a type."""
    found = {name: one.to(kind) for name, one in parts[0].items()}
    for part in parts[1:]:
        found = {name: one + part[name].to(kind) for name, one in found.items()}
    return {name: one.double() for name, one in found.items()}


def summed(case: Case, layout: Layout, kind: torch.dtype, groups: int) -> torch.dtype:
    """The type in which a gradient is added up: what was asked for, or what its weight has."""
    several = case.chunks // groups > 1
    # FSDP1 adds up in the type of the products what it does not reduce, and what it does not shard.
    fsdp1 = layout.parallel == "fsdp1" and case.kind == "bfloat16" and several
    local = fsdp1 and (layout["sync"] == "last" or layout["strategy"] == "NO_SHARD")
    if local or kind == torch.bfloat16 or not layout["reduce"]:
        return kind if not local else torch.bfloat16
    return {**TYPES, "float16": torch.float16}[layout["reduce"]]


def check(ranks: Ranks, case: Case, saver: Any, tag: str) -> tuple[Reading, ...]:
    """All readings of one case; what torch raises is a failure of the case."""
    if any(one.memory == "compiled" for one in case.layouts):
        torch._dynamo.reset()  # which also forgets what tensor parallel has learned
    try:
        chain, readings = Chain(ranks, case, tag), list[Reading]()
        job = job_of(case, case.layouts[0], ranks, case.numbers, chain.adam.epsilon)
        for number in range(case.steps):
            if number == 1 and len(case.layouts) > 1:
                job, more = saver(job, chain)
                readings += more
            readings += chain.readings(job, number)
        if len(case.layouts) > 1:
            readings += saver(job, chain, back=True)[1]
    except dcp.CheckpointException as error:
        raise RuntimeError(
            f"of a checkpoint: {sorted({str(one) for one, _ in error.failures.values()})}"
        ) from error
    except (AssertionError, LookupError, AttributeError) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    return tuple(readings)


@dataclass
class Saver:
    """Takes the state of a case from layout to layout, with one dictionary for loading and saving again."""

    ranks: Ranks
    case: Case
    folder: Path
    group: Any
    holder: dict[str, Any] = field(default_factory=dict)

    def __call__(self, job: Job, chain: Chain, *, back: bool = False) -> tuple[Job, tuple[Reading, ...]]:
        """The next job with the state of this one, and whether each bit came with it."""
        before, path = job.state(), self.folder / f"{chain.tag.replace('/', '-')}-{back}"
        if not back:
            self.holder = {"job": job, "notes": Notes(self.case.numbers), "step": 1, "name": "first"}
        self.holder["notes"].kept["position"] += 1
        noted = {**self.holder, "notes": repr(self.holder["notes"].kept)}
        self._save(path, job, chain)
        layout = self.case.layouts[0 if back else 1]
        if job.layout.parallel == "alone" and self.ranks.rank == 0:
            sums = {name: str(checksum(one)) for name, one in before.items()}
            self.ranks.store.set(SAVED, json.dumps(sums))
        later = job_of(self.case, layout, self.ranks, self.case.numbers + 1 + back, job.epsilon)
        self.holder |= {"job": later, "notes": Notes(self.case.numbers + 1), "step": 0, "name": ""}
        given = dict(self.holder)
        dcp.load(self.holder, checkpoint_id=path, no_dist=layout.parallel == "alone")
        after, way = later.state(), "back" if back else "loaded"
        same = [self.holder[name] is given[name] for name in ("job", "notes")]
        found = {**self.holder, "notes": repr(given["notes"].kept)}
        readings = [Reading(f"{way}: objects that were replaced", float(same.count(False)), 0.0)]
        self.holder |= given | {name: found[name] for name in ("step", "name")}
        wrong = [name for name in ("notes", "step", "name") if found[name] != noted[name]]
        readings.append(Reading(f"{way}: other state that is no tensor: {wrong}", float(len(wrong)), 0.0))
        if missing := before.keys() ^ after.keys():
            return later, (*readings, Reading(f"{way}: {sorted(missing)}", float(len(missing)), 0.0))
        if job.layout.parallel == "alone":
            return later, (*readings, *self._as_saved(way, before, after))
        return later, (
            *readings,
            *(exact(after[name], one, name=f"{way} {name}") for name, one in before.items()),
        )

    def _as_saved(self, way: str, before: Tensors, after: Tensors) -> Iterator[Reading]:
        """Whether each bit is that of rank 0, which alone has saved: other ranks trained by themselves."""
        if self.ranks.rank == 0:
            yield from (exact(after[name], one, name=f"{way} {name}") for name, one in before.items())
            return
        saved = json.loads(self.ranks.store.get(SAVED))
        for name, one in after.items():
            same = saved[name] == str(checksum(one))
            yield Reading(f"{way} {name}: other bits than saved", float(not same), 0.0)

    def _save(self, path: Path, job: Job, chain: Chain) -> None:
        alone, gone_on = job.layout.parallel == "alone", threading.Event()
        writes = not (alone and self.ranks.rank)
        if self.case.late:
            more = {"planner": LatePlanner(gone_on), "process_group": self.group, "no_dist": alone}
            saved = dcp.async_save(self.holder, checkpoint_id=path, **more) if writes else None
            job.step(1, chain.most)
            self.holder["notes"].kept["position"] += 1
            gone_on.set()
            if saved is not None:
                saved.result()
        elif writes:
            dcp.save(self.holder, checkpoint_id=path, no_dist=alone)
        dist.barrier()


class Judge:
    """Runs cases one after the other, and all ranks know what became of each."""

    def __init__(self, ranks: Ranks, folder: Path, watch: Watch) -> None:
        self.ranks, self.folder, self.watch = ranks, folder, watch
        self.group, self.serial = dist.new_group(backend="gloo"), itertools.count()

    def __call__(self, case: Case, name: str) -> dict[str, Any]:
        """`{"name", "failures", "margin"}` over all ranks, and which known fault of torch is passed over."""
        tag = f"case {next(self.serial)}"
        self.watch.entry["name"] = name
        self.watch.end = time.monotonic() + scaled(LIMIT_S)
        print(f"[rank{self.ranks.rank}]: at {name}", file=sys.stderr, flush=True)
        ranks = replace(self.ranks, store=dist.PrefixStore(tag, self.ranks.store))
        book = Book(ranks)
        book.judge("case", name, lambda: check(ranks, case, Saver(ranks, case, self.folder, self.group), tag))
        merged = book.merged()
        if merged is not None:
            (found,) = merged["cases"]
            if faults := known(case, found["failures"], ranks.size):
                found |= {"failures": [], "margin": 0.0, "known": faults}
            found["failures"] = found["failures"][:SHOWN]
            ranks.store.set("said", json.dumps(found))
        said: dict[str, Any] = json.loads(ranks.store.get("said"))
        return said


def shrunk(judge: Callable[[Case, str], Mapping[str, Any]], case: Case, size: int) -> Case:
    """The plainest case that still fails. All ranks go the same way."""
    tries, going = iter(range(SHRINKS)), True
    while going:
        going = False
        for other in smaller(case):
            if other == case or not fits(other, size):
                continue
            if next(tries, None) is None:
                return case
            if judge(other, f"made smaller: {told(other)}")["failures"]:
                case, going = other, True
                break
    return case


def main(family: str, seed: int, first: int, count: int, *, kept: str | None = None) -> None:
    """Run the cases; every rank says on which it is, so that a hang has a name."""
    hung = {"name": "none", "failures": [f"did not end in {scaled(LIMIT_S):g} s"], "margin": math.inf}
    report: dict[str, Any] = {"cases": [], "hung": hung}
    only = given(family)
    with joined() as ranks, contextlib.ExitStack() as ended:
        watch = Watch(time.monotonic() + scaled(LIMIT_S), hung)
        ended.enter_context(watched(ranks, watch, report))
        if ranks.rank == 0:
            ranks.store.set("folder", ended.enter_context(tempfile.TemporaryDirectory(dir=kept)))
        judge, small = Judge(ranks, Path(ranks.store.get("folder").decode()), watch), ""
        for number in range(first, first + count):
            case = only or draw(family, seed, number, ranks.size)
            name = f"{family} {seed} {number}: {told(case)}"
            if ranks.rank == 0:
                print(f"at {name}", flush=True)
            found = judge(case, name)
            report["cases"].append(found)
            if found["failures"] and not small:
                print(f"[rank{ranks.rank}]: {found['failures']}", file=sys.stderr, flush=True)
                small = told(shrunk(judge, case, ranks.size))
                found["failures"].insert(0, f"the smallest case: '{small}'")  # the end of a report may be cut
        report["hung"] = None
    if ranks.rank == 0:
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    of_family, *numbers = sys.argv[1:5]
    main(of_family, *map(int, numbers or (0, 0, 1)), kept=next(iter(sys.argv[5:]), None))
