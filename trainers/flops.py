"""Floating-point operations of one training token or image, under three named conventions.

In: the shape of a model. Out: operations of forward and backward (3 x forward). `noncausal` counts every
attention score (LLM Foundry, torchtitan, NVIDIA to 24.12). `causal` counts only the scores that the mask
keeps (NVIDIA from 25.x). `hardware` is `noncausal` plus one more forward where activations are recomputed
(Megatron-LM, Frontier). Vendors changed their convention between releases, so a figure always needs the name
of its convention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models import flux as flux_model
    from models import llama, mpt


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the operations of one token follow from.

    `matmul_weights`: active weights in matrix products: with the head, without the embedding (a look-up).
    `keys_noncausal`, `keys_causal`: keys that a query attends to on average, under each convention.
    """

    matmul_weights: int
    layers: int
    attention_width: int
    keys_noncausal: float
    keys_causal: float


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Operations per token (or image) by convention."""

    noncausal: float
    causal: float
    hardware: float


def per_token(work: Work, *, recompute: float = 0.0) -> Flops:
    """Operations for one token.

    They are 6 for each weight (2 in each of 3 passes), and 12 for each layer, width and key (2 products, 2
    operations, 3 passes).
    """
    gemm = 6.0 * work.matmul_weights
    attention = 12.0 * work.layers * work.attention_width
    noncausal = gemm + attention * work.keys_noncausal
    return Flops(
        noncausal=noncausal,
        causal=gemm + attention * work.keys_causal,
        hardware=noncausal * (1 + recompute / 3),
    )


def keys_causal(seq_len: int, window: int | None = None) -> float:
    """The mean number of keys that a query sees under a causal mask.

    It is S/2 by the field's convention, less in a window.
    """
    if window is None or window >= seq_len:
        return seq_len / 2
    return window - window**2 / (2 * seq_len)


def decoder(config: llama.Config, seq_len: int) -> Work:
    """Llama, Mistral and the sparse family."""
    width, head = config.width, config.head_dim
    attention = width * head * (2 * config.heads + 2 * config.kv_heads)
    experts: int = getattr(config, "active_experts", 1)  # a dense model has one MLP
    router: int = width * getattr(config, "experts", 0)
    weights = config.layers * (attention + experts * 3 * width * config.ffn + router) + width * config.vocab
    keys = min(config.window or seq_len, seq_len)
    return Work(
        matmul_weights=weights,
        layers=config.layers,
        attention_width=config.heads * head,
        keys_noncausal=keys,
        keys_causal=keys_causal(seq_len, config.window),
    )


def gpt(config: mpt.Config, seq_len: int) -> Work:
    """MPT and GPT.

    As LLM Foundry's published figures do, this counts all weights: positions and biases too.
    """
    return Work(
        matmul_weights=config.parameters(seq_len),
        layers=config.layers,
        attention_width=config.width,
        keys_noncausal=seq_len,
        keys_causal=keys_causal(seq_len),
    )


def flux(config: flux_model.Config, image_tokens: int, text_tokens: int, *, recompute: float = 0.0) -> Flops:
    """Operations per image: each stream's weights x its own tokens, and bidirectional attention over both.

    torchtitan counts half of the attention, as if it were causal; this counts all of it.
    """
    d, tokens = config.width, image_tokens + text_tokens
    hidden = config.mlp_ratio * d
    gemm = config.layers * (4 * d * d + 2 * d * hidden) * tokens  # both kinds of blocks
    gemm += image_tokens * 2 * config.channels * d + text_tokens * config.text_width * d
    modulation = config.double_blocks * 12 * d * d + config.single_blocks * 3 * d * d + 2 * d * d
    embedders = (256 + d) * d * (2 if config.guidance else 1) + (config.pooled_width + d) * d
    work = 6.0 * (gemm + modulation + embedders) + 12.0 * config.layers * d * tokens * tokens
    return Flops(noncausal=work, causal=work, hardware=work * (1 + recompute / 3))
