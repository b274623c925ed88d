"""A Llama written out: the reference of jobs of trainers/train.py. In: their options. Out: losses, gradients.

Products are in IEEE float32, or float64 on a CPU, attention is softmax(q·kᵀ)·v, gradients are autograd's.
Nothing here comes from the trainers except the shape, the initial weights and the samples.
"""

import sys
from typing import Any

import torch
from torch.nn import functional

from workloads import trainers
from workloads.reference import precision

sys.path.insert(0, str(trainers.FOLDER))

import data
import initial
import options as cli
import presets
from layouts import prepare

Tensors = dict[str, torch.Tensor]


def exact(device: torch.device) -> torch.dtype:
    """What the reference computes in."""
    return torch.float32 if device.type == "cuda" else torch.float64


def start(options: cli.Options, device: torch.device, kind: torch.dtype) -> Tensors:
    """The weights before the first step, which want gradients."""
    config = initial.preset(options).config
    shapes = prepare.skeleton(presets.MODELS[options.model], config).named_parameters()
    return {
        name: prepare.initial_value(name, weight.shape, config.layers, options, device)
        .to(kind)
        .requires_grad_()
        for name, weight in shapes
    }


def backward(options: cli.Options, weights: Tensors, step: int) -> float:
    """Add the gradients of the mean loss over all samples of a step, of all ranks; returns that loss."""
    preset, batch = initial.preset(options), options.global_batch or 1
    source = data.open_source(options, vocab=preset.config.vocab, seq_len=options.seq_len or preset.seq_len)
    whole = 0.0
    with precision("fp32"):
        for number in range(step * batch, (step + 1) * batch):
            tokens = source.sample(number).to(weights["embedding.weight"].device)
            share = loss(weights, preset.config, tokens) / batch
            share.backward()
            whole += float(share.detach())
    return whole


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
