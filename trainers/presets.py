"""The table of models: family and size to a shape and its training defaults.

In: names. Out: a Preset. A proxy (`layers`) keeps every width and has fewer layers, for a model that the
machine cannot hold.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import flops
from errors import RefusedError
from models import flux, gpt, llama, moe, mpt


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model and its training defaults.

    `source`: where the shape comes from. `unit`: what its speed counts.
    """

    config: Any
    seq_len: int
    micro_batch: int
    lr: float
    source: str
    unit: str = "tokens"


_TITAN = "pytorch/torchtitan models/llama3"
_FOUNDRY = "mosaicml/llm-foundry scripts/train/yamls/pretrain"
_FRONTIER = "Megatron-DeepSpeed-ORNL launch scripts, arXiv 2312.12705"
_ON_CPU = "runs on a CPU in seconds"


def _llama(
    layers: int, width: int, heads: int, ffn: int, *, micro_batch: int = 2, lr: float = 3e-4, **other: Any
) -> Preset:
    config = llama.Config(layers=layers, width=width, heads=heads, kv_heads=8, ffn=ffn, vocab=128256, **other)
    return Preset(config=config, seq_len=8192, micro_batch=micro_batch, lr=lr, source=_TITAN)


def _moe(config: moe.Config, source: str) -> Preset:
    return Preset(config=config, seq_len=4096, micro_batch=1, lr=3e-4, source=source)


def _mpt(layers: int, width: int, heads: int, lr: float, micro_batch: int, **other: Any) -> Preset:
    config = mpt.Config(layers=layers, width=width, heads=heads, **other)
    return Preset(config=config, seq_len=2048, micro_batch=micro_batch, lr=lr, source=_FOUNDRY)


def _gpt(layers: int, width: int, heads: int, lr: float) -> Preset:
    config = gpt.Config(layers=layers, width=width, heads=heads)
    return Preset(config=config, seq_len=2048, micro_batch=1, lr=lr, source=_FRONTIER)


def _mistral(window: int, source: str) -> Preset:
    config = llama.Config(
        layers=32, width=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000, theta=1e4, window=window
    )
    return Preset(config=config, seq_len=8192, micro_batch=2, lr=3e-4, source=source)


def _flux(side: int, micro_batch: int) -> Preset:
    config = flux.Config(side=side)
    source = "black-forest-labs/flux, ROCm/FluxBenchmark"
    return Preset(config=config, seq_len=0, micro_batch=micro_batch, lr=1e-5, source=source, unit="images")


_TINY_LLAMA = llama.Config(layers=2, width=64, heads=4, kv_heads=2, ffn=160, vocab=256, head_dim=16)
_TINY_MOE = moe.Config(
    layers=2, width=64, heads=4, kv_heads=2, ffn=64, vocab=256, head_dim=16, experts=4, active_experts=2
)
_TINY_FLUX = flux.Config(
    double_blocks=1, single_blocks=1, width=64, heads=4, channels=8, text_width=32, pooled_width=16,
    axes=(4, 6, 6), side=8, text_tokens=16,
)  # fmt: skip
_MIXTRAL = moe.Config(
    layers=32,
    width=4096,
    heads=32,
    kv_heads=8,
    ffn=14336,
    vocab=32000,
    theta=1e6,
    experts=8,
    active_experts=2,
)
_MOE_125M = moe.Config(
    layers=8, width=512, heads=8, kv_heads=4, ffn=1024, vocab=32000, head_dim=64, experts=8, active_experts=2
)
# ZAYA1 compresses its attention with convolutions; this shape has plain attention with the same head counts.
_ZAYA = moe.Config(
    layers=40, width=2048, heads=8, kv_heads=2, ffn=2048, vocab=262272, theta=5e6,
    experts=16, active_experts=1, renormalise=False, tied=True,
)  # fmt: skip


def _tiny(config: Any, seq_len: int = 64, lr: float = 3e-3, unit: str = "tokens") -> Preset:
    return Preset(config=config, seq_len=seq_len, micro_batch=4, lr=lr, source=_ON_CPU, unit=unit)


