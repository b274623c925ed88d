"""Lines of progress while a job runs, and the watch for a loss or gradient norm that is not finite.

In: the loss and the norm of each step, on the device. Out: every N steps a line on rank 0's stdout, one of
JSON in a file, and its numbers in what trackers.py knows. The host never waits: figures are copied behind the
step, and are said when they are there.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

import trackers

if TYPE_CHECKING:
    from torch import Tensor

    from options import Options
    from phases import Phases
    from plan import Plan
    from world import World


class _Sent(NamedTuple):
    """Loss and norm of a step on their way to the host; `there`: an event, None where they are there."""

    done: int
    lr: float
    figures: Tensor
    there: Any


class Progress:
    """`bad`: the first step whose loss or gradient norm is not finite, as far as the host knows."""

    def __init__(self, options: Options, plan: Plan, world: World, phases: Phases) -> None:
        self.options, self.plan, self.world, self.phases = options, plan, world, phases
        self.sent: deque[_Sent] = deque()
        self.bad: int | None = None
        self.said = (0, time.perf_counter())  # steps done, and when, at the last line
        trackers.require(options)
        self.trackers = trackers.Trackers(options, 0)

    def begin(self, first_step: int) -> None:
        """The clock of the first line starts."""
        self.said = (first_step, time.perf_counter())
        self.trackers = trackers.Trackers(self.options, first_step)

    def end(self) -> None:
        """Say what was sent, and close what keeps the lines."""
        self.look(wait=True)
        self.trackers.close()

    def step(self, done: int, loss: Tensor, norm: Tensor, lr: float) -> None:
        """A step was started on the device; `done` of the job's steps are then done. A collective call."""
        figures = torch.stack([loss.detach().float(), norm.detach().float()])
        if self._due(done):
            dist.all_reduce(figures)  # a line has the mean loss of all ranks; their norms are equal
            figures /= self.world.size
        there = None
        if self.world.gpu:
            figures = torch.empty(2, pin_memory=True).copy_(figures, non_blocking=True)
            there = torch.cuda.Event()
            there.record()
        self.sent.append(_Sent(done, lr, figures, there))
        self.look(wait=False)

    def look(self, *, wait: bool) -> None:
        """Take what is there; with `wait`, all that was sent."""
        while self.sent and (wait or self.sent[0].there is None or self.sent[0].there.query()):
            step = self.sent.popleft()
            if step.there is not None:
                step.there.synchronize()
            loss, norm = step.figures.tolist()
            finite = math.isfinite(loss) and math.isfinite(norm)
            if not finite:
                self.bad = step.done - 1 if self.bad is None else self.bad
                what = "skipped" if self.options.not_finite == "skip" else "not finite"
                self.phases.say(f"step {step.done - 1}: {what}, loss {loss:g}, gradient norm {norm:g}")
            elif self._due(step.done):
                self._say(step, loss, norm)

    def _due(self, done: int) -> bool:
        return self.options.log_every > 0 and done % self.options.log_every == 0

    def _say(self, step: _Sent, loss: float, norm: float) -> None:
        (before, since), now = self.said, time.perf_counter()
        self.said = (step.done, now)
        if self.world.rank:
            return
        plan, seconds = self.plan, (now - since) / max(1, step.done - before)
        rate = plan.global_batch * plan.units_per_sample / seconds / self.world.size
        peak = plan.peak.fp8 if self.options.precision.startswith("fp8") else plan.peak.bf16
        gib = torch.cuda.max_memory_allocated(self.world.device) / 2**30 if self.world.gpu else None
        facts: dict[str, Any] = {
            "step": step.done,
            "loss": loss,
            "gradient_norm": norm,
            "lr": step.lr,
            f"{plan.unit}_per_s_per_gpu": rate,
            "mfu_causal_percent": rate * plan.flops.causal / 1e10 / peak if peak else None,
            "memory_gib": gib,
            "left_s": seconds * (self.options.last_step - step.done),
        }
        share = facts["mfu_causal_percent"]
        self.phases.say(
            f"step {step.done}/{self.options.last_step}  loss {loss:.4f}  norm {norm:.3f}  "
            f"lr {step.lr:.2e}  {rate:,.0f} {plan.unit}/s/GPU"
            + (f"  MFU {share:.1f} % causal" if share is not None else "")
            + (f"  {gib:.1f} GiB" if gib is not None else "")
            + f"  {facts['left_s']:,.0f} s left"
        )
        self._write(facts)

    def validated(self, done: int, loss: float) -> None:
        """The loss of the validation data after this many steps."""
        self.look(wait=True)  # the lines of the steps before come first
        if self.world.rank:
            return
        self.phases.say(f"step {done}/{self.options.last_step}  validation loss {loss:.4f}")
        self._write({"step": done, "validation_loss": loss if math.isfinite(loss) else None})

    def _write(self, facts: dict[str, Any]) -> None:
        if self.options.progress is not None:
            with self.options.progress.open("a") as file:
                file.write(json.dumps(facts) + "\n")
        self.trackers.write(facts)
