"""The Llama of Hugging Face's transformers in the training loop of this project.

Most users run it, so the speed of llama.py is compared with it.

In: the shape of a preset. Out: a model with the same forward and the same first weights as llama.py's.
Layouts shard and compile its blocks as they do those of llama.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

import pretrained
from errors import RefusedError
from models import llama
from models.layers import BlockModel, LossHead, run_blocks

if TYPE_CHECKING:
    from torch import Tensor

OURS = {name: name for name in ("embedding", "blocks", "head.norm", "head.out")} | {
    f"layer.{name}": ours for ours, name in llama.NAMES.items()
}


class Block(nn.Module):
    """One of the library's layers, called like a layer of llama.py."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Activations after the layer."""
        out = self.layer(x, position_embeddings=rotary)
        return cast("Tensor", out[0] if isinstance(out, tuple) else out)


class Model(BlockModel):
    """The library's embedding, layers, norm and head, with our chunked loss."""

    whole_graph = False

    def __init__(self, config: llama.Config, loss_chunks: int) -> None:
        super().__init__()
        library = causal_lm(config)
        self.config = config
        self.embedding = library.model.embed_tokens
        self.blocks = nn.ModuleDict({str(i): Block(layer) for i, layer in enumerate(library.model.layers)})
        self.head = LossHead(library.model.norm, library.lm_head, loss_chunks)
        self.rotary_class = type(library.model.rotary_emb)
        self.library_config = library.config

    def our_name(self, name: str) -> str:
        """What our Llama calls a weight of this model."""
        return llama.rename(name, OURS)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy."""
        x = self.embedding(tokens)
        positions = torch.arange(tokens.shape[1], device=x.device)[None]
        # Made here: as a child it would have its frequencies on the meta device, like the weights before they
        # are drawn.
        rotary = self.rotary_class(self.library_config).to(x.device)(x, positions)
        return cast("Tensor", self.head(run_blocks(self.blocks, x, rotary), labels))


def causal_lm(config: llama.Config) -> Any:
    """The library's LlamaForCausalLM of this shape, with torch's attention."""
    try:
        import transformers
    except ImportError as error:
        raise RefusedError(
            "--implementation transformers needs a package; pip install transformers"
        ) from error
    said = pretrained.said("llama", config, positions=2048)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(said, attn_implementation="sdpa"))


def skeleton(config: llama.Config, loss_chunks: int) -> Model:
    """The model on the meta device."""
    with torch.device("meta"):
        return Model(config, loss_chunks)
