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

from models.layers import (
    BlockModel,
    LossHead,
    alibi_slopes,
    document_attention,
    document_context,
    document_mask,
    run_blocks,
)

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
        """Attention of x to itself, with what `_bias` makes."""
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


class Model(BlockModel):
    """Embedding, positions, blocks, head."""

    def __init__(self, config: Config, *, loss_chunks: int = 1, stage: tuple[int, int] = (0, 1)) -> None:
        super().__init__()
        (index, stages), first = stage, stage[0] == 0
        self.config = config
        span = range(index * config.layers // stages, (index + 1) * config.layers // stages)
        self.embedding = nn.Embedding(config.vocab, config.width) if first else None
        placed = first and not config.alibi
        self.position = nn.Embedding(config.positions, config.width) if placed else None
        self.blocks = nn.ModuleDict({str(layer): Block(config) for layer in span})
        self.head = self._head(loss_chunks) if index == stages - 1 else None

    def _head(self, chunks: int) -> LossHead:
        out = nn.Linear(self.config.width, self.config.vocab, bias=False)
        if self.config.tied and self.embedding is not None:
            out.weight = self.embedding.weight
        return LossHead(nn.LayerNorm(self.config.width, bias=self.config.bias), out, chunks)

    def hidden(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """Tokens, or the previous stage's activations, to this stage's last activations."""
        if self.embedding is not None:
            x = self.embedding(x)
        if self.position is not None:
            x = x + self.position(torch.arange(x.shape[1], device=x.device))
        return run_blocks(self.blocks, x, self._bias(x, documents))

    def _bias(self, x: Tensor, documents: Tensor | None) -> Tensor | None:
        """ALiBi and the masks in one bias [(batch,) heads, S, S], whose memory grows with sequence².

        Without ALiBi: as document_context.
        """
        if not self.config.alibi:
            return None if documents is None else document_context(x, documents)
        mask = None if documents is None else document_mask(x, documents)
        place = torch.arange(x.shape[1], device=x.device)
        distance = (place[None] - place[:, None]).float()
        bias = alibi_slopes(self.config.heads).to(x.device)[:, None, None] * distance
        hidden = distance > 0 if mask is None else ~mask
        return bias.masked_fill(hidden, float("-inf")).to(x.dtype)

    def logits(self, tokens: Tensor) -> Tensor:
        """[batch, sequence, vocabulary]."""
        assert self.head is not None, "only the last stage of a pipeline has logits"
        return self.head.logits(self.hidden(tokens))

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Mean cross entropy; activations when this stage is not the last."""
        x = self.hidden(tokens, documents)
        return x if self.head is None else self.head(x, labels)


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
