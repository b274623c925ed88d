"""Layouts of training that nobody named, and checkpoints between them.

In: family, seed, first, count, and a folder for checkpoints (else TMPDIR has them). Out: a JSON line.

A torchrun program. A case is a small model, a type and a layout of torch itself, plain, recomputed or
compiled. Two steps of AdamW are judged beside one rank in float64: losses, each gradient, and what the
weights moved. What may be wrong follows from one rank in the same type. AdamW's epsilon is as large as the
gradients, so no rounding of a small gradient decides a step. In the family `checkpoints` the state goes
between the steps through torch.distributed.checkpoint into another layout, or to one rank alone, and after
them back: no bit of it may change. Repeat a case alone, in tests/acceptance:
`PYTHONPATH=. torchrun --nproc-per-node 2 workloads/generated_layouts.py layouts 0 17 1`.
"""

import contextlib
import functools
import json
import random
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from workloads.gates import Reading, exact, relative_error, unit_roundoff
from workloads.layout_jobs import TYPES, Case, Job, Layout, Tensors
from workloads.ranks import Book, Ranks, joined

PARALLEL = ("ddp", "fsdp2", "tensor", "fsdp2+tensor")
MEMORY = ("plain", "recomputed", "compiled")
FACTOR = 4.0  # beside the worst tensor of one rank in the same type: other orders of sums, other kernels
LOSS = 8.0  # roundings
# How much of a gradient that several backward passes in bfloat16 add to in float32 may be numbers of
# bfloat16. A third of the sums of two such numbers are; all of them are where the sum is rounded.
ROUNDED, COUNTED = 0.9, 64
LATE_S = 120
SHOWN = 3  # failed readings of a case and rank


