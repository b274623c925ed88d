"""The memory of one rank of eight, in each layout of the trainers. In: names -> flags of trainers/train.py.
Out: bytes.

The other seven ranks do not exist: torch's fake group leaves what they would send as it is. So the numbers of
a step mean nothing, while every allocation is made as in a real job. It runs on the processor of any machine:
what a layout holds is decided by torch's Python, and the profiler counts each allocation of a processor, so a
repeat gives the same bytes.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from workloads import peaks, trainer_jobs, trainers
from workloads.time_limits import scaled

sys.path.insert(0, str(trainers.FOLDER))

import initial
import memory
import options as cli
import train
from phases import Phases
from world import Stop, World, seed_process

RANKS, STEPS = 8, 2  # the first step makes the moments


def check(jobs: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The release of torch, and of each job {"peak", "left", "least"} or {"error": text}.

    The peak is the most that two steps hold, what is left stays after the job, and the least is what
    trainers/memory.py plans.
    """
    with (
        one_of_many() as world,
        mock.patch("torch.compile", functools.partial(torch.compile, backend="aot_eager")),
    ):
        found = {
            name: trainer_jobs.apart(functools.partial(held_by, flags, world), world)
            for name, flags in jobs.items()
        }
    return {"torch": torch.__version__, "jobs": found}


@contextlib.contextmanager
def one_of_many() -> Iterator[World]:
    """The first of `RANKS` ranks, of which the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        with mock.patch("signal.signal"):
            yield World(0, RANKS, torch.device("cpu"), Stop())
    finally:
        dist.destroy_process_group()


def held_by(flags: Sequence[str], world: World) -> dict[str, float]:
    """The memory of one job, from its build to its end."""
    options = cli.parse(list(flags))
    seed_process(options)
    with peaks.watched() as held:
        samples = _run(options, world)
    least = memory.need(options, initial.preset(options), ranks=world.size, micro_batch=samples).least
    return {"peak": held.peak, "left": held.left, "least": least}


def _run(options: cli.Options, world: World) -> int:
    phases = Phases(scaled(options.phase_limit_s))
    run = train.build(options, world, phases)
    for step in range(STEPS):
        train.accumulate(run, step)
        run.job.step(run.plan.lr)
    return run.plan.micro_batch
