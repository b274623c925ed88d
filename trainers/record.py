"""The JSON record of a run: what ran, what it measured, and whether the numbers are sound.

In: a finished Run. Out: a dict of finite numbers, strings and nulls. `problems` is empty if the run is sound.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import initial
import memory
import metrics
import preflight
from layouts import job as layouts

if TYPE_CHECKING:
    from options import Options
    from train import Run

SCHEMA = 1


def make(run: Run) -> dict[str, Any]:
    """The record. A collective call: every rank gets the same one."""
    options, plan, world, job = run.options, run.plan, run.world, run.job
    losses, norms = shared_losses(run), _values(run.norms)
    weights = metrics.digest(job.weights()) if options.digest else None
    mine: dict[str, Any] = {
        "state_bytes": job.state_bytes(),
        "losses": losses,
        "gradient_norms": norms,
        "digest": weights,
        "memory": metrics.memory(world),
    }
    ranks: list[Any] = [None] * world.size
    dist.all_gather_object(ranks, mine)
    timed = performance(run)
    problems = [] if losses or run.first_step >= options.last_step else ["no step was run"]
    skipped = (
        [i for i, norm in enumerate(norms) if not math.isfinite(norm)] if options.not_finite == "skip" else []
    )
    if skipped and len(skipped) == len(norms):
        problems.append("every step was skipped: no gradient norm is finite")
    kept_losses, kept_norms = ([x for i, x in enumerate(of) if i not in skipped] for of in (losses, norms))
    problems += unsound(kept_losses, kept_norms, timed) + fallback(
        options, run.extra.get("attention"), gpu=world.gpu
    )
    return {
        "schema": SCHEMA,
        "model": options.model,
        "size": options.size,
        "options": {
            k: v if isinstance(v, int | float | str | None) else str(v) for k, v in vars(options).items()
        },
        "plan": plan.facts(),
        "world_size": world.size,
        "layout": layouts.facts(options, job, max(other["state_bytes"] for other in ranks)),
        "device": dataclasses.asdict(plan.peak),
        "first_step": run.first_step,
        "last_step": run.first_step + len(run.losses),
        "resumed": run.first_step > 0,
        "stopped": run.stopped,
        "first_step_s": run.first_step_s,
        "phases_s": dict(run.phases.seconds),
        "losses": [_finite(value) for value in losses],
        "gradient_norms": [_finite(value) for value in norms],
        "validation": run.validation.found if run.validation else [],
        "skipped_steps": [run.first_step + step for step in skipped],
        "ranks_agree": all(_same(other, mine) for other in ranks),
        "digest": weights,
        "performance": timed,
        "memory": peak_memory(run, [each["memory"] for each in ranks]) if world.gpu else None,
        "checkpoint_s": run.store.seconds if run.store else [],
        "software": metrics.software(),
        "environment": metrics.environment(),
        "extra": run.extra | (model.statistics() if hasattr(model := run.job.model, "statistics") else {}),
        "problems": problems,
    }


def peak_memory(run: Run, ranks: list[dict[str, float]]) -> dict[str, float]:
    """The peaks of the rank with the most, in GiB, and `least_gib`, which memory.py planned for each."""
    options, size = run.options, run.world.size
    least = memory.need(options, initial.preset(options), ranks=size, micro_batch=run.plan.micro_batch).least
    return {**max(ranks, key=lambda peaks: peaks["allocated_gib"]), "least_gib": least / memory.GIB}


def shared_losses(run: Run) -> list[float]:
    """The mean loss of each step over the data ranks."""
    empty = torch.zeros(0, device=run.world.device)
    stacked = (torch.stack(run.losses) if run.losses else empty).double()
    every = [torch.empty_like(stacked) for _ in range(run.world.size)]
    dist.all_gather(every, stacked)
    means: list[float] = torch.stack(every).mean(0).tolist()
    return means


def _values(scalars: list[torch.Tensor]) -> list[float]:
    return torch.stack(scalars).double().tolist() if scalars else []


def _same(other: dict[str, Any], mine: dict[str, Any]) -> bool:
    keys = ("losses", "gradient_norms", "digest")
    return all(repr(other[key]) == repr(mine[key]) for key in keys)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def performance(run: Run) -> dict[str, Any] | None:
    """Speed, and the MFU under each FLOP convention; None when no step was timed."""
    options, plan, step_s = run.options, run.plan, run.clock.seconds()
    if not step_s:
        return None
    result = metrics.speed(step_s, plan.global_batch * plan.units_per_sample, run.world.size, plan.unit)
    rate = result[f"{plan.unit}_per_s_per_gpu"]
    for name, work in dataclasses.asdict(plan.flops).items():
        result[f"tflops_{name}"] = rate * work / 1e12
    ceiling = plan.peak.fp8 if options.precision.startswith("fp8") else plan.peak.bf16
    for name in ("noncausal", "causal"):
        result[f"mfu_{name}_percent"] = 100 * result[f"tflops_{name}"] / ceiling if ceiling else None
    measured = preflight.ceiling(run.extra.get("preflight"), options.precision)
    result["gemm_ceiling_tflops"] = measured
    for name in ("noncausal", "causal"):
        rate_tflops = result[f"tflops_{name}"]
        result[f"mfu_{name}_of_gemm_percent"] = 100 * rate_tflops / measured if measured else None
    result["data_wait_percent"] = 100 * sum(run.data_wait_s) / max(sum(step_s), 1e-9)
    result["unit"] = plan.unit
    if isinstance(run.joules, str):
        result["energy_unread"] = run.joules
    elif run.joules is not None:
        mean = run.joules / sum(step_s)
        result |= {"power_w": mean, f"joules_per_{plan.unit.removesuffix('s')}": mean / rate}
    if options.price_per_hour:
        result |= metrics.cost(rate, options.price_per_hour)
    return result


def fallback(options: Options, attention: dict[str, Any] | None, *, gpu: bool) -> list[str]:
    """The problem that another attention backend ran than asked for, or no fused one below 32 bits."""
    if attention is None or not gpu:
        return []
    ran, named = attention["backend"], options.attention
    if named == "math" and ran is None and not attention["kernels"]:
        return []  # the compiler turns plain attention into products, and then nothing has its name
    if named not in {"auto", ran}:
        return [
            f"--attention {named} was asked for and {ran} ran: {attention['kernels'] or 'no kernel seen'}"
        ]
    if named == "auto" and options.precision != "fp32" and ran in {None, "math"}:
        return [f"no fused attention ran: {attention['operators'] or 'no operator seen'}"]
    return []


def unsound(losses: list[float], norms: list[float], timed: dict[str, Any] | None) -> list[str]:
    """Reasons why the record is not a result."""
    found = []
    if not all(map(math.isfinite, losses)):
        found.append("a loss is not finite")
    if not all(map(math.isfinite, norms)):
        found.append("a gradient norm is not finite")
    if 0.0 in norms:  # a compiler may lose a gradient, and such steps are fast
        found.append("a gradient norm is zero: that step learned nothing")
    shares = [timed[key] for key in ("mfu_noncausal_percent", "mfu_causal_percent")] if timed else []
    if any(share is not None and share > 100 for share in shares):
        found.append(f"more than 100 % of the device's peak: {shares}")
    return found
