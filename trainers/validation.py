"""The loss of samples that a job does not learn from, every N steps. In: a job. Out: a number and its line.

The samples are the same each time, and in jobs of every seed and number of ranks. Forward runs alone, so that
no bit of the training changes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import data

if TYPE_CHECKING:
    from layouts.job import Job
    from options import Options
    from phases import Phases
    from plan import Plan
    from presets import Preset
    from progress import Progress

SEED = 1_234_567  # of the samples and their order: no seed that a job is likely to have


class Validation:
    """`found`: the losses so far, with the steps that were done."""

    def __init__(self, options: Options, preset: Preset, plan: Plan, progress: Progress) -> None:
        self.options, self.plan, self.progress = options, plan, progress
        self.found: list[dict[str, Any]] = []
        self.feed = data.Feed(dataclasses.replace(options, data=_path(options), seed=SEED), preset, plan)

    def after(self, done: int, job: Job, phases: Phases) -> None:
        """Measure if it is due after this many steps. A collective call."""
        if done % (self.options.validate_every or 1) and done != self.options.steps:
            return
        world, batches = self.progress.world, range(self.options.validation_batches)
        micros = range(self.plan.accumulate)
        mine = [self.plan.numbers(step, micro, job) for step in batches for micro in micros]
        share, total = self.feed.share(mine, world.device), torch.zeros((), device=world.device)
        for numbers, then in zip(mine, [*mine[1:], mine[0]], strict=True):
            total += job.loss(self.feed.batch(numbers, world.device, then=then)) * share
            phases.alive()
        dist.all_reduce(total)
        loss = float(total) / world.size
        self.found.append({"step": done, "loss": loss if math.isfinite(loss) else None})
        self.progress.validated(done, loss)


def _path(options: Options) -> str:
    if options.validation_data != "corpus":
        return str(options.validation_data)
    import corpus

    return str(corpus.made() / "heldout.jsonl")
