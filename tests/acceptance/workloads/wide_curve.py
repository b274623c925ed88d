"""Thirty steps of a job in bfloat16 beside a plain model with a plain AdamW. In: options. Out: how far apart.

One step's gradients do not show what an optimizer keeps from step to step. Here a plain Llama (plain_llama)
learns the same samples from the same weights on the same device, in float32, or float64 on a CPU, with AdamW,
clipping and the schedule written out. Compared are the loss and the gradients' norm of each step, and the way
of each weight over all steps.

As a program it measures the band (wide_job.APART): torchrun --nproc-per-node N wide_curve.py SEEDS.
"""

import argparse
import dataclasses
import functools
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from workloads import device, plain_llama, trainer_jobs, trainers, wide_job

sys.path.insert(0, str(trainers.FOLDER))

import attention_backend
import initial
import options as cli
import record
import train
from layouts import prepare
from phases import Phases
from world import World, seed_process


@dataclass(frozen=True, kw_only=True)
class Course:
    """What one training did: the loss and the gradients' norm of each step, and the weights at its end."""

    losses: list[float]
    norms: list[float]
    weights: plain_llama.Tensors


def plain(options: cli.Options, device: torch.device, *, low: bool = False) -> Course:
    """The reference; `low`: products in bfloat16."""
    kind = torch.float32 if low else plain_llama.exact(device)
    weights = plain_llama.start(options, device, kind)
    moments = {name: (torch.zeros_like(of), torch.zeros_like(of)) for name, of in weights.items()}
    losses, norms = [], []
    for step in range(options.steps):
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            losses.append(plain_llama.backward(options, weights, step))
        norms.append(norm([weight.grad for weight in weights.values()]))
        scale, lr = min(1.0, options.clip / norms[-1]), rate(step, options)
        for name, weight in weights.items():
            decay = options.weight_decay if weight.ndim > 1 else 0.0
            gradient, weight.grad = weight.grad, None
            adamw(weight.detach(), gradient * scale, *moments[name], lr=lr, step=step + 1, decay=decay)
    return Course(losses=losses, norms=norms, weights={name: of.detach() for name, of in weights.items()})


def rate(step: int, options: cli.Options) -> float:
    """A line up to the peak, then half a cosine down to a tenth of it."""
    peak, rising = options.lr or 0.0, options.lr_warmup
    if step < rising:
        return peak * (step + 1) / rising
    angle = math.pi * (step - rising) / (options.steps - rising)
    return peak * (0.55 + 0.45 * math.cos(angle))


def adamw(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    *,
    lr: float,
    step: int,
    decay: float,
) -> None:
    """One step of arXiv 1711.05101 with betas 0.9 and 0.95, in place; `step` counts from 1."""
    mean.mul_(0.9).add_(gradient, alpha=0.1)
    square.mul_(0.95).add_(gradient.square(), alpha=0.05)
    size = (square / (1 - 0.95**step)).sqrt() + 1e-8
    weight.mul_(1 - lr * decay).sub_(mean / size, alpha=lr / (1 - 0.9**step))


def norm(tensors: list[torch.Tensor]) -> float:
    """Of all of them as one vector, summed in float64."""
    return float(torch.stack([torch.linalg.vector_norm(one, dtype=torch.float64) for one in tensors]).norm())


def apart_of(options: cli.Options, world: World, phases: Phases, wanted: Course) -> dict[str, Any]:
    """How far this job is from the reference."""
    seed_process(options)
    run = train.build(options, world, phases)
    with attention_backend.order(options, world):
        train.train(run)
    norms = torch.stack(run.norms).tolist()
    return apart(options, record.shared_losses(run), norms, run.job.weights(), wanted)


def apart(
    options: cli.Options,
    losses: list[float],
    norms: list[float],
    weights: Iterator[tuple[str, torch.Tensor]],
    wanted: Course,
) -> dict[str, Any]:
    """`loss` and `norm` of each step, relative to the reference's, `way` of each weight, and `decay`.

    `way`: from the first to the last weight, the error as a share of the reference's way.
    `decay`: how much more of their start the matrices lost than the reference's did, as a share of the start.
    """
    if len(losses) != len(wanted.losses):
        raise AssertionError(
            f"{len(losses)} of {len(wanted.losses)} steps ran; the last losses: {losses[-3:]}"
        )
    steps = {
        "loss": [got / want - 1 for got, want in zip(losses, wanted.losses, strict=True)],
        "norm": [got / want - 1 for got, want in zip(norms, wanted.norms, strict=True)],
    }
    layers, way, lost, start = initial.preset(options).config.layers, {}, 0.0, 0.0
    for name, got in weights:
        want = wanted.weights[name]
        first = prepare.initial_value(name, want.shape, layers, options, want.device).to(want.dtype)
        error = got.to(want) - want
        way[name] = norm([error]) / norm([want - first])
        if want.ndim > 1:
            lost -= float(torch.sum(error * first, dtype=torch.float64))
            start += norm([first]) ** 2
    if missing := wanted.weights.keys() - way.keys():
        raise AssertionError(f"no weight {sorted(missing)} in the job")
    return {**steps, "way": way, "decay": lost / start}


def main() -> None:
    """Measure each job, and the plain model in bfloat16, with seeds 1, 2, …; a JSON line of each."""
    parser = argparse.ArgumentParser(description="Measure how far thirty steps in bfloat16 go apart.")
    parser.add_argument("seeds", type=int, help="how many, from seed 1 on")
    if (seeds := parser.parse_args().seeds) < 1:
        parser.error(f"got {seeds} seeds, expected at least 1")
    wanted_jobs = wide_job.curves(on_cpu=device().type == "cpu")
    text = {name: [str(word) for word in flags] for name, flags in wanted_jobs.items()}
    with trainer_jobs.joined(json.dumps(text)) as (jobs, world, phases):
        for seed in range(1, 1 + seeds):
            seeded = {name: dataclasses.replace(job, seed=seed) for name, job in jobs.items()}
            first = next(iter(seeded.values()))
            wanted = plain(first, world.device)
            low = plain(first, world.device, low=True)
            found = {"plain": apart(first, low.losses, low.norms, iter(low.weights.items()), wanted)}
            del low
            for name, job in seeded.items():
                run = functools.partial(apart_of, job, world, phases, wanted)
                found[name] = trainer_jobs.apart(run, world)
            for name, one in found.items() if world.rank == 0 else ():
                print(json.dumps({"seed": seed, "job": name, **one}), flush=True)


if __name__ == "__main__":
    main()
