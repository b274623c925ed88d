"""Train one model end to end: arguments, model, layout, steps, one JSON record on the last line of stdout.

    torchrun --nproc-per-node 2 trainers/train.py --model llama --size tiny

Exit code 0: done. 1: told to stop by SIGTERM, after a checkpoint. 2: arguments. 3: ran, and the numbers are
not sound.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import checkpoint
import metrics
import options as cli
import plan as plans
import power
import presets
import record
import where
import world as place
from errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from options import Options
    from parallel import Job
    from plan import Feed, Plan
    from world import World

OUT_OF_MEMORY = 4
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


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
    start_s: float
    first_step_s: float | None = None


def main(arguments: list[str]) -> int:
    """The exit code of one run."""
    start_s = time.perf_counter()
    options = cli.parse(arguments)
    with place.started(options) as world:
        run = prepare(options, world, start_s)
        run.first_step = resume(run)
        with attention(options, world):
            train(run)
            if options.profile and world.gpu:
                run.extra["where"] = where.of(lambda: one_step(run))
        result = record.make(run)
    if world.rank == 0:
        line = json.dumps(result, allow_nan=False)
        if options.record:
            options.record.write_text(line + "\n")
        print(line, flush=True)
    return 1 if run.stopped else 3 if result["problems"] else 0


def prepare(options: Options, world: World, start_s: float) -> Run:
    """Everything a run needs before its first step."""
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
        start_s=start_s,
    )


def train(run: Run) -> None:
    """Every step from run.first_step on. The host waits for the device only to write a checkpoint."""
    options, plan, job, device = run.options, run.plan, run.job, run.world.device
    gc.disable()  # a collection in one rank stalls all; collected between steps instead
    for step in range(run.first_step, options.steps):
        if step == run.first_step + options.warmup:
            run.world.synchronize()
            run.joules = power.joules(run.world)
            run.clock.mark()
        share, loss = 1 / plan.accumulate, torch.zeros((), device=device)
        for micro in range(plan.accumulate):
            begin = time.perf_counter()
            batch = run.feed.batch(plan.numbers(step, micro, job), device)
            run.data_wait_s.append(time.perf_counter() - begin)
            loss += job.microbatch(batch, last=micro == plan.accumulate - 1, share=share) * share
        run.norms.append(job.step(learning_rate(step, plan.lr, options)))
        run.losses.append(loss)
        if run.clock.marks:
            run.clock.mark()
        if step == run.first_step:
            run.world.synchronize()
            run.first_step_s = time.perf_counter() - run.start_s
        if step % 50 == 0:
            gc.collect()
        if housekeeping(run, step + 1):
            break
    gc.enable()
    run.world.synchronize()
    end = power.joules(run.world)
    run.joules = end - run.joules if end is not None and run.joules is not None else None


def one_step(run: Run) -> None:
    """A step outside the record, for the profiler."""
    for micro in range(run.plan.accumulate):
        batch = run.feed.batch(run.plan.numbers(run.options.steps, micro, run.job), run.world.device)
        last = micro == run.plan.accumulate - 1
        run.job.microbatch(batch, last=last, share=1 / run.plan.accumulate)
    run.job.step(0.0)


def housekeeping(run: Run, done: int) -> bool:
    """Write the checkpoint that is due. True when a rank was told to stop: then one is always written."""
    options, last = run.options, done == run.options.steps
    run.stopped = not last and run.world.stop.agreed()
    due = run.stopped or last or done % options.checkpoint_every == 0
    if run.store is not None and due:
        full = last or done % options.full_every == 0
        run.store.save(done, {"job": run.job.state()}, weights=run.job.weights() if full else None)
        if run.stopped or last:
            run.store.finish()
    return run.stopped


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


@contextlib.contextmanager
def attention(options: Options, world: World) -> Iterator[None]:
    """The order in which attention backends are tried. torch prefers its slower flash kernels on Hopper by
    default.
    """
    if not world.gpu or (options.attention == "auto" and torch.version.hip):
        yield
        return
    order = [BACKENDS[options.attention]] if options.attention != "auto" else list(BACKENDS.values())
    with sdpa_kernel(order, set_priority=True):
        yield


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except RefusedError as error:
        code = 2
        print(f"train.py: {error}", file=sys.stderr)
    except torch.OutOfMemoryError as error:
        code = OUT_OF_MEMORY
        print(f"train.py: OutOfMemoryError: {error}", file=sys.stderr)
    sys.exit(code)
