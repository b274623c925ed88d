"""What is learned from: seeded sequences, a shipped text, or MosaicML streaming shards.

In: the number of a sample. Out: its tokens. A sample depends on the seed and its number alone, and step s
takes the numbers s·global_batch … (s+1)·global_batch - 1, so order and resumption do not depend on how many
GPUs there are.
"""

from __future__ import annotations

import bisect
import json
import struct
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor

TEXT = Path(__file__).with_name("text.txt")


class Source(Protocol):
    """Anything that has numbered samples."""

    def sample(self, number: int) -> Tensor:
        """Tokens [sequence + 1], int64, on the CPU."""


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """Counting with a fixed stride, restarted at random places: a rule that a model learns within a few
    steps.
    """

    vocab: int
    seq_len: int
    seed: int
    stride: int = 7
    restart: float = 0.05

    def sample(self, number: int) -> Tensor:
        """Tokens [sequence + 1] of this number."""
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        length = self.seq_len + 1
        fresh = torch.rand(length, generator=random) < self.restart
        fresh[0] = True
        start = torch.randint(self.vocab, (length,), generator=random)
        place = torch.arange(length)
        last = torch.cummax(torch.where(fresh, place, 0), 0).values
        return (start[last] + self.stride * (place - last)) % self.vocab


@dataclass(frozen=True, kw_only=True)
class Text:
    """Windows of one byte string at seeded places; a token is a byte."""

    data: bytes
    seq_len: int
    seed: int

    def sample(self, number: int) -> Tensor:
        """Tokens [sequence + 1] of this number."""
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        start = int(torch.randint(len(self.data) - self.seq_len, (), generator=random))
        return torch.tensor(list(self.data[start : start + self.seq_len + 1]))


class Shards:
    """A folder in MosaicML streaming's MDS format (index.json, uncompressed shards), column `tokens` of
    bytes.

    A shard is: count (uint32), count + 1 offsets (uint32), then the samples; a variable-length column is
    preceded by its length (uint32). Format: mosaicml/streaming, streaming/base/format/mds.
    """

    def __init__(self, folder: Path, seq_len: int, seed: int) -> None:
        index = json.loads((folder / "index.json").read_text())
        self.files = [folder / shard["raw_data"]["basename"] for shard in index["shards"]]
        self.ends = list(accumulate(shard["samples"] for shard in index["shards"]))
        self.seq_len, self.seed = seq_len, seed
        self.order: dict[int, Tensor] = {}

    def sample(self, number: int) -> Tensor:
        """Tokens [sequence + 1]; each pass over the shards has its own seeded order."""
        epoch, place = divmod(number, self.ends[-1])
        if epoch not in self.order:
            random = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self.order = {epoch: torch.randperm(self.ends[-1], generator=random)}
        data = self.raw(int(self.order[epoch][place]))
        if len(data) < self.seq_len + 1:
            raise ValueError(f"sample {place} holds {len(data)} tokens, --seq-len wants {self.seq_len + 1}")
        return torch.tensor(list(data[: self.seq_len + 1]))

    def raw(self, place: int) -> bytes:
        """The bytes of the sample at this place of the folder."""
        shard = bisect.bisect_right(self.ends, place)
        local = place - (self.ends[shard - 1] if shard else 0)
        with self.files[shard].open("rb") as file:
            file.seek(4 + 4 * local)
            begin, end = struct.unpack("<2I", file.read(8))
            file.seek(begin)
            return file.read(end - begin)[4:]


def write_shards(folder: Path, text: bytes, *, sample_bytes: int, per_shard: int = 64) -> None:
    """Cut a text into samples and store them as MDS shards that mosaicml-streaming reads too."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = [text[i : i + sample_bytes] for i in range(0, len(text) - sample_bytes + 1, sample_bytes)]
    shards = [
        _write_shard(folder, number, pieces[begin : begin + per_shard])
        for number, begin in enumerate(range(0, len(pieces), per_shard))
    ]
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


def _write_shard(folder: Path, number: int, pieces: list[bytes]) -> dict:
    basename, start = f"shard.{number:05}.mds", 4 + 4 * (len(pieces) + 1)
    offsets = accumulate((4 + len(piece) for piece in pieces), initial=start)
    body = b"".join(struct.pack("<I", len(piece)) + piece for piece in pieces)
    head = struct.pack(f"<{len(pieces) + 2}I", len(pieces), *offsets)
    (folder / basename).write_bytes(head + body)
    return {
        "column_encodings": ["bytes"],
        "column_names": ["tokens"],
        "column_sizes": [None],
        "compression": None,
        "format": "mds",
        "hashes": [],
        "size_limit": None,
        "version": 2,
        "zip_data": None,
        "raw_data": {"basename": basename, "bytes": len(head + body), "hashes": {}},
        "samples": len(pieces),
    }


def open_source(name: str, *, vocab: int, seq_len: int, seed: int) -> Source:
    """The source that --data names."""
    if name == "synthetic":
        return Synthetic(vocab=vocab, seq_len=seq_len, seed=seed)
    if name == "text":
        return Text(data=TEXT.read_bytes(), seq_len=seq_len, seed=seed)
    return Shards(Path(name), seq_len, seed)


def batch(source: Source, numbers: range, device: torch.device) -> dict[str, Tensor]:
    """`tokens` and `labels` [samples, sequence] of these samples: labels are the next tokens."""
    rows = torch.stack([source.sample(number) for number in numbers])
    if device.type == "cuda":
        rows = rows.pin_memory().to(device, non_blocking=True)
    return {"tokens": rows[:, :-1], "labels": rows[:, 1:]}
