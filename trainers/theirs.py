"""The library's own model in our loop: transformers' Llama, because that is what users run.

In: the shape of a preset. Out: a model with the same forward and the same first weights, whose blocks the
layouts shard and compile as they do ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from errors import RefusedError
from models import llama
from models.layers import LossHead, run_blocks

if TYPE_CHECKING:
    from torch import Tensor

OURS = {name: name for name in ("embedding", "blocks", "head.norm", "head.out")} | {
    f"layer.{name}": ours for ours, name in llama.NAMES.items()
}


class Block(nn.Module):
    """A layer of theirs behind our signature."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Activations after the layer."""
        out = self.layer(x, position_embeddings=rotary)
        return out[0] if isinstance(out, tuple) else out


class Model(nn.Module):
    """Their embedding, layers, norm and head; our chunked loss."""

    whole_graph = False

    def __init__(self, config: llama.Config, loss_chunks: int) -> None:
        super().__init__()
        theirs = causal_lm(config)
        self.config = config
        self.embedding = theirs.model.embed_tokens
        self.blocks = nn.ModuleDict({str(i): Block(layer) for i, layer in enumerate(theirs.model.layers)})
        self.head = LossHead(theirs.model.norm, theirs.lm_head, loss_chunks)
        self.angles = type(theirs.model.rotary_emb)
        self.shape = theirs.config

    def our_name(self, name: str) -> str:
        """What our Llama calls a weight of this model."""
        return llama.rename(name, OURS)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy."""
        x = self.embedding(tokens)
        place = torch.arange(tokens.shape[1], device=x.device)[None]
        rotary = self.angles(self.shape).to(x.device)(x, place)
        return self.head(run_blocks(self.blocks, x, rotary), labels)


def causal_lm(config: llama.Config) -> nn.Module:
    """Their model of this shape, with torch's attention."""
    try:
        import transformers
    except ImportError as error:
        raise RefusedError(
            "--implementation transformers needs transformers; pip install transformers"
        ) from error
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab,
            hidden_size=config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            intermediate_size=config.ffn,
            head_dim=config.head_dim,
            rms_norm_eps=config.eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.theta},
            tie_word_embeddings=config.tied,
            attn_implementation="sdpa",
        )
    )


def skeleton(config: llama.Config, loss_chunks: int) -> Model:
    """The model on the meta device."""
    with torch.device("meta"):
        return Model(config, loss_chunks)
