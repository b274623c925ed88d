"""What a language model thinks of texts: log-probabilities and greedy continuations, and tokenizers.

In: a model with `logits`, pairs of token lists. Out: a log-probability (nat) each, and whether it is greedy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor, nn


class Bytes:
    """The tokenizer of the text that is shipped: a token is a byte, a line ends a text."""

    end = 10
    size = 256

    def encode(self, text: str) -> list[int]:
        """UTF-8."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """UTF-8; what is none is replaced."""
        return bytes(tokens).decode(errors="replace")


class FromFolder:
    """A tokenizer that transformers reads from a folder; nothing is downloaded."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.inner = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if self.inner.eos_token_id is None:
            raise RefusedError(f"{folder}: the tokenizer names no end of text (eos_token)")
        self.end, self.size = self.inner.eos_token_id, len(self.inner)

    def encode(self, text: str) -> list[int]:
        """Without special tokens: a continuation has to be the rest of the whole."""
        return self.inner.encode(text, add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these tokens."""
        return self.inner.decode(tokens)


@dataclass(frozen=True)
class Scorer:
    """A model with how it is run: `length` positions and `batch` rows at most."""

    model: nn.Module
    length: int
    batch: int
    device: torch.device

    def scores(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """For each (context, continuation): its log-probability (nat), and whether it is the greedy one.

        Contexts lose their beginning where the pair is too long.

        Raises:
            RefusedError: A continuation alone is longer than the model reads, or a context is empty.
            ValueError: The model gives a number that is not finite.
        """
        found: dict[int, tuple[float, bool]] = {}
        order = sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))
        for begin in range(0, len(order), self.batch):
            places = order[begin : begin + self.batch]
            found |= zip(places, self._batch([pairs[i] for i in places]), strict=True)
        return [found[i] for i in range(len(pairs))]

    def _batch(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        for context, continuation in pairs:
            if not context or len(continuation) > self.length:
                size = f"{len(context)} + {len(continuation)}"
                raise RefusedError(f"a text of {size} tokens; the model reads {self.length} at once")
        rows = [(context + continuation)[-(self.length + 1) :] for context, continuation in pairs]
        # What stands right of a row cannot change it: attention is causal.
        logits = self.logits([row[:-1] for row in rows])
        out = []
        for row, (_, continuation), scores in zip(rows, pairs, logits, strict=True):
            last = len(row) - 1
            part = scores[last - len(continuation) : last].float().log_softmax(-1)
            want = torch.tensor(continuation, device=part.device)
            total = float(part.gather(-1, want[:, None]).sum())
            if not math.isfinite(total):
                raise ValueError(f"the model gives a log-probability of {total}")
            out.append((total, bool((part.argmax(-1) == want).all())))
        return out

    @torch.inference_mode()
    def logits(self, rows: Sequence[list[int]]) -> Tensor:
        """[rows, longest row, vocabulary] of rows padded on the right."""
        width = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=self.device)
        return self.model.logits(tokens)

    def continued(self, tokens: list[int], count: int, ends: int) -> list[int]:
        """The greedy continuation, up to `count` tokens or the end of text."""
        new: list[int] = []
        while len(new) < count and (not new or new[-1] != ends):
            new.append(int(self.logits([(tokens + new)[-self.length :]])[0, -1].argmax()))
        return new
