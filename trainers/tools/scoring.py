"""Scores of texts by a language model: log-probabilities and greedy continuations; and the tokenizers for it.

In: a model with `logits`, pairs of token lists. Out: for each its log-probability (nat), and whether it is
greedy.
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
    """The tokenizer of the shipped text: a token is a byte, the newline ends a text."""

    end = 10
    size = 256

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of the text."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """The text; bytes that are not UTF-8 are replaced."""
        return bytes(tokens).decode(errors="replace")


class FromFolder:
    """A tokenizer that transformers reads from a folder; nothing is downloaded."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.inner = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if self.inner.eos_token_id is None:
            raise RefusedError(
                f"{folder}: the tokenizer has no eos_token; set one in its tokenizer_config.json"
            )
        self.end, self.size = self.inner.eos_token_id, len(self.inner)

    def encode(self, text: str) -> list[int]:
        """Tokens without special ones: a context and its continuation must join to the whole text."""
        tokens: list[int] = self.inner.encode(text, add_special_tokens=False)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these tokens."""
        return str(self.inner.decode(tokens))


@dataclass(frozen=True)
class Scorer:
    """A model, and the size of one call: at most `length` positions and `batch` rows."""

    model: nn.Module
    length: int
    batch: int
    device: torch.device

    def scores(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """The log-probability (nat) of each pair's continuation, and whether it is greedy.

        A pair is (context, continuation).

        Where a pair is longer than the model reads, the context loses its beginning.

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
                raise RefusedError(
                    f"a context and continuation of {size} tokens: expected a context of 1 token or more "
                    f"and a continuation of at most {self.length}, which the model reads at once"
                )
        rows = [(context + continuation)[-(self.length + 1) :] for context, continuation in pairs]
        # Padding on the right cannot change a row: attention is causal.
        logits = self.logits([row[:-1] for row in rows])
        out = []
        for row, (_, continuation), scores in zip(rows, pairs, logits, strict=True):
            last = len(row) - 1
            part = scores[last - len(continuation) : last].float().log_softmax(-1)
            want = torch.tensor(continuation, device=part.device)
            total = float(part.gather(-1, want[:, None]).sum())
            if not math.isfinite(total):
                raise ValueError(f"the model's log-probability is {total}, expected a finite number")
            out.append((total, bool((part.argmax(-1) == want).all())))
        return out

    @torch.inference_mode()
    def logits(self, rows: Sequence[list[int]]) -> Tensor:
        """[rows, longest row, vocabulary] of rows padded on the right."""
        width = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=self.device)
        found: Tensor = self.model.logits(tokens)
        return found

    def continued(self, tokens: list[int], count: int, ends: int) -> list[int]:
        """The greedy continuation, up to `count` tokens or the end of text."""
        new: list[int] = []
        while len(new) < count and (not new or new[-1] != ends):
            new.append(int(self.logits([(tokens + new)[-self.length :]])[0, -1].argmax()))
        return new
