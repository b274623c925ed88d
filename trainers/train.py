"""Train one model end to end, and print one JSON record as the last line of stdout.

    torchrun --nproc-per-node 2 trainers/train.py --model llama --size tiny

Read it from top to bottom: configuration, one run from its arguments to its record, one job from its model to
its record, the training loop, and what happens between two steps. Every rank runs this same program.

Exit code 0: done. 1: stopped by SIGTERM, after a checkpoint. 2: these arguments cannot run. 3: ran, but
`problems` in the record says why its numbers do not count. 4: out of memory. 5: the machine failed its
preflight. 6: a phase hung.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

import attention_backend
import checkpoint
import config
import data
import energy
import initial
import kernel_times
import metrics
import peaks
import preflight
import presets
import progress
import record
import validation
from errors import RefusedError, UnfitError, said
from layouts import job as layouts
from options import parse
from phases import Phases
from plan import settle
from world import joined_ranks, seed_process

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from layouts.job import Job
    from options import Options
    from plan import Plan
    from world import World

# ---- Configuration ---------------------------------------------------------------------------------------
# options.py has every flag with its default, presets.py the shape, batch and peak learning rate of each model
# and size. The optimizer is AdamW with betas 0.9 and 0.95 (layouts/optimizer.py). The rest of the loop's
# constants are here.

LR_FLOOR = 0.1  # of the peak learning rate, where the cosine ends (arXiv 2302.13971, section 2.3)
GC_EVERY = 50  # steps between two garbage collections, as in pytorch/torchtitan
LEAST_TIMED = 3  # steps of a run that --timed-s ends: fewer have no median

STOPPED, REFUSED, UNSOUND, OUT_OF_MEMORY, UNFIT = 1, 2, 3, 4, 5  # exit codes; phases.HUNG is 6


def learning_rate(step: int, peak: float, options: Options) -> float:
    """Linear warm-up to the peak, then a cosine to LR_FLOOR x peak (arXiv 1608.03983).

    The cosine ends behind the last step, as in transformers and torchtitan: the last step is a step above it.

    AdamW's moments are poor estimates in the first steps, and large steps by them can diverge (arXiv
    1908.03265): hence the warm-up. The schedule follows --steps, not --until, so a job in several segments
    has the schedule of the whole.
    """
    if step < options.lr_warmup:
        return peak * (step + 1) / options.lr_warmup
    done = (step - options.lr_warmup) / max(1, options.steps - options.lr_warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))  # from 1 to 0
    return peak * (LR_FLOOR + (1 - LR_FLOOR) * cosine)


# ---- One run: arguments, ranks, preflight, job, record ---------------------------------------------------


def main(arguments: list[str]) -> int:
    """Run one job; its exit code."""
    options = parse(arguments)
    initial.preset(options)  # refuses an unknown model before any rank waits for another
    if options.size != initial.BROUGHT:
        presets.check_length(options.model, options.size, options.seq_len)
    phases = Phases(options.phase_limit_s)
    phases.enter("connect")
    with joined_ranks(options) as world:
        fitness = fit(options, world, phases)
        result = job(options, world, phases, fitness)
    if world.rank == 0:
        line = json.dumps(result, allow_nan=False)
        if options.record:
            options.record.write_text(line + "\n")
        print(line, flush=True)
    return STOPPED if result["stopped"] else UNSOUND if result["problems"] else 0


def fit(options: Options, world: World, phases: Phases) -> dict[str, Any] | None:
    """The figures of the preflight, if there is one. Raises UnfitError if the machine is unfit."""
    if not (options.preflight if options.preflight is not None else world.gpu):
        return None
    phases.enter("preflight")
    found = preflight.measure(world, peaks.find(world), fp8=options.precision.startswith("fp8"))
    if found["problems"]:
        raise UnfitError("; ".join(found["problems"]))
    return found


# ---- One job: model, layout, data, steps, record ---------------------------------------------------------


@dataclass(kw_only=True)
class Run:
    """One job: its parts, and what it has done so far.

    Losses and norms stay tensors on the device until the record is made: reading one as a number would make
    the host wait for the device at every step.
    """

    options: Options
    world: World
    plan: Plan
    job: Job
    feed: data.Feed
    store: checkpoint.Checkpoints | None
    clock: metrics.Clock
    progress: progress.Progress
    validation: validation.Validation | None
    first_step: int = 0
    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    data_wait_s: list[float] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    stopped: bool = False
    joules: float | str | None = None  # or why they are not readable
    phases: Phases
    begin_s: float
    first_step_s: float | None = None
    compiled_at_s: float = 0.0  # seconds after begin_s, by the slowest rank: the ranks agree on them
    timed_at_s: float = 0.0


def job(options: Options, world: World, phases: Phases, fitness: dict[str, Any] | None) -> dict[str, Any]:
    """One job from its model to its record. The process group may run more jobs after it."""
    phases.enter("build")
    seed_process(options)
    run = build(options, world, phases)
    run.extra["preflight"] = fitness
    run.extra["data_digest"] = run.feed.digest
    run.first_step = resume(run)
    with attention_backend.order(options, world):
        train(run)
        phases.enter("check")
        if options.backend_check:
            run.extra["attention"] = attention_backend.seen(lambda: unrecorded_microbatches(run), world)
        if options.profile and world.gpu:
            run.extra["where"] = kernel_times.measure(lambda: unrecorded_step(run))
    phases.enter("record")
    return record.make(run)


def build(options: Options, world: World, phases: Phases) -> Run:
    """Everything that a run needs before its first step."""
    begin_s = time.perf_counter()
    # The shape of the model, and how a step's batch is divided over ranks and microbatches.
    preset = initial.preset(options)
    plan = settle(options, preset, world)
    folder = options.checkpoint
    return Run(
        options=options,
        world=world,
        plan=plan,
        # The model is made without memory, gets the same weights on any layout, and is then spread over the
        # ranks.
        job=layouts.create(options, preset, plan, world),
        feed=(feed := data.Feed(options, preset, plan)),
        store=store_in(folder, options, preset, plan, feed.digest) if folder else None,
        clock=metrics.Clock(world),
        progress=(said := progress.Progress(options, plan, world, phases)),
        validation=validation.Validation(options, preset, plan, said) if options.validate_every else None,
        phases=phases,
        begin_s=begin_s,
    )


def store_in(
    folder: Path, options: Options, preset: presets.Preset, plan: Plan, digest: str | None
) -> checkpoint.Checkpoints:
    """Checkpoints in this folder, beside the model's configuration and the run's options."""
    return checkpoint.Checkpoints(
        folder,
        asynchronous=options.asynchronous,
        kept_as=layouts.kept_as(options, preset),
        beside={
            initial.SHAPE: initial.shape(options.model, preset.config),
            config.NAME: config.text(options, plan.facts()),
        },
        of=plan.identity(options, digest),
    )


def resume(run: Run) -> int:
    """The first step of this run: 0, or the step of the newest complete checkpoint, which is then loaded."""
    newest = run.store.newest() if run.store and run.options.resume else None
    if run.store is None or newest is None:
        return 0
    state = {"job": run.job.state()}
    run.store.load(newest, state, changed=run.options.changed)
    run.job.restore(state["job"])
    step: int = checkpoint.facts(newest)["step"]
    run.phases.say(f"resumed from step {step} ({newest})")
    if step >= run.options.last_step:
        run.phases.say(f"nothing to do: all {run.options.last_step} steps were done before")
    return step


# ---- The training loop -----------------------------------------------------------------------------------


def train(run: Run) -> None:
    """Every step from run.first_step to the last.

    The host only starts work on the device and does not wait for it, so the device always has the next
    kernels in its queue (https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution). It
    waits after the first step, for a checkpoint, and at the two ends of what is timed.
    """
    # Left alone, Python collects garbage at another step on each rank. All ranks wait for the slowest one at
    # every collective, so each would also pay for the others' collections. Instead all collect between the
    # same two steps.
    gc.disable()
    run.progress.begin(run.first_step)
    run.phases.enter("compile")  # torch.compile, Triton and the libraries compile during the first step
    for step in range(run.first_step, run.options.last_step):
        lr = learning_rate(step, run.plan.lr, run.options)
        run.losses.append(accumulate(run, step))
        run.norms.append(run.job.step(lr))
        run.progress.step(step + 1, run.losses[-1], run.norms[-1], lr)
        if step % GC_EVERY == 0:
            gc.collect(1)
        if between_steps(run, step + 1):
            break
    gc.enable()
    run.progress.end()
    run.world.synchronize()
    run.joules = energy.used(run.joules, energy.joules(run.world))


def accumulate(run: Run, step: int) -> Tensor:
    """Forward and backward of all microbatches of a step. Returns this rank's mean loss, on the device.

    A rank's share of a step's batch may need more memory than the device has. So it runs as several
    microbatches, whose gradients add up. The loss of a microbatch is a mean over its positions; multiplied by
    its share, the sum of gradients is that of the mean over the whole batch, as if it had run at once. The
    layouts average over the data ranks in the same way.
    """
    plan, device = run.plan, run.world.device
    mine = [plan.numbers(step, micro, run.job) for micro in range(plan.accumulate)]
    share, loss = run.feed.share(mine, device), torch.zeros((), device=device)
    for micro, numbers in enumerate(mine):
        begin = time.perf_counter()
        then = plan.numbers(*plan.following(step, micro), run.job)
        batch = run.feed.batch(numbers, device, then=then)
        run.data_wait_s.append(time.perf_counter() - begin)
        # Only the last microbatch reduces gradients over the ranks: once a step, whatever the number of
        # microbatches.
        last = micro == plan.accumulate - 1
        loss += run.job.microbatch(batch, last=last, share=share) * share
    return loss


def unrecorded_microbatches(run: Run) -> None:
    """Forward and backward of a step that is not in the record; no weight changes."""
    for micro in range(run.plan.accumulate):
        batch = run.feed.batch(run.plan.numbers(run.options.steps, micro, run.job), run.world.device)
        last = micro == run.plan.accumulate - 1
        run.job.microbatch(batch, last=last, share=1 / run.plan.accumulate)


def unrecorded_step(run: Run) -> None:
    """A whole step that is not in the record, for the profiler; a learning rate of 0 keeps the weights."""
    unrecorded_microbatches(run)
    run.job.step(0.0)


# ---- Between two steps: the clock, a checkpoint, the end -------------------------------------------------


def between_steps(run: Run, done: int) -> bool:
    """What is due after `done` steps of the job. True when the run ends here."""
    options, here = run.options, done - run.first_step
    run.phases.alive()
    if here == 1:
        run.world.synchronize()
        run.first_step_s = time.perf_counter() - run.begin_s
    # Ranks decide together: one that leaves the loop alone would leave the others waiting in their next
    # collective.
    due = run.store is not None and done % options.checkpoint_every == 0
    run.progress.look(wait=due or done == options.last_step)  # what is saved must be finite
    bad = options.not_finite == "stop" and run.progress.bad is not None
    stop, bad, elapsed_s = run.world.stop.agreed(time.perf_counter() - run.begin_s, bad=bad)
    ends = stop or bad or over(run, elapsed_s) or done == options.last_step
    run.stopped = stop and not bad and done < options.last_step
    if here == 1 and options.timed_s is not None:
        run.compiled_at_s = elapsed_s
    warm = here >= options.warmup and elapsed_s - run.compiled_at_s >= options.warmup_s
    if warm and not run.clock.marks:
        run.timed_at_s = elapsed_s
    mark_time(run, warm=warm, first=here == 1)
    if not bad:
        save(run, done, ends=ends)
        if run.validation:
            run.validation.after(done, run.job, run.phases)
    return ends


def over(run: Run, elapsed_s: float) -> bool:
    """Whether the time of --budget-s, or that of the timed steps, is used up."""
    budget_s, timed_s = run.options.budget_s, run.options.timed_s
    if budget_s is not None and elapsed_s > budget_s:
        return True
    enough = len(run.clock.marks) >= LEAST_TIMED  # the mark of this step is not there yet
    return timed_s is not None and enough and elapsed_s - run.timed_at_s >= timed_s


def mark_time(run: Run, *, warm: bool, first: bool) -> None:
    """Mark the end of a timed step, or of the warm-up.

    The steps of the warm-up compile, and the device is not hot yet.
    """
    if run.clock.marks:
        run.clock.mark()
    elif warm:
        run.phases.enter("timed")
        run.world.synchronize()
        run.joules = energy.joules(run.world)
        run.data_wait_s.clear()
        run.clock.mark()
    elif first:
        run.phases.enter("warm-up")


def save(run: Run, done: int, *, ends: bool) -> None:
    """Write a checkpoint if one is due.

    Some also hold whole weights; the last one of a run is complete on return.
    """
    options = run.options
    if run.store is None or not (ends or done % options.checkpoint_every == 0):
        return
    full = done == options.steps or done % options.full_every == 0
    run.store.save(done, {"job": run.job.state()}, full=run.job if full else None)
    if ends:
        run.store.finish()


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except RefusedError as error:
        code = said(f"train.py: {error}", REFUSED)
    except UnfitError as error:
        code = said(f"train.py: machine unfit: {error}", UNFIT)
    except torch.OutOfMemoryError as error:
        code = said(f"train.py: OutOfMemoryError: {error}", OUT_OF_MEMORY)
    sys.exit(code)
