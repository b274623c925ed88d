"""A torchrun program: one step of a job, and what reached AdamW. In: JSON, layout names -> flags.
Out: a JSON line.

The flags are those of trainers/train.py; all layouts have the same model, samples and seed. After one step
the first moment is a tenth of the clipped gradient: so each weight's gradient is read behind everything that
makes, sums, shards, scales and clips it. The line is `{"layouts": {name: {weight: relative error}}}`, with
the error of the gradients' norm as `norm`. A layout that raises has `{"error": text}`.

The reference is a plain Llama in this file, on the samples of all ranks: products in IEEE float32, or float64
on a CPU, attention as softmax(q·kᵀ)·v, gradients by autograd.
"""

import functools
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from workloads import trainer_jobs, trainers
from workloads.reference import precision

sys.path.insert(0, str(trainers.FOLDER))

import attention_backend
import data
import initial
import options as cli
import presets
import train
from layouts import flat, prepare
from phases import Phases
from world import seed_process

Tensors = dict[str, torch.Tensor]
FIRST = 1 - 0.9  # of the gradient, in the first moment after one step (layouts/optimizer.py)
NORM = "norm"


def main(arguments: list[str]) -> None:
    """Run one step of every layout."""
    with trainer_jobs.joined(arguments[0]) as (jobs, world, phases):
        wanted = reference(next(iter(jobs.values())), world.device)
        errors = {
            name: trainer_jobs.apart(functools.partial(errors_of, options, world, phases, wanted), world)
            for name, options in jobs.items()
        }
    if world.rank == 0:
        print(json.dumps({"layouts": errors}), flush=True)


def reference(options: cli.Options, device: torch.device) -> Tensors:
    """The gradient of the mean loss over all samples of the first step, for each weight."""
    preset = initial.preset(options)
    kind = torch.float32 if device.type == "cuda" else torch.float64
    shapes = prepare.skeleton(presets.MODELS[options.model], preset.config).named_parameters()
    weights = {
        name: prepare.initial_value(name, weight.shape, preset.config.layers, options, device)
        .to(kind)
        .requires_grad_()
        for name, weight in shapes
    }
    samples = range(options.global_batch or 1)
    length = options.seq_len or preset.seq_len
    source = data.open_source(options, vocab=preset.config.vocab, seq_len=length)
    with precision("fp32"):
        for number in samples:
            tokens = source.sample(number).to(device)
            (loss(weights, preset.config, tokens) / len(samples)).backward()
    return {name: weight.grad for name, weight in weights.items() if weight.grad is not None}


def loss(weights: Tensors, config: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next token; `tokens` [sequence + 1]."""
    x = weights["embedding.weight"][tokens[:-1]]
    for layer in range(config.layers):
        mine = {
            name.removeprefix(f"blocks.{layer}."): weight
            for name, weight in weights.items()
            if name.startswith(f"blocks.{layer}.")
        }
        x = x + attention(mine, config, normed(x, mine["attention_norm.weight"], config.eps))
        y = normed(x, mine["mlp_norm.weight"], config.eps)
        gate, up = y @ mine["mlp.gate.weight"].T, y @ mine["mlp.up.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ mine["mlp.down.weight"].T
    x = normed(x, weights["head.norm.weight"], config.eps)
    return functional.cross_entropy(x @ weights["head.out.weight"].T, tokens[1:])


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the root of the mean square of each row."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def attention(weights: Tensors, config: Any, x: torch.Tensor) -> torch.Tensor:
    """Causal grouped-query attention of one sample, [sequence, width]."""
    q, k, v = (
        (x @ weights[f"attention.{name}.weight"].T).unflatten(-1, (-1, config.head_dim)).transpose(0, 1)
        for name in "qkv"
    )
    q, k = turned(q, config.theta), turned(k, config.theta)
    k, v = (one.repeat_interleave(len(q) // len(one), 0) for one in (k, v))
    scores = q @ k.mT / config.head_dim**0.5
    later = torch.ones(scores.shape[1:], dtype=torch.bool, device=x.device).triu(1)
    out = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
    return out.transpose(0, 1).flatten(1) @ weights["attention.o.weight"].T


def turned(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary positions of [heads, sequence, head_dim]: coordinate i and i + head_dim / 2 are a pair."""
    half = x.shape[-1] // 2
    frequency = theta ** -(torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[1], device=x.device)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def errors_of(options: cli.Options, world: Any, phases: Phases, wanted: Tensors) -> dict[str, float]:
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
