"""Mistral 7B: Llama's decoder with a sliding attention window (arXiv 2310.06825).

Names and conversion are Llama's.
"""

from __future__ import annotations

from models.llama import Config, Model, from_transformers, to_transformers

__all__ = ["Config", "Model", "from_transformers", "to_transformers"]
