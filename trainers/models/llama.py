"""Llama 3: pre-norm decoder with grouped-query attention, rotary positions and SwiGLU (arXiv 2407.21783).

In: tokens and labels [batch, sequence]. Out: mean cross entropy. Weights convert to and from transformers'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import nn

from models.layers import (
    BlockModel,
    LossHead,
    Rotary,
    Scaling,
    document_attention,
    document_context,
    run_blocks,
    window_attention,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Config:
    """Shape of a decoder; `window` is the sliding attention window in positions, None for full attention."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    theta: float = 500000.0
    scaling: Scaling | None = None
    eps: float = 1e-5
    head_dim: int = 128
    window: int | None = None
    tied: bool = False


def rotary_of(config: Config, seq_len: int, device: torch.device) -> Rotary:
    """Rotary positions of this model."""
    return Rotary.table(seq_len, config.head_dim, config.theta, device, config.scaling)


class Attention(nn.Module):
    """Grouped-query attention.

    Forward reads the number of heads from the weights: tensor parallel splits them.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim, self.window = config.head_dim, config.window
        self.q = nn.Linear(config.width, config.heads * config.head_dim, bias=False)
        self.k = nn.Linear(config.width, config.kv_heads * config.head_dim, bias=False)
        self.v = nn.Linear(config.width, config.kv_heads * config.head_dim, bias=False)
        self.o = nn.Linear(config.heads * config.head_dim, config.width, bias=False)

    def forward(self, x: Tensor, rotary: Rotary, mask: Tensor | None = None) -> Tensor:
        """Run the layer; shapes as in the module docstring. `mask` as layers.document_context makes it."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        q, k = rotary.turn(q), rotary.turn(k)
        out = window_attention(q, k, v, self.window) if self.window else document_attention(q, k, v, mask)
        return self.o(out.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)) (arXiv 2002.05202)."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, ffn, bias=False)
        self.up = nn.Linear(width, ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer; shapes as in the module docstring."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Config, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=config.eps)
        self.mlp = mlp or SwiGLU(config.width, config.ffn)

    def forward(self, x: Tensor, rotary: Rotary, mask: Tensor | None = None) -> Tensor:
        """Run the layer; shapes as in the module docstring."""
        x = x + self.attention(self.attention_norm(x), rotary, mask)
        return x + self.mlp(self.mlp_norm(x))


class Model(BlockModel):
    """Embedding, blocks, head. A pipeline stage holds some of the blocks, and the ends where it owns them."""

    def __init__(self, config: Config, *, loss_chunks: int = 1, stage: tuple[int, int] = (0, 1)) -> None:
        super().__init__()
        index, stages = stage
        self.config = config
        span = range(index * config.layers // stages, (index + 1) * config.layers // stages)
        self.embedding = nn.Embedding(config.vocab, config.width) if index == 0 else None
        # Keyed by the layer of the whole model: checkpoints fit every pipeline layout.
        self.blocks = nn.ModuleDict({str(layer): self.block() for layer in span})
        self.head = self._head(loss_chunks) if index == stages - 1 else None

    def block(self) -> nn.Module:
        """One layer; the sparse family overrides it."""
        return Block(self.config)

    def _head(self, chunks: int) -> LossHead:
        out = nn.Linear(self.config.width, self.config.vocab, bias=False)
        if self.config.tied and self.embedding is not None:
            out.weight = self.embedding.weight
        return LossHead(nn.RMSNorm(self.config.width, eps=self.config.eps), out, chunks)

    def hidden(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """Tokens, or the previous stage's activations, to this stage's last activations.

        `documents`: as data.bounds; attention then stays inside each.
        """
        if self.embedding is not None:
            x = self.embedding(x)
        rotary = rotary_of(self.config, x.shape[1], x.device)
        mask = () if documents is None else (document_context(x, documents),)
        return run_blocks(self.blocks, x, rotary, *mask)

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


NAMES = {
    "embedding": "model.embed_tokens",
    "head.norm": "model.norm",
    "head.out": "lm_head",
    "blocks": "model.layers",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def to_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under the names of transformers' LlamaForCausalLM and MistralForCausalLM."""
    return {rename(name, NAMES): value for name, value in state.items()}


def from_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a transformers model under our names."""
    back = {theirs: ours for ours, theirs in NAMES.items()}
    return {rename(name, back): value for name, value in state.items()}


def rename(name: str, names: dict[str, str]) -> str:
    """Translate a parameter's dotted path: whole, or around the number of its layer."""
    path, _, kind = name.rpartition(".")
    if path in names:
        return f"{names[path]}.{kind}"
    prefix, number, rest = next((p, *_split(path, p)) for p in names if path.startswith(f"{p}."))
    return f"{names[prefix]}.{number}.{names.get(rest, rest)}.{kind}"


def _split(path: str, prefix: str) -> tuple[str, str]:
    number, _, rest = path.removeprefix(f"{prefix}.").partition(".")
    return number, rest
