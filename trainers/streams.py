"""Documents joined to one stream of tokens, cut into samples. In: texts or rows of tokens. Out: samples.

The stream is made once a host and kept in the cache (cache.py): tokens in two or four bytes each, and where
each document begins. Samples are windows of it that do not overlap, in a seeded order that is new in each
pass. With `masked`, a sample also says which document each token is of, so that attention can stay inside.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

import cache
import order
from errors import RefusedError
from fused.ops import IGNORED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from arrow import Arrow
    from shards import Shards

TEXTS = (".txt", ".md", ".jsonl")
# How tokenizers name the token that ends a document.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_BATCH = 1000  # documents that a tokenizer gets at once; it uses all cores for them


class ByteTokenizer:
    """A token is a byte of UTF-8; byte 0, which no text has, ends a document."""

    end, identity = 0, "bytes"

    def encode(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        """The token ids of each text."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]


class FileTokenizer:
    """A tokenizer.json of Hugging Face `tokenizers`."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as Inner
        except ImportError as error:
            raise RefusedError(f"--tokenizer {path} needs tokenizers; pip install tokenizers") from error
        if not path.is_file():
            raise RefusedError(f"--tokenizer {path}: no such file; name a tokenizer.json, or bytes")
        self.inner = Inner.from_file(str(path))
        ends = [self.inner.token_to_id(name) for name in ENDS]
        known = [number for number in ends if number is not None]
        if not known:
            raise RefusedError(
                f"--tokenizer {path}: no token ends a document; it has none of {', '.join(ENDS)}"
            )
        self.end = known[0]
        self.identity = hashlib.sha256(path.read_bytes()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        """The token ids of each text, without special ones."""
        made = self.inner.encode_batch(list(texts), add_special_tokens=False)
        return [np.asarray(one.ids, np.int64) for one in made]


Tokenizer: TypeAlias = "ByteTokenizer | FileTokenizer"


def tokenizer(name: str | None) -> Tokenizer:
    """The tokenizer that --tokenizer names."""
    return ByteTokenizer() if name in {None, "bytes"} else FileTokenizer(Path(str(name)))


class TextFiles:
    """Documents of a file or a folder: a line of .jsonl with the key `text`, or a whole other file."""

    is_text = True

    def __init__(self, path: Path) -> None:
        self.path = path
        inside = sorted(p for p in path.rglob("*") if p.suffix in TEXTS) if path.is_dir() else [path]
        if not inside:
            raise RefusedError(
                f"{path}: unknown format: no MosaicML streaming index.json, no data set of "
                f"Hugging Face, and no {', '.join(TEXTS)}"
            )
        self.files = inside

    def __iter__(self) -> Iterator[str]:
        """Each document."""
        for path in self.files:
            if path.suffix != ".jsonl":
                yield path.read_text(errors="replace")
                continue
            with path.open() as lines:
                yield from (
                    _text_of(path, number, line) for number, line in enumerate(lines, 1) if line.strip()
                )


def _text_of(path: Path, number: int, line: str) -> str:
    try:
        return str(json.loads(line)["text"])
    except (ValueError, KeyError, TypeError) as error:
        raise RefusedError(f'{path}:{number}: expected {{"text": …}}, got {line[:60]!r}') from error


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Joined documents. `starts`: the place of each document's first token."""

    tokens: npt.NDArray[Any]
    starts: npt.NDArray[np.int64]
    digest: str
    seq_len: int
    seed: int
    masked: bool

    @property
    def rows(self) -> int:
        """How many samples a pass has."""
        return (len(self.tokens) - 1) // self.seq_len

    def sample(self, number: int) -> Tensor:
        """Tokens [sequence + 1] of this number; masked: [2, sequence + 1], and their documents."""
        begin = order.row(number, self.rows, self.seed) * self.seq_len
        window = self.tokens[begin : begin + self.seq_len + 1].astype(np.int64)
        if not self.masked:
            return torch.from_numpy(window)
        places = np.arange(begin, begin + self.seq_len + 1)
        documents = np.searchsorted(self.starts, places, side="right")
        return torch.from_numpy(np.stack([window, documents - documents[0]]))


