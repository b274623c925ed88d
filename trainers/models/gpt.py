"""GPT as Frontier trained it (arXiv 2312.12705): MPT's benchmark variant with GPT-2's padded vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from models import mpt
from models.mpt import Model

__all__ = ["Config", "Model"]


@dataclass(frozen=True, kw_only=True)
class Config(mpt.Config):
    """Shape; Megatron-LM pads GPT-2's 50257 tokens to 51200."""

    vocab: int = 51200
