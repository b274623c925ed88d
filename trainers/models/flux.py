"""FLUX.1-dev: a rectified-flow transformer over image latents and text (shape: black-forest-labs/flux).

In: latents [batch, image tokens, 64], text [batch, text tokens, 4096], pooled text, noise and times. Out:
mean squared error of the predicted velocity noise - latents (arXiv 2209.03003). In 19 blocks image and text
have their own weights and share the attention; in 38 they are one sequence. Latents are synthetic and seeded
by sample, so any rank can make them. Weights convert to and from diffusers' (tools/flux_weights.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from models.layers import BlockModel, attention, run_blocks

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Config:
    """Shape; `side` is the image's side in latent patches (16 pixels each): 32 for 512², 64 for 1024²."""

    double_blocks: int = 19
    single_blocks: int = 38
    width: int = 3072
    heads: int = 24
    channels: int = 64
    text_width: int = 4096
    pooled_width: int = 768
    mlp_ratio: int = 4
    axes: tuple[int, int, int] = (16, 56, 56)
    guidance: bool = True
    side: int = 32
    text_tokens: int = 512
    lean: bool = False  # turn positions in one pass, with tables of every coordinate

    @property
    def layers(self) -> int:
        """Blocks of both kinds; scales the residual projections at the start."""
        return self.double_blocks + self.single_blocks


GUIDANCE = 3.5  # FLUX.1-dev is distilled from guided samples: the scale is an input, like the time


def rotary(config: Config, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of (index, row, column) by axis, text at zero; [tokens, head_dim / 2] each.

    With `lean` [tokens, head_dim] each: every coordinate has its own, the sines with the sign of `turn`.
    """
    place = torch.arange(config.side**2, device=device)
    image = torch.stack((torch.zeros_like(place), place // config.side, place % config.side), 1)
    ids = torch.cat((image.new_zeros(config.text_tokens, 3), image)).float()
    parts = []
    for axis, size in enumerate(config.axes):
        speed = 10000.0 ** -(torch.arange(0, size, 2, device=device) / size)
        parts.append(ids[:, axis, None] * speed)
    angle = torch.cat(parts, 1)
    cos, sin = angle.cos(), angle.sin()
    if config.lean:
        return cos.repeat_interleave(2, 1), torch.stack((-sin, sin), -1).flatten(1)
    return cos, sin


def turn(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate neighbouring pairs of x [batch, heads, tokens, head_dim], by tables for pairs or coordinates."""
    cos, sin = table
    exact = x.float()  # once: its gradient adds up in float32
    pairs = exact.unflatten(-1, (-1, 2))
    if cos.shape[-1] == x.shape[-1]:
        return (exact * cos + pairs.flip(-1).flatten(-2) * sin).to(x.dtype)
    a, b = pairs.unbind(-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).to(x.dtype)


def waves(t: Tensor, size: int = 256) -> Tensor:
    """Sinusoids of a time in [0, 1], scaled by 1000; float32 [batch, size]."""
    speed = torch.exp(-math.log(10000) * torch.arange(size // 2, device=t.device) / (size // 2))
    angle = 1000.0 * t.float()[:, None] * speed
    return torch.cat((angle.cos(), angle.sin()), -1)


def two_layers(inputs: int, width: int) -> nn.Sequential:
    """Linear, SiLU, linear: how times, guidance and pooled text become conditions."""
    return nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width))


class Stream(nn.Module):
    """One side of a double block: its modulation, projections and MLP."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        d, dim = config.width, config.width // config.heads
        self.heads = config.heads
        self.modulation, self.qkv, self.o = nn.Linear(d, 6 * d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.q_norm, self.k_norm = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-6)
        hidden = config.mlp_ratio * d
        self.mlp = nn.Sequential(nn.Linear(d, hidden), nn.GELU("tanh"), nn.Linear(hidden, d))

    def project(self, x: Tensor, shift: Tensor, scale: Tensor) -> list[Tensor]:
        """Normed queries and keys, and values: [batch, heads, tokens, head_dim]."""
        h = modulated(x, shift, scale)
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.qkv(h).chunk(3, -1))
        return [self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype), v]


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """LayerNorm without weights, then scale and shift by the condition."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


class Double(nn.Module):
    """Image and text with weights of their own and one attention."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.image, self.text, self.split = Stream(config), Stream(config), config.text_tokens

    def forward(self, x: Tensor, condition: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """X [batch, text + image tokens, width], text first."""
        sides = ((self.text, x[:, : self.split]), (self.image, x[:, self.split :]))
        mods = [side.modulation(F.silu(condition))[:, None].chunk(6, -1) for side, _ in sides]
        parts = [side.project(h, *mod[:2]) for (side, h), mod in zip(sides, mods, strict=True)]
        q, k, v = (torch.cat(pair, 2) for pair in zip(*parts, strict=True))
        out = attention(turn(q, table), turn(k, table), v, causal=False).transpose(1, 2).flatten(2)
        outs = (out[:, : self.split], out[:, self.split :])
        done = []
        for (side, h), mod, o in zip(sides, mods, outs, strict=True):
            y = h + mod[2] * side.o(o)
            done.append(y + mod[5] * side.mlp(modulated(y, *mod[3:5])))
        return torch.cat(done, 1)


class Single(nn.Module):
    """One sequence; attention and MLP side by side, joined by one product."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        d, dim = config.width, config.width // config.heads
        self.heads, self.width = config.heads, d
        self.modulation = nn.Linear(d, 3 * d)
        self.into, self.out = (
            nn.Linear(d, (3 + config.mlp_ratio) * d),
            nn.Linear((1 + config.mlp_ratio) * d, d),
        )
        self.q_norm, self.k_norm = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-6)

    def forward(self, x: Tensor, condition: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """X [batch, text + image tokens, width]."""
        shift, scale, gate = self.modulation(F.silu(condition))[:, None].chunk(3, -1)
        qkv, mlp = self.into(modulated(x, shift, scale)).tensor_split((3 * self.width,), -1)
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in qkv.chunk(3, -1))
        q, k = turn(self.q_norm(q).to(v.dtype), table), turn(self.k_norm(k).to(v.dtype), table)
        out = attention(q, k, v, causal=False).transpose(1, 2).flatten(2)
        return x + gate * self.out(torch.cat((out, F.gelu(mlp, approximate="tanh")), -1))