def draw(family: str, seed: int, number: int, size: int) -> Case:
    """One case for a number of ranks; 24 in turn have every kind, way and type of the first layout."""
    r = random.Random(f"{family} {seed} {number}")
    tensor = r.choice([n for n in range(1, size + 1) if size % n == 0])
    sizes = {
        "width": r.choice((8, 33, 66)),
        "hidden": size * r.choice((5, 16, 67)),
        "vocab": r.choice((64, 131, 257)),
        "blocks": r.choice((1, 2, 3)),
        "batch": r.choice((1, 2, 3)),
        "length": size * r.choice((4, 7)),
    }
    frozen, spare = r.random() < 0.2, family == "layouts" and r.random() < 0.25
    first = _layout(r, PARALLEL[number % 4], MEMORY[number // 4 % 3], tensor, spare)
    other = _layout(r, r.choice((*PARALLEL, "alone")), r.choice(MEMORY), tensor, spare)
    layouts = (first, other) if family == "checkpoints" else (first,)
    # One call cannot update tensors of two meshes. Norms have none, unless the sequence is split.
    meshed = all(layout.options.get("sequence", True) for layout in layouts)
    return Case(
        numbers=seed * 1_000_003 + number,
        sizes=sizes,
        kind=tuple(TYPES)[number // 12 % 2],
        chunks=size * r.choice((1, 2, 3)),
        frozen=frozen,
        spare=spare,
        layouts=layouts,
        late=family == "checkpoints" and r.random() < 0.5,
        adamw=r.choice(("foreach", "fused", "for")) if meshed else "for",
    )


def _layout(r: random.Random, parallel: str, memory: str, tensor: int, spare: bool) -> Layout:
    options: dict[str, Any] = {}
    if parallel == "ddp":
        static = not spare and r.random() < 0.4  # pytorch#97030
        options = {
            "bucket_cap_mb": r.choice((0.001, 0.01, 1, 25)),
            "gradient_as_bucket_view": r.random() < 0.5,
            "static_graph": static,
            "find_unused_parameters": not static and (spare or r.random() < 0.3),
        }
    if "fsdp2" in parallel:
        options = {"reshard_after_forward": r.random() < 0.5, "units": r.choice(("blocks", "root"))}
        options["replicas"] = parallel == "fsdp2" and r.random() < 0.3
    if "tensor" in parallel:
        options |= {"sequence": r.random() < 0.5}
    if parallel == "fsdp2+tensor" or options.get("replicas"):
        options |= {"inner": tensor}
    # The first backward pass of a static graph must sum (pytorch#187732).
    options["sync"] = r.choice(("each", "each at first" if options.get("static_graph") else "last"))
    return Layout(parallel=parallel, memory=memory, options=options)


def farthest(out: torch.Tensor, ref: torch.Tensor) -> float:
    """The largest error of one element, of the root mean square of the reference."""
    usual = ref.double().square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    return float((out.double() - ref.double()).abs().max() / usual)


def beside(what: str, got: Tensors, right: Tensors, eager: Tensors) -> Iterator[Reading]:
    """Each tensor as near to float64 as the worst one of one rank, whole and by element."""
    for way, measure in (("", relative_error), (" elementwise", farthest)):
        bound = FACTOR * max(measure(eager[name], right[name]) for name in right)
        for name in right:
            yield Reading(f"{what} of {name}{way}", measure(got[name], right[name]), bound)


def check(ranks: Ranks, case: Case, saver: Any) -> tuple[Reading, ...]:
    """All readings of one case."""
    torch._dynamo.reset()
    alone = Layout(parallel="alone", memory="plain", options={"sync": "each"})
    right = Job(case, alone, ranks, case.numbers, cast=torch.float64)
    right.model.double()
    start = right.weights()
    wanted = [right.step(number) for number in range(2)]
    epsilon = right.epsilon
    eager = Job(case, alone, ranks, case.numbers, epsilon=epsilon, cast=TYPES[case.kind])
    usual = [eager.step(number) for number in range(2)]
    job, readings = Job(case, case.layouts[0], ranks, case.numbers, epsilon=epsilon), []
    for number in range(2):
        if number and len(case.layouts) > 1:
            job, more = saver(job)
            readings += more
        losses, gradients = job.step(number)
        mine = wanted[number][0][job.group :: job.groups]
        error = float(((losses - mine) / mine).abs().max())
        readings.append(Reading(f"losses {number}", error, LOSS * unit_roundoff(TYPES[case.kind])))
        readings += beside(f"gradient {number}", gradients, wanted[number][1], usual[number][1])
        readings += in_float32(number, gradients, case)
    moved = [{name: one - start[name] for name, one in of.weights().items()} for of in (job, right, eager)]
    readings += beside("movement", *moved)
    if len(case.layouts) > 1:
        readings += saver(job, back=True)[1]
    return tuple(readings)


def refusing(ranks: Ranks, case: Case, saver: Any) -> tuple[Reading, ...]:
    """The readings of a case, of the failed ones the first; what torch raises is a failure of the case."""
    try:
        readings = check(ranks, case, saver)
        failed = [one for one in readings if not one.passed]
        return (*failed[:SHOWN], *(one for one in readings if one.passed))
    except (AssertionError, LookupError, AttributeError, dcp.CheckpointException) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def in_float32(number: int, gradients: Tensors, case: Case) -> Iterator[Reading]:
    """Sums of bfloat16 have bits that bfloat16 has not. An embedding has few sums."""
    for end in (
        "norm.weight",
        "norm.bias",
        "up.weight",
        "up.bias",
        "down.weight",
        "down.bias",
        "head.weight",
    ):
        if case.kind == "bfloat16" and case.chunks > 1:
            some = torch.cat([one.flatten() for name, one in gradients.items() if name.endswith(end)])
            some = some[some != 0]
            if some.numel() >= COUNTED:
                share = float((some == some.bfloat16()).double().mean())
                yield Reading(f"gradient {number} of {end}: share of bfloat16", share, ROUNDED)


class LatePlanner(dcp.DefaultSavePlanner):  # type: ignore[misc]
    """Gives the writer its tensors only when training has gone on."""

    def __init__(self, gone_on: threading.Event) -> None:
        super().__init__()
        self._gone_on = gone_on

    def resolve_data(self, write_item: Any) -> Any:
        """The tensor, after the step that runs beside the checkpoint."""
        if not self._gone_on.wait(LATE_S):
            raise RuntimeError(f"no step ended in {LATE_S} s beside a checkpoint")
        return super().resolve_data(write_item)


@dataclass
class Saver:
    """Takes the state of a case from layout to layout, with one dictionary for loading and saving again."""

    ranks: Ranks
    case: Case
    folder: Path
    group: Any
    holder: dict[str, Any] = field(default_factory=dict)

    def __call__(self, job: Job, *, back: bool = False) -> tuple[Job, tuple[Reading, ...]]:
        """The next job with the state of this one, and whether each bit came with it."""
        before, path = job.state(), self.folder / f"{self.case.numbers}-{back}"
        if not back:
            self.holder = {"job": job}
        self._save(path, job)
        layout = self.case.layouts[0 if back else 1]
        later = Job(self.case, layout, self.ranks, self.case.numbers + 1 + back, epsilon=job.epsilon)
        self.holder = {"job": later}
        dcp.load(self.holder, checkpoint_id=path, no_dist=layout.parallel == "alone")
        after = later.state()
        way = "back" if back else "loaded"
        if missing := before.keys() ^ after.keys():
            return later, (Reading(f"{way}: {sorted(missing)}", float(len(missing)), 0.0),)
        return later, tuple(exact(after[name], one, name=f"{way} {name}") for name, one in before.items())

    def _save(self, path: Path, job: Job) -> None:
        alone, gone_on = job.layout.parallel == "alone", threading.Event()
        writes = not (alone and self.ranks.rank)
        if self.case.late:
            more = {"planner": LatePlanner(gone_on), "process_group": self.group, "no_dist": alone}
            saved = dcp.async_save(self.holder, checkpoint_id=path, **more) if writes else None
            job.step(1)
            gone_on.set()
            if saved is not None:
                saved.result()
        elif writes:
            dcp.save(self.holder, checkpoint_id=path, no_dist=alone)
        dist.barrier()


def main(family: str, seed: int, first: int, count: int, *, kept: str | None = None) -> None:
    """Run the cases; every rank says on which it is, so that a hang has a name."""
    with joined() as ranks, contextlib.ExitStack() as ended:
        if ranks.rank == 0:
            ranks.store.set("folder", ended.enter_context(tempfile.TemporaryDirectory(dir=kept)))
        folder = Path(ranks.store.get("folder").decode())
        group, book = dist.new_group(backend="gloo"), Book(ranks)
        for number in range(first, first + count):
            case = draw(family, seed, number, ranks.size)
            print(f"[rank{ranks.rank}]: at {family} {seed} {number}: {case}", file=sys.stderr, flush=True)
            if ranks.rank == 0:
                print(f"at {family} {seed} {number}: {case}", flush=True)
            run = functools.partial(refusing, ranks, case, Saver(ranks, case, folder, group))
            book.judge(family, f"{seed} {number}: {case}", run)
        merged = book.merged()
    if merged is not None:
        print(json.dumps(merged), flush=True)


if __name__ == "__main__":
    of_family, *numbers = sys.argv[1:5]
    main(of_family, *map(int, numbers), kept=next(iter(sys.argv[5:]), None))
