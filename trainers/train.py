"""Train one model end to end: arguments, model, layout, steps, one JSON record on the last line of stdout.

    torchrun --nproc-per-node 2 trainers/train.py --model llama --size tiny

Exit code 0: done. 1: told to stop by SIGTERM, after a checkpoint. 2: arguments. 3: ran, and the numbers are
not sound. 4: out of memory. 5: the machine failed its preflight. 6: a phase hung (phases.py).
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

import backend
import checkpoint
import metrics
import options as cli
import peaks
import plan as plans
import power
import preflight
import presets
import record
import where
import world as place
from errors import RefusedError, UnfitError
from phases import Phases

if TYPE_CHECKING:
    from torch import Tensor

    from options import Options
    from parallel import Job
    from plan import Feed, Plan
    from world import World

OUT_OF_MEMORY, UNFIT = 4, 5


@dataclass(kw_only=True)
class Run:
    """One run: its parts, and what it has done so far."""

    options: Options
    world: World
    plan: Plan
    job: Job
    feed: Feed
    store: checkpoint.Checkpoints | None
    clock: metrics.Clock
    first_step: int = 0
    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    data_wait_s: list[float] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    stopped: bool = False
    joules: float | None = None
    phases: Phases
    begin_s: float
    first_step_s: float | None = None


def main(arguments: list[str]) -> int:
    """The exit code of one run."""
    options = cli.parse(arguments)
    phases = Phases(options.phase_limit_s)
    phases.enter("connect")
    with place.started(options) as world:
        fitness = fit(options, world, phases)
        result = job(options, world, phases, fitness)
    if world.rank == 0:
        line = json.dumps(result, allow_nan=False)
        if options.record:
            options.record.write_text(line + "\n")
        print(line, flush=True)
    return 1 if result["stopped"] else 3 if result["problems"] else 0


def fit(options: Options, world: World, phases: Phases) -> dict[str, Any] | None:
    """The preflight's figures, where one was asked for. Raises UnfitError when no job would mean anything."""
    if not (options.preflight if options.preflight is not None else world.gpu):
        return None
    phases.enter("preflight")
    found = preflight.measure(world, peaks.find(world), fp8=options.precision.startswith("fp8"))
    if found["problems"]:
        raise UnfitError("; ".join(found["problems"]))
    return found


def job(options: Options, world: World, phases: Phases, fitness: dict[str, Any] | None) -> dict[str, Any]:
    """One job from its model to its record, in a process group that may serve others after it."""
    phases.enter("build")
    place.settle(options)
    run = prepare(options, world, phases)
    run.extra["preflight"] = fitness
    run.first_step = resume(run)
    with backend.order(options, world):
        train(run)
        phases.enter("check")
        if options.backend_check:
            run.extra["attention"] = backend.seen(lambda: microbatches(run), world)
        if options.profile and world.gpu:
            run.extra["where"] = where.of(lambda: one_step(run))
    phases.enter("record")
    return record.make(run)


def prepare(options: Options, world: World, phases: Phases) -> Run:
    """Everything a run needs before its first step."""
    begin_s = time.perf_counter()
    preset = presets.find(options.model, options.size, layers=options.layers)
    plan = plans.settle(options, preset, world)
    folder = options.checkpoint
    return Run(
        options=options,
        world=world,
        plan=plan,
        job=plans.layout(options, preset, plan, world),
        feed=plans.Feed(options, preset, plan),
        store=checkpoint.Checkpoints(folder, asynchronous=options.asynchronous) if folder else None,
        clock=metrics.Clock(world),
        phases=phases,
        begin_s=begin_s,
    )