@dataclass(frozen=True, kw_only=True)
class Rowwise:
    """Each row of a data set is a sample, cut to the sequence. `labels_of`: each token as a label."""

    rows_of: Arrow | Shards
    seq_len: int
    seed: int
    vocab: int
    name: str
    labels_of: Callable[[int], npt.NDArray[Any]] | None = None

    def sample(self, number: int) -> Tensor:
        """Tokens [sequence + 1] of this number; with labels [3, sequence + 1]."""
        place = order.row(number, len(self.rows_of), self.seed)
        row = self.rows_of.tokens(place)
        if self.labels_of is not None:
            return self._with_labels(row, self.labels_of(place), f"{self.name}: row {place}")
        if len(row) < self.seq_len + 1:
            raise RefusedError(
                f"{self.name}: row {place} has {len(row)} tokens, --seq-len {self.seq_len} needs "
                f"{self.seq_len + 1}; lower it, or join rows with --pack concat or masked"
            )
        return torch.from_numpy(
            in_vocabulary(row[: self.seq_len + 1], self.vocab, f"{self.name}: row {place}")
        )

    def _with_labels(self, row: npt.NDArray[Any], labels: npt.NDArray[Any], where: str) -> Tensor:
        """A shorter row is filled up with tokens of no label: attention is causal, so nothing sees them."""
        if len(labels) != len(row):
            raise RefusedError(f"{where} has {len(row)} tokens and {len(labels)} labels; expected as many")
        in_vocabulary(labels[labels != IGNORED], self.vocab, f"{where}, labels:")
        size = min(len(row), self.seq_len + 1)
        made = np.zeros((3, self.seq_len + 1), np.int64)
        made[2] = IGNORED
        made[0, :size] = in_vocabulary(row[:size], self.vocab, where)
        made[2, :size] = labels[:size]
        return torch.from_numpy(made)


def in_vocabulary(row: npt.NDArray[Any], vocab: int, where: str) -> npt.NDArray[np.int64]:
    """The row as int64. Raises RefusedError for a token that the model does not have."""
    if len(row) and not (row.min() >= 0 and row.max() < vocab):
        raise RefusedError(
            f"{where} has tokens from {row.min()} to {row.max()}, the model knows 0 to {vocab - 1}; "
            "check --token-type, the tokenizer and --model"
        )
    return row.astype(np.int64)


def stream(
    documents: Iterable[npt.NDArray[Any]], identity: str, *, vocab: int, seq_len: int, seed: int, masked: bool
) -> Stream:
    """The stream of these documents; `identity` names them and how they were tokenized."""
    with cache.making(cache.key("stream", identity)) as folder:
        if not (folder / "facts.json").exists():
            _write(folder, documents)
        facts = json.loads((folder / "facts.json").read_text())
    tokens = np.memmap(folder / "tokens.bin", dtype=facts["dtype"], mode="r")
    if facts["largest"] >= vocab:
        raise RefusedError(
            f"the data has token {facts['largest']}, the model knows 0 to {vocab - 1}; "
            "take the tokenizer of the model, or another --model"
        )
    if len(tokens) <= seq_len:
        raise RefusedError(
            f"the data has {len(tokens)} tokens in all, --seq-len {seq_len} needs {seq_len + 1}"
        )
    starts = np.fromfile(folder / "starts.bin", dtype=np.int64)
    return Stream(
        tokens=tokens, starts=starts, digest=facts["digest"], seq_len=seq_len, seed=seed, masked=masked
    )


def _write(folder: Path, documents: Iterable[npt.NDArray[Any]]) -> None:
    """Four bytes a token: two would need the largest token first."""
    starts, place, largest, digest = [], 0, 0, hashlib.sha256()
    with (folder / "tokens.bin").open("wb") as out:
        for document in documents:
            starts.append(place)
            part = document.astype("<u4").tobytes()
            digest.update(part)
            out.write(part)
            place += len(document)
            largest = max(largest, int(document.max(initial=0)))
    np.asarray(starts, dtype=np.int64).tofile(folder / "starts.bin")
    facts = {"dtype": "<u4", "largest": largest, "digest": digest.hexdigest(), "documents": len(starts)}
    partial = folder / "facts.partial"
    partial.write_text(json.dumps(facts))
    partial.rename(folder / "facts.json")


def tokenized(texts: Iterable[str], by: Tokenizer) -> Iterator[npt.NDArray[Any]]:
    """The token ids of each text, with the token that ends it."""
    waiting: list[str] = []
    for text in texts:
        waiting.append(text)
        if len(waiting) == _BATCH:
            yield from (np.append(ids, by.end) for ids in by.encode(waiting))
            waiting = []
    yield from (np.append(ids, by.end) for ids in by.encode(waiting))
