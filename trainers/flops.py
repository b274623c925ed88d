"""Floating-point operations of one training token or image, under three named conventions.

In: the shape of a model. Out: operations for forward and backward (3 x forward). `noncausal` counts every
score of attention (LLM Foundry, torchtitan, NVIDIA to 24.12); `causal` counts only those that the mask keeps
(NVIDIA from 25.x); `hardware` is `noncausal` plus one more forward where activations are recomputed
(Megatron-LM's and Frontier's print). Vendors changed convention between releases: a figure without its name
means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one token costs: weights multiplied once a token, and attention by layer, width and keys seen.

    `matmul_weights`: weights in matrix products, the head in, the embedding's look-up out; active ones only.
    `keys_noncausal`, `keys_causal`: keys a query meets on average under each convention.
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


def per_token(work: Work, *, recompute: bool = False) -> Flops:
    """6 operations a weight; 12 a layer, attention width and key: 2 products x 2 operations x 3 passes."""
    gemm = 6.0 * work.matmul_weights
    attention = 12.0 * work.layers * work.attention_width
    noncausal = gemm + attention * work.keys_noncausal
    return Flops(
        noncausal=noncausal,
        causal=gemm + attention * work.keys_causal,
        hardware=noncausal * (4 / 3 if recompute else 1),
    )


def keys_causal(seq_len: int, window: int | None = None) -> float:
    """Mean keys a query sees under a causal mask, exact band: S/2 in the field's convention, less for a
    window.
    """
    if window is None or window >= seq_len:
        return seq_len / 2
    return window - window**2 / (2 * seq_len)


def decoder(config: object, seq_len: int) -> Work:
    """Llama, Mistral and the sparse families: fields of models.llama.Config and models.moe.Config."""
    width, head = config.width, config.head_dim
    attention = width * head * (2 * config.heads + 2 * config.kv_heads)
    experts = getattr(config, "active_experts", 1)
    router = width * config.experts if hasattr(config, "experts") else 0
    weights = config.layers * (attention + experts * 3 * width * config.ffn + router) + width * config.vocab
    keys = min(config.window or seq_len, seq_len)
    return Work(
        matmul_weights=weights,
        layers=config.layers,
        attention_width=config.heads * head,
        keys_noncausal=keys,
        keys_causal=keys_causal(seq_len, config.window),
    )


def gpt(config: object, seq_len: int) -> Work:
    """MPT and GPT. LLM Foundry multiplies all of N, positions and biases in: its published figures need
    that.
    """
    return Work(
        matmul_weights=config.parameters(seq_len),
        layers=config.layers,
        attention_width=config.width,
        keys_noncausal=seq_len,
        keys_causal=keys_causal(seq_len),
    )


def flux(config: object, image_tokens: int, text_tokens: int, *, recompute: bool = False) -> Flops:
    """Operations per image: each stream's weights by its own tokens, attention over both, bidirectional.

    torchtitan's counter halves the attention as if it were causal; ours counts it in full.
    """
    d, tokens = config.width, image_tokens + text_tokens
    hidden = config.mlp_ratio * d
    stream = 4 * d * d + 2 * d * hidden
    single = 4 * d * d + 2 * d * hidden
    gemm = config.double_blocks * stream * tokens + config.single_blocks * single * tokens
    gemm += image_tokens * 2 * config.channels * d + text_tokens * config.text_width * d
    modulation = config.double_blocks * 12 * d * d + config.single_blocks * 3 * d * d + 2 * d * d
    embedders = (256 + d) * d * (2 if config.guidance else 1) + (config.pooled_width + d) * d
    layers = config.double_blocks + config.single_blocks
    work = 6.0 * (gemm + modulation + embedders) + 12.0 * layers * d * tokens * tokens
    return Flops(noncausal=work, causal=work, hardware=work * (4 / 3 if recompute else 1))
