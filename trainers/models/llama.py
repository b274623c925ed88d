"""Llama 3: pre-norm decoder with grouped-query attention, rotary positions and SwiGLU (arXiv 2407.21783).

In: tokens and labels [batch, sequence]. Out: mean cross entropy. Weights convert to and from transformers'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import nn

from models.layers import (
    Decoder,
    Rotary,
    Scaling,
    document_attention,
    document_context,
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


class Model(Decoder):
    """Embedding, blocks, head."""

    def block(self) -> nn.Module:
        """One layer; the sparse family overrides it."""
        return Block(self.config)

    def norm(self) -> nn.Module:
        """The norm before the head."""
        return nn.RMSNorm(self.config.width, eps=self.config.eps)

    def context(self, x: Tensor, documents: Tensor | None) -> tuple[object, ...]:
        """Rotary positions, and the mask of documents if there are any."""
        rotary = rotary_of(self.config, x.shape[1], x.device)
        return (rotary,) if documents is None else (rotary, document_context(x, documents))


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
    prefix = next(one for one in names if path.startswith(f"{one}."))
    number, _, rest = path.removeprefix(f"{prefix}.").partition(".")
    return f"{names[prefix]}.{number}.{names.get(rest, rest)}.{kind}"
