"""MPT and GPT: LayerNorm, tied embedding, GELU; learned positions and biases, or ALiBi without biases.

In: tokens and labels [batch, sequence]. Out: mean cross entropy. LLM Foundry's benchmark tables use learned
positions and biases; the released MPT-7B and 30B use ALiBi and no biases. The two have different preset
names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from models.layers import Decoder, alibi_slopes, document_attention, document_context, document_mask

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Config:
    """Shape; `positions` is the length of the learned table, ignored with `alibi`."""

    layers: int
    width: int
    heads: int
    vocab: int = 50368
    positions: int = 2048
    alibi: bool = False
    bias: bool = True
    tied: bool = True

    def parameters(self, seq_len: int) -> int:
        """Exact count: a layer has 12·d² and 13·d of biases and norms (2·d without biases).

        Then the tied embedding, the positions and the last norm.
        """
        d = self.width
        small = 13 if self.bias else 2
        table = 0 if self.alibi else seq_len * d
        return self.vocab * d + table + self.layers * (12 * d * d + small * d) + (2 if self.bias else 1) * d


class Attention(nn.Module):
    """Multi-head attention.

    Forward reads the number of heads from the weights: tensor parallel splits them.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.dim, d = config.width // config.heads, config.width
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=config.bias) for _ in range(4))

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Attention of x to itself, with what `Model.context` makes."""
        q, k, v = (f(x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(document_attention(q, k, v, bias).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two layers with GELU, four times as wide inside."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=config.bias)
        self.down = nn.Linear(4 * config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """down(gelu(up(x)))."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """One layer."""
        x = x + self.attention(self.attention_norm(x), bias)
        return x + self.mlp(self.mlp_norm(x))


class Model(Decoder):
    """Embedding, positions, blocks, head."""

    def positions(self) -> nn.Module | None:
        """The learned positions, unless ALiBi takes their place."""
        config = self.config
        return None if config.alibi else nn.Embedding(config.positions, config.width)

    def block(self) -> nn.Module:
        """One layer."""
        return Block(self.config)

    def norm(self) -> nn.Module:
        """The norm before the head."""
        return nn.LayerNorm(self.config.width, bias=self.config.bias)

    def context(self, x: Tensor, documents: Tensor | None) -> tuple[object, ...]:
        """ALiBi and the masks in one bias [(batch,) heads, S, S], whose memory grows with sequence².

        Without ALiBi: as document_context.
        """
        if not self.config.alibi:
            return (None if documents is None else document_context(x, documents),)
        mask = None if documents is None else document_mask(x, documents)
        place = torch.arange(x.shape[1], device=x.device)
        distance = (place[None] - place[:, None]).float()
        bias = alibi_slopes(self.config.heads).to(x.device)[:, None, None] * distance
        hidden = distance > 0 if mask is None else ~mask
        return (bias.masked_fill(hidden, float("-inf")).to(x.dtype),)


def to_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of the released variant (ALiBi, no bias) under the names of transformers' MptForCausalLM."""
    found = {
        "transformer.wte.weight": state["embedding.weight"],
        "transformer.norm_f.weight": state["head.norm.weight"],
        "lm_head.weight": state["embedding.weight"],
    }
    layers = {name.split(".")[1] for name in state if name.startswith("blocks.")}
    for layer in layers:
        ours, theirs = f"blocks.{layer}", f"transformer.blocks.{layer}"
        parts = [state[f"{ours}.attention.{part}.weight"] for part in "qkv"]
        found[f"{theirs}.attn.Wqkv.weight"] = torch.cat(parts)
        for mine, name in NAMES.items():
            found[f"{theirs}.{name}.weight"] = state[f"{ours}.{mine}.weight"]
    return found


NAMES = {
    "attention_norm": "norm_1",
    "attention.o": "attn.out_proj",
    "mlp_norm": "norm_2",
    "mlp.up": "ffn.up_proj",
    "mlp.down": "ffn.down_proj",
}


def from_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inverse of to_transformers."""
    embedding = state["transformer.wte.weight"]
    found = {"embedding.weight": embedding, "head.out.weight": embedding}
    found["head.norm.weight"] = state["transformer.norm_f.weight"]
    for name, value in state.items():
        if not name.startswith("transformer.blocks."):
            continue
        layer, _, rest = name.removeprefix("transformer.blocks.").removesuffix(".weight").partition(".")
        if rest == "attn.Wqkv":
            parts = zip("qkv", value.chunk(3), strict=True)
            found |= {f"blocks.{layer}.attention.{part}.weight": piece for part, piece in parts}
        else:
            mine = next(ours for ours, theirs in NAMES.items() if theirs == rest)
            found[f"blocks.{layer}.{mine}.weight"] = value
    return found