class Ends(nn.Module):
    """The first layers, from inputs to the model's width, and the last ones, from width to velocities."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        d = config.width
        self.image, self.text = nn.Linear(config.channels, d), nn.Linear(config.text_width, d)
        self.time, self.pooled = two_layers(256, d), two_layers(config.pooled_width, d)
        self.guidance = two_layers(256, d) if config.guidance else None
        self.modulation, self.out = nn.Linear(d, 2 * d), nn.Linear(d, config.channels)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Velocities [batch, image tokens, channels]."""
        shift, scale = self.modulation(F.silu(condition))[:, None].chunk(2, -1)
        return self.out(modulated(x, shift, scale))


class Model(BlockModel):
    """Both kinds of blocks between the ends."""

    at_root = ("ends",)  # used before and after the blocks, so it cannot be a unit of its own

    def __init__(self, config: Config, *, loss_chunks: int = 1) -> None:
        super().__init__()
        del loss_chunks  # a mean squared error holds no logits
        self.config = config
        kinds = [Double] * config.double_blocks + [Single] * config.single_blocks
        self.blocks = nn.ModuleDict({str(i): kind(config) for i, kind in enumerate(kinds)})
        self.ends = Ends(config)

    def velocity(self, noisy: Tensor, text: Tensor, pooled: Tensor, times: Tensor) -> Tensor:
        """Predicted velocity [batch, image tokens, channels] of noisy latents at their times in [0, 1]."""
        ends, kind = self.ends, self.ends.image.weight.dtype
        condition = ends.time(waves(times).to(kind)) + ends.pooled(pooled.to(kind))
        if ends.guidance is not None:
            condition = condition + ends.guidance(waves(torch.full_like(times, GUIDANCE)).to(kind))
        x = torch.cat((ends.text(text.to(kind)), ends.image(noisy.to(kind))), 1)
        x = run_blocks(self.blocks, x, condition, rotary(self.config, x.device))
        return ends(x[:, self.config.text_tokens :], condition)

    def forward(self, latents: Tensor, text: Tensor, pooled: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """Mean squared error of the velocity at (1 - t)·latents + t·noise."""
        t = times[:, None, None]
        predicted = self.velocity((1 - t) * latents + t * noise, text, pooled, times)
        return F.mse_loss(predicted.float(), (noise - latents).float())


def batch(config: Config, numbers: range, seed: int, device: torch.device) -> dict[str, Tensor]:
    """Seeded inputs of these samples.

    Latents are constant over an image, so that there is a rule to learn.
    """
    shapes = {
        "latents": (config.side**2, config.channels),
        "text": (config.text_tokens, config.text_width),
        "pooled": (config.pooled_width,),
        "noise": (config.side**2, config.channels),
    }
    rows: dict[str, list[Tensor]] = {name: [] for name in (*shapes, "times")}
    for number in numbers:
        random = torch.Generator(device).manual_seed(seed * 1_000_003 + number)
        for name, shape in shapes.items():
            rows[name].append(torch.randn(shape, device=device, generator=random))
        rows["latents"][-1] = rows["latents"][-1].mean(0, keepdim=True).expand(shapes["latents"]) * 8
        rows["times"].append(torch.rand((), device=device, generator=random))
    return {name: torch.stack(parts) for name, parts in rows.items()}
