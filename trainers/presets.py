"""The one table of models: (family, size) to a shape and how it is trained by default.

In: names. Out: a Preset. A `proxy` keeps every width and has fewer layers, for models larger than the
machine.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import flops
from errors import RefusedError
from models import llama


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model and its training defaults; `source` says who fixed the shape."""

    config: Any
    seq_len: int
    micro_batch: int
    lr: float
    source: str
    unit: str = "tokens"


def _llama(layers: int, width: int, heads: int, ffn: int, **other: Any) -> llama.Config:
    return llama.Config(layers=layers, width=width, heads=heads, kv_heads=8, ffn=ffn, vocab=128256, **other)


_TITAN = "pytorch/torchtitan models/llama3"
_TINY = llama.Config(layers=2, width=64, heads=4, kv_heads=2, ffn=160, vocab=256, head_dim=16)

PRESETS: dict[tuple[str, str], Preset] = {
    ("llama", "tiny"): Preset(
        config=_TINY, seq_len=64, micro_batch=4, lr=3e-3, source="runs on a CPU in seconds"
    ),
    ("llama", "1b"): Preset(
        config=_llama(16, 2048, 32, 8192, head_dim=64, tied=True),
        seq_len=8192,
        micro_batch=2,
        lr=3e-4,
        source=_TITAN,
    ),
    ("llama", "8b"): Preset(
        config=_llama(32, 4096, 32, 14336), seq_len=8192, micro_batch=2, lr=3e-4, source=_TITAN
    ),
    ("llama", "70b"): Preset(
        config=_llama(80, 8192, 64, 28672), seq_len=8192, micro_batch=1, lr=1.5e-4, source=_TITAN
    ),
}


def find(family: str, size: str, *, layers: int | None = None) -> Preset:
    """The preset of this name; `layers` makes it a width-true proxy."""
    if (family, size) not in PRESETS:
        known = ", ".join(s for f, s in PRESETS if f == family) or f"families: {', '.join(families())}"
        raise RefusedError(f"no preset {family}/{size}; known: {known}")
    preset = PRESETS[family, size]
    if layers is None:
        return preset
    return dataclasses.replace(preset, config=dataclasses.replace(preset.config, layers=layers))


MODELS = {"llama": llama}


def flops_per_unit(preset: Preset, seq_len: int, *, recompute: bool) -> flops.Flops:
    """Operations of one token at this sequence length, or of one image."""
    return flops.per_token(flops.decoder(preset.config, seq_len), recompute=recompute)


def families() -> tuple[str, ...]:
    """The names that --model takes."""
    return tuple(dict.fromkeys(family for family, _ in PRESETS))
