"""FLUX weights under the names of diffusers' FluxTransformer2DModel, and back.

In: a state dict. Out: the same weights under the other names. Where this project computes several products as
one (queries, keys and values; in a single block the MLP too), one of its weights holds several of diffusers'.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

ENDS = {
    "ends.image": ("x_embedder",),
    "ends.text": ("context_embedder",),
    "ends.time.0": ("time_text_embed.timestep_embedder.linear_1",),
    "ends.time.2": ("time_text_embed.timestep_embedder.linear_2",),
    "ends.guidance.0": ("time_text_embed.guidance_embedder.linear_1",),
    "ends.guidance.2": ("time_text_embed.guidance_embedder.linear_2",),
    "ends.pooled.0": ("time_text_embed.text_embedder.linear_1",),
    "ends.pooled.2": ("time_text_embed.text_embedder.linear_2",),
    "ends.modulation": ("norm_out.linear",),
    "ends.out": ("proj_out",),
}
DOUBLE = {
    "image.modulation": ("norm1.linear",),
    "image.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "image.q_norm": ("attn.norm_q",),
    "image.k_norm": ("attn.norm_k",),
    "image.o": ("attn.to_out.0",),
    "image.mlp.0": ("ff.net.0.proj",),
    "image.mlp.2": ("ff.net.2",),
    "text.modulation": ("norm1_context.linear",),
    "text.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "text.q_norm": ("attn.norm_added_q",),
    "text.k_norm": ("attn.norm_added_k",),
    "text.o": ("attn.to_add_out",),
    "text.mlp.0": ("ff_context.net.0.proj",),
    "text.mlp.2": ("ff_context.net.2",),
}
SINGLE = {
    "modulation": ("norm.linear",),
    "into": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "out": ("proj_out",),
    "q_norm": ("attn.norm_q",),
    "k_norm": ("attn.norm_k",),
}
SWAPPED = "ends.modulation"  # ours is shift, scale as everywhere else; theirs is scale, shift


def from_diffusers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their weights under our names."""
    doubles = _blocks(state, r"transformer_blocks\.(\d+)\.")
    singles = _blocks(state, r"single_transformer_blocks\.(\d+)\.")
    found = {}
    for ours, theirs in _table(doubles, singles).items():
        for kind in ("weight", "bias"):
            if f"{theirs[0]}.{kind}" in state:
                found[f"{ours}.{kind}"] = _ordered(
                    ours, torch.cat([state[f"{name}.{kind}"] for name in theirs])
                )
    return found


def to_diffusers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under their names."""
    doubles = _blocks(state, r"blocks\.(\d+)\.image\.")
    singles = _blocks(state, r"blocks\.(\d+)\.into\.")
    width = len(state["ends.image.weight"])
    found: dict[str, Tensor] = {}
    for ours, theirs in _table(doubles, singles).items():
        for kind in ("weight", "bias"):
            if (value := state.get(f"{ours}.{kind}")) is not None:
                whole = len(value) if len(theirs) == 1 else width
                sizes = [whole] * min(len(theirs), 3) + [len(value) - 3 * width] * (len(theirs) == 4)
                pieces = _ordered(ours, value).split(sizes)
                found |= {f"{name}.{kind}": piece for name, piece in zip(theirs, pieces, strict=True)}
    return found


def _blocks(names: Iterable[str], pattern: str) -> int:
    """How many blocks have names of this form."""
    return len({match[1] for name in names if (match := re.match(pattern, name))})


def _table(doubles: int, singles: int) -> dict[str, tuple[str, ...]]:
    """Every module of this project, and the modules of diffusers whose rows it holds, in this order."""
    table: dict[str, tuple[str, ...]] = dict(ENDS)
    for index in range(doubles + singles):
        ours = f"blocks.{index}."
        kinds, theirs = (
            (DOUBLE, f"transformer_blocks.{index}.")
            if index < doubles
            else (SINGLE, f"single_transformer_blocks.{index - doubles}.")
        )
        table |= {ours + name: tuple(theirs + part for part in parts) for name, parts in kinds.items()}
    return table


def _ordered(ours: str, value: Tensor) -> Tensor:
    return torch.cat(value.chunk(2)[::-1]) if ours == SWAPPED else value
