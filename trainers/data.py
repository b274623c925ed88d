"""Training data: seeded sequences, the shipped text, or MosaicML streaming shards.

In: the number of a sample. Out: its tokens. A sample depends on the seed and its number only, and step s
takes the numbers s x global_batch to (s + 1) x global_batch - 1. So order and resumption do not depend on the
number of GPUs.
"""

from __future__ import annotations

import bisect
import json
import struct
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

import presets

if TYPE_CHECKING:
    from torch import Tensor

    from options import Options
    from plan import Plan
    from presets import Preset

TEXT = Path(__file__).with_name("text.txt")


class Source(Protocol):
    """Numbered samples."""

    def sample(self, number: int) -> Tensor:
        """Tokens [sequence + 1], int64, on the CPU."""


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """Counting with a fixed stride, restarted at random places: a rule that a model learns in a few steps."""

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
        position = torch.arange(length)
        last = torch.cummax(torch.where(fresh, position, 0), 0).values
        return (start[last] + self.stride * (position - last)) % self.vocab


@dataclass(frozen=True, kw_only=True)
class Text:
    """Windows of one text, which begin at seeded random places; a token is a byte."""

    data: bytes
    seq_len: int
    seed: int

    def sample(self, number: int) -> Tensor:
        """Tokens [sequence + 1] of this number."""
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        start = int(torch.randint(len(self.data) - self.seq_len, (), generator=random))
        return torch.tensor(list(self.data[start : start + self.seq_len + 1]))


class Shards:
    """A folder in MosaicML streaming's MDS format: index.json and uncompressed shards, column `tokens` of
    bytes.

    A shard holds count (uint32), count + 1 offsets (uint32), then the samples; a column of variable length
    begins with its length (uint32). Format: mosaicml/streaming, streaming/base/format/mds.
    """

    def __init__(self, folder: Path, seq_len: int, seed: int) -> None:
        index = json.loads((folder / "index.json").read_text())
        self.files = [folder / shard["raw_data"]["basename"] for shard in index["shards"]]
        self.ends = list(accumulate(shard["samples"] for shard in index["shards"]))
        self.seq_len, self.seed = seq_len, seed
        self.order: dict[int, Tensor] = {}

    def sample(self, number: int) -> Tensor:
        """Tokens [sequence + 1] of this number. Each pass over the shards has its own seeded order."""
        epoch, place = divmod(number, self.ends[-1])
        if epoch not in self.order:
            random = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self.order = {epoch: torch.randperm(self.ends[-1], generator=random)}
        data = self.raw(int(self.order[epoch][place]))
        if len(data) < self.seq_len + 1:
            raise ValueError(
                f"sample {place} has {len(data)} tokens, --seq-len {self.seq_len} needs "
                f"{self.seq_len + 1}; lower it"
            )
        return torch.tensor(list(data[: self.seq_len + 1]))

    def raw(self, place: int) -> bytes:
        """The bytes of the sample at this place in the folder."""
        shard = bisect.bisect_right(self.ends, place)
        local = place - (self.ends[shard - 1] if shard else 0)
        with self.files[shard].open("rb") as file:
            file.seek(4 + 4 * local)
            begin, end = struct.unpack("<2I", file.read(8))
            file.seek(begin)
            sample: bytes = file.read(end - begin)
            return sample[4:]


def write_shards(folder: Path, text: bytes, *, sample_bytes: int, per_shard: int = 64) -> None:
    """Cut a text into samples and write them as MDS shards, which mosaicml-streaming reads too."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = [text[i : i + sample_bytes] for i in range(0, len(text) - sample_bytes + 1, sample_bytes)]
    shards = [
        _write_shard(folder, number, pieces[begin : begin + per_shard])
        for number, begin in enumerate(range(0, len(pieces), per_shard))
    ]
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


def _write_shard(folder: Path, number: int, pieces: list[bytes]) -> dict[str, Any]:
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


class Feed:
    """Batches of a family: tokens and labels for text; the family itself makes other inputs (FLUX)."""

    def __init__(self, options: Options, preset: Preset, plan: Plan) -> None:
        self.family: Any = presets.MODELS[options.model]
        self.preset, self.seed = preset, options.seed
        self.drawn_on = torch.device("cpu") if options.portable else None
        if not hasattr(self.family, "batch"):
            vocab = preset.config.vocab
            self.source = open_source(options.data, vocab=vocab, seq_len=plan.seq_len, seed=options.seed)

    def batch(self, numbers: range, device: torch.device) -> dict[str, Tensor]:
        """Keyword arguments of the model's forward, on the device."""
        if hasattr(self.family, "batch"):
            made = self.family.batch(self.preset.config, numbers, self.seed, self.drawn_on or device)
            return {name: value.to(device) for name, value in made.items()}
        return batch(self.source, numbers, device)