PRESETS: dict[tuple[str, str], Preset] = {
    ("llama", "tiny"): _tiny(_TINY_LLAMA),
    # No size divides by many ranks: the vocabulary and the hidden width are odd.
    ("llama", "tiny-uneven"): _tiny(dataclasses.replace(_TINY_LLAMA, width=66, ffn=161, vocab=257)),
    ("llama", "125m"): Preset(
        config=llama.Config(layers=12, width=768, heads=12, kv_heads=4, ffn=2048, vocab=32000, head_dim=64),
        seq_len=2048,
        micro_batch=16,
        lr=6e-4,
        source="the width and depth of MPT-125m, for curves that a CPU can repeat",
    ),
    ("llama", "1b"): _llama(16, 2048, 32, 8192, head_dim=64, tied=True),
    ("llama", "8b"): _llama(32, 4096, 32, 14336),
    ("llama", "70b"): _llama(80, 8192, 64, 28672, micro_batch=1, lr=1.5e-4),
    ("mistral", "tiny"): _tiny(dataclasses.replace(_TINY_LLAMA, window=16)),
    ("mistral", "7b"): _mistral(4096, "Mistral 7B v0.1, arXiv 2310.06825"),
    ("mistral", "7b-window1024"): _mistral(
        1024, "AMD-AIG-AIMA/pytorch-training-benchmark, mistral-7b-v0.1.json"
    ),
    ("moe", "tiny"): _tiny(_TINY_MOE),
    ("moe", "125m"): Preset(
        config=_MOE_125M, seq_len=2048, micro_batch=8, lr=6e-4, source="for curves that a CPU can repeat"
    ),
    ("moe", "mixtral-8x7b"): _moe(_MIXTRAL, "Mixtral 8x7B, arXiv 2401.04088"),
    ("moe", "zaya1-like"): _moe(_ZAYA, "ZAYA1-8B shape, arXiv 2511.17127"),
    ("mpt", "tiny"): _tiny(mpt.Config(layers=2, width=64, heads=4, vocab=256, positions=64)),
    ("mpt", "tiny-released"): _tiny(
        mpt.Config(layers=2, width=64, heads=4, vocab=256, alibi=True, bias=False)
    ),
    ("mpt", "125m"): _mpt(12, 768, 12, 6e-4, 16),
    ("mpt", "350m"): _mpt(24, 1024, 16, 3e-4, 8),
    ("mpt", "760m"): _mpt(24, 1536, 12, 2.5e-4, 4),
    ("mpt", "1b"): _mpt(24, 2048, 16, 2e-4, 4),
    ("mpt", "1b-1head"): _mpt(24, 2048, 1, 2e-4, 4),
    ("mpt", "3b"): _mpt(32, 2560, 20, 1.6e-4, 8),
    ("mpt", "7b"): _mpt(32, 4096, 32, 1.2e-4, 8),
    ("mpt", "7b-1head"): _mpt(32, 4096, 1, 1.2e-4, 8),
    ("mpt", "7b-released"): _mpt(32, 4096, 32, 1.2e-4, 8, vocab=50432, alibi=True, bias=False),
    ("mpt", "13b"): _mpt(40, 5120, 40, 1e-4, 8),
    ("mpt", "30b"): _mpt(48, 7168, 56, 1e-4, 8),
    ("mpt", "30b-released"): _mpt(48, 7168, 64, 1e-4, 8, vocab=50432, alibi=True, bias=False),
    ("mpt", "70b"): _mpt(80, 8192, 64, 8e-5, 4),
    ("gpt", "tiny"): _tiny(gpt.Config(layers=2, width=64, heads=4, vocab=256, positions=64)),
    ("gpt", "1.4b"): _gpt(24, 2112, 24, 2e-4),
    ("gpt", "22b"): _gpt(48, 6144, 48, 1.2e-4),
    ("gpt", "175b"): _gpt(96, 12288, 96, 6e-5),
    ("gpt", "1t"): _gpt(128, 25600, 128, 6e-5),
    ("flux", "tiny"): _tiny(_TINY_FLUX, seq_len=0, unit="images"),
    ("flux", "dev-512"): _flux(32, 10),
    ("flux", "dev-1024"): _flux(64, 2),
}


def find(family: str, size: str, *, layers: int | None = None, lean: bool = False) -> Preset:
    """The preset of this name; `layers` makes its proxy of that number of layers at full width.

    `lean` as --lean.
    """
    if (family, size) not in PRESETS:
        known = ", ".join(s for f, s in PRESETS if f == family) or f"families: {', '.join(families())}"
        raise RefusedError(f"no preset {family}/{size}; known: {known}; choose one with --model and --size")
    return changed(PRESETS[family, size], family, layers=layers, lean=lean)


def changed(preset: Preset, family: str, *, layers: int | None, lean: bool) -> Preset:
    """As --layers and --lean want this preset."""
    if lean:
        preset = dataclasses.replace(preset, config=dataclasses.replace(preset.config, lean=True))
    if layers is None:
        return preset
    if family == "flux":
        raise RefusedError(
            "--layers does not work with --model flux, which has two kinds of blocks; leave it out"
        )
    return dataclasses.replace(preset, config=dataclasses.replace(preset.config, layers=layers))


def check_length(family: str, size: str, seq_len: int | None) -> None:
    """Refuse a sequence that is longer than the model's table of learned positions.

    Without this an embedding reads beside its table: an IndexError on a CPU, on a GPU an assert of the device
    that names no cause.
    """
    preset = find(family, size)
    config, wanted = preset.config, seq_len or preset.seq_len
    if isinstance(config, mpt.Config) and not config.alibi and wanted > config.positions:
        raise RefusedError(
            f"--seq-len {wanted} is longer than the table of learned positions of --model {family} --size "
            f"{size}: expected at most {config.positions}; lower --seq-len, or take a size with ALiBi "
            "(mpt 7b-released) or a family with rotary positions (llama)"
        )


# Mistral 7B is Llama's decoder with a sliding attention window (arXiv 2310.06825).
MODELS = {"llama": llama, "mistral": llama, "moe": moe, "mpt": mpt, "gpt": gpt, "flux": flux}


def flops_per_unit(preset: Preset, seq_len: int, *, recompute: float) -> flops.Flops:
    """Floating-point operations of one token at this sequence length, or of one image.

    `recompute` is the share of the blocks whose forward runs twice.
    """
    config = preset.config
    if isinstance(config, flux.Config):
        return flops.flux(config, config.side**2, config.text_tokens, recompute=recompute)
    work = flops.gpt(config, seq_len) if isinstance(config, mpt.Config) else flops.decoder(config, seq_len)
    return flops.per_token(work, recompute=recompute)


def families() -> tuple[str, ...]:
    """The names that --model takes."""
    return tuple(dict.fromkeys(family for family, _ in PRESETS))