def train(run: Run) -> None:
    """Every step from run.first_step on. The host waits for the device only to write a checkpoint."""
    options, plan, job, device = run.options, run.plan, run.job, run.world.device
    gc.disable()  # a collection in one rank stalls all; collected between steps instead
    run.phases.enter("compile")  # the first step: whatever compiles does so in it
    for step in range(run.first_step, last_step(options)):
        share, loss = 1 / plan.accumulate, torch.zeros((), device=device)
        for micro in range(plan.accumulate):
            begin = time.perf_counter()
            batch = run.feed.batch(plan.numbers(step, micro, job), device)
            run.data_wait_s.append(time.perf_counter() - begin)
            loss += job.microbatch(batch, last=micro == plan.accumulate - 1, share=share) * share
        run.norms.append(job.step(learning_rate(step, plan.lr, options)))
        run.losses.append(loss)
        if step % 50 == 0:
            gc.collect()
        if housekeeping(run, step + 1):
            break
    gc.enable()
    run.world.synchronize()
    end = power.joules(run.world)
    run.joules = end - run.joules if end is not None and run.joules is not None else None


def last_step(options: Options) -> int:
    """How many steps are done when this run ends."""
    return options.until or options.steps


def microbatches(run: Run) -> None:
    """Forward and backward of a step outside the record; no weight changes."""
    for micro in range(run.plan.accumulate):
        batch = run.feed.batch(run.plan.numbers(run.options.steps, micro, run.job), run.world.device)
        last = micro == run.plan.accumulate - 1
        run.job.microbatch(batch, last=last, share=1 / run.plan.accumulate)


def one_step(run: Run) -> None:
    """A step outside the record, for the profiler."""
    microbatches(run)
    run.job.step(0.0)


def housekeeping(run: Run, done: int) -> bool:
    """What is due between two steps: the clock, a checkpoint, the end. True when the run ends here."""
    options, here = run.options, done - run.first_step
    run.phases.alive()
    if here == 1:
        run.world.synchronize()
        run.first_step_s = time.perf_counter() - run.begin_s
    stop, elapsed_s = run.world.stop.agreed(time.perf_counter() - run.begin_s)
    over = options.budget_s is not None and elapsed_s > options.budget_s
    ends = stop or over or done == last_step(options)
    run.stopped = stop and done < last_step(options)
    _time(run, warm=here >= options.warmup and elapsed_s >= options.warmup_s, first=here == 1)
    whole = done == options.steps
    if run.store is not None and (ends or done % options.checkpoint_every == 0):
        full = whole or done % options.full_every == 0
        run.store.save(done, {"job": run.job.state()}, weights=run.job.weights() if full else None)
        if ends:
            run.store.finish()
    return ends


def _time(run: Run, *, warm: bool, first: bool) -> None:
    """Mark the end of a timed step, or the end of the warm-up."""
    if run.clock.marks:
        run.clock.mark()
    elif warm:
        run.phases.enter("timed")
        run.world.synchronize()
        run.joules = power.joules(run.world)
        run.data_wait_s.clear()
        run.clock.mark()
    elif first:
        run.phases.enter("warm-up")


def resume(run: Run) -> int:
    """The step to start from: 0, or that of the newest complete checkpoint, which is then loaded."""
    newest = run.store.newest() if run.store and run.options.resume else None
    if newest is None:
        return 0
    state = {"job": run.job.state()}
    run.store.load(newest, state)
    run.job.restore(state["job"])
    return checkpoint.facts(newest)["step"]


def learning_rate(step: int, peak: float, options: Options) -> float:
    """Linear warm-up, then a cosine to a tenth of the peak at the last step."""
    if step < options.lr_warmup:
        return peak * (step + 1) / options.lr_warmup
    done = (step - options.lr_warmup) / max(1, options.steps - options.lr_warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except RefusedError as error:
        code = 2
        print(f"train.py: {error}", file=sys.stderr)
    except UnfitError as error:
        code = UNFIT
        print(f"train.py: machine unfit: {error}", file=sys.stderr)
    except torch.OutOfMemoryError as error:
        code = OUT_OF_MEMORY
        print(f"train.py: OutOfMemoryError: {error}", file=sys.stderr)
    sys.exit(code)
