"""A torchrun program: one step of a job, and what reached AdamW; or a whole job. In: JSON, names -> flags.
Out: a JSON line.

The flags are those of trainers/train.py; all layouts have the same model, samples and seed. After one step
the first moment is a tenth of the clipped gradient: so each weight's gradient is read behind everything that
makes, sums, shards, scales and clips it. The line is `{"layouts": {name: {weight: relative error}}}`, with
the error of the gradients' norm as `norm`. A job of more steps runs them all (wide_curve). A job that raises
has `{"error": text}`.

The reference is a plain Llama (plain_llama) on the samples of all ranks.
"""

import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from workloads import plain_llama, trainer_jobs, trainers, wide_curve
from workloads.plain_llama import Tensors

sys.path.insert(0, str(trainers.FOLDER))

import attention_backend
import options as cli
import train
from layouts import flat
from phases import Phases
from world import World, seed_process

LEAST_STEPS = 2  # of a schedule; one of them runs
FIRST = 1 - 0.9  # of the gradient, in the first moment after one step (layouts/optimizer.py)
NORM = "norm"


def main(arguments: list[str]) -> None:
    """Run one step of every layout, and the longer jobs."""
    with trainer_jobs.joined(arguments[0]) as (jobs, world, phases):
        courses = {name: job for name, job in jobs.items() if job.steps > LEAST_STEPS}
        steps = {name: job for name, job in jobs.items() if name not in courses}
        errors = each(steps, reference, errors_of, world, phases)
        errors |= each(courses, wide_curve.plain, wide_curve.apart_of, world, phases)
    if world.rank == 0:
        print(json.dumps({"layouts": errors}), flush=True)


def each(
    jobs: Mapping[str, cli.Options],
    refer: Callable[[cli.Options, torch.device], Any],
    compare: Callable[[cli.Options, World, Phases, Any], dict[str, Any]],
    world: World,
    phases: Phases,
) -> dict[str, Any]:
    """Compare jobs of one model, with the same samples and seed, with one reference."""
    if not jobs:
        return {}
    wanted = refer(next(iter(jobs.values())), world.device)
    return {
        name: trainer_jobs.apart(functools.partial(compare, options, world, phases, wanted), world)
        for name, options in jobs.items()
    }


def reference(options: cli.Options, device: torch.device) -> Tensors:
    """The gradient of the mean loss over all samples of the first step, for each weight."""
    weights = plain_llama.start(options, device, plain_llama.exact(device))
    plain_llama.backward(options, weights, 0)
    return {name: weight.grad for name, weight in weights.items() if weight.grad is not None}


def errors_of(options: cli.Options, world: World, phases: Phases, wanted: Tensors) -> dict[str, float]:
    """The relative error of each weight's gradient."""
    seed_process(options)
    run = train.build(options, world, phases)
    with attention_backend.order(options, world):
        train.accumulate(run, 0)
    total = run.job.step(run.plan.lr)
    whole = torch.stack([length(one) for one in wanted.values()]).norm()
    found = {NORM: float((total - whole).abs() / whole)}
    # Clipped by the norm that a right step has: what the job did to its gradients stays in them.
    scale = float((options.clip / (whole + 1e-6)).clamp(max=1.0)) * FIRST
    for name, moment in first_moments(run.job):
        error = moment.to(wanted[name].dtype) / scale - wanted[name]
        found[name] = float(length(error) / length(wanted[name]))
    if missing := wanted.keys() - found.keys():
        raise AssertionError(f"no moment of {sorted(missing)}")
    return found


def length(x: torch.Tensor) -> torch.Tensor:
    """Euclidean, summed in float64."""
    return torch.linalg.vector_norm(x, dtype=torch.float64)


def first_moments(job: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Each weight's first moment, whole, on every rank: all ranks take them together."""
    if not hasattr(job, "units"):
        for name, weight in job.model.named_parameters():
            moment = job.optimizer.state[weight]["exp_avg"]
            yield name, moment.full_tensor() if hasattr(moment, "full_tensor") else moment
        return
    for unit in job.units:
        whole = torch.empty_like(unit.weights, dtype=unit.mean.dtype)
        dist.all_gather_into_tensor(whole, unit.mean, group=unit.data.get_group())
        for name, (weight, offset) in unit.offsets.items():
            yield name, flat.view(whole, weight, offset)


if __name__ == "__main__":
    main(sys.argv[1:])
