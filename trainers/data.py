"""Training data: seeded sequences, the shipped text, or what a user brings in a folder.

In: the number of a sample. Out: its tokens. A sample depends on the seed and its number only, and step s
takes the numbers s x global_batch to (s + 1) x global_batch - 1. So order and resumption do not depend on the
number of GPUs.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

import presets
from errors import RefusedError
from fused.ops import IGNORED

if TYPE_CHECKING:
    from torch import Tensor

    from options import Options
    from plan import Plan
    from presets import Preset

TEXT = Path(__file__).with_name("text.txt")


class Source(Protocol):
    """Numbered samples."""

    def sample(self, number: int) -> Tensor:
        """Tokens [sequence + 1], int64, on the CPU; [2, sequence + 1] with the document of each token.

        With labels of its own [3, sequence + 1]: tokens, zeros, and what each token is as a label.
        """


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


def open_source(options: Options, *, vocab: int, seq_len: int) -> Source:
    """The source that --data names."""
    if options.data in {"synthetic", "text"}:
        if options.pack or options.labels:
            raise RefusedError(
                f"--pack and --labels are for rows of a data set, and --data {options.data} has none; "
                "leave them out"
            )
        if options.data == "synthetic":
            return Synthetic(vocab=vocab, seq_len=seq_len, seed=options.seed)
        return Text(data=TEXT.read_bytes(), seq_len=seq_len, seed=options.seed)
    try:
        import folders
    except ImportError as error:
        raise RefusedError(f"--data {options.data} needs {error.name}; pip install {error.name}") from error
    found: Source = folders.open_path(options, vocab=vocab, seq_len=seq_len)
    return found


def batch(source: Source, numbers: range, device: torch.device) -> dict[str, Tensor]:
    """`tokens` and `labels` [samples, sequence] of these samples: labels are the next tokens.

    `documents`, where the source knows them: the place where each one begins (`bounds`).
    """
    return on_device(stacked(source, numbers, pin=device.type == "cuda"), device)


def stacked(source: Source, numbers: range, *, pin: bool) -> Tensor:
    """The samples [samples, …, sequence + 1] on the host."""
    rows = torch.stack([source.sample(number) for number in numbers])
    return rows.pin_memory() if pin else rows


def on_device(rows: Tensor, device: torch.device) -> dict[str, Tensor]:
    """The inputs of a model from stacked samples."""
    begins = bounds(rows[:, 1, :-1]) if rows.ndim == 3 and rows.shape[1] == 2 else None
    rows = rows.to(device, non_blocking=True)
    if rows.ndim == 2:
        return {"tokens": rows[:, :-1], "labels": rows[:, 1:]}
    tokens = rows[:, 0]
    if begins is None:
        return {"tokens": tokens[:, :-1], "labels": rows[:, 2, 1:]}
    documents = begins.to(device, non_blocking=True)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "documents": documents}


def bounds(documents: Tensor) -> Tensor:
    """Where each document begins in the samples side by side, and their end; int32, on the host.

    `documents` [samples, sequence]: the number of each token's document. None goes on in the next sample.
    """
    new = torch.ones_like(documents, dtype=torch.bool)
    new[:, 1:] = documents[:, 1:] != documents[:, :-1]
    found = torch.cat((new.flatten().nonzero()[:, 0], torch.tensor([documents.numel()]))).int()
    return found.pin_memory() if documents.is_pinned() else found


class Feed:
    """Batches of a family: tokens and labels for text; the family itself makes other inputs (FLUX).

    While a step runs, a thread reads the samples of the next one.
    """

    def __init__(self, options: Options, preset: Preset, plan: Plan) -> None:
        self.family: Any = presets.MODELS[options.model]
        self.options, self.preset, self.seed = options, preset, options.seed
        self.drawn_on = torch.device("cpu") if options.portable else None
        self.reader = ThreadPoolExecutor(1)
        self.ahead: tuple[range, Future[Tensor]] | None = None
        self.counted: dict[range, Tensor] = {}  # samples of this step that were read to count their labels
        self.source: Source | None = None
        if not hasattr(self.family, "batch"):
            self.source = open_source(options, vocab=preset.config.vocab, seq_len=plan.seq_len)
        elif options.data != "synthetic":
            raise RefusedError(f"--model {options.model} makes its own inputs; leave --data out")

    @property
    def digest(self) -> str | None:
        """Of the tokens, where they were read into one stream: the same one means the same data."""
        return getattr(self.source, "digest", None)

    def batch(self, numbers: range, device: torch.device, *, then: range | None = None) -> dict[str, Tensor]:
        """Keyword arguments of the model's forward, on the device. `then`: the samples of the next call."""
        if self.source is None:
            made = self.family.batch(self.preset.config, numbers, self.seed, self.drawn_on or device)
            return {name: value.to(device) for name, value in made.items()}
        pin = device.type == "cuda"
        rows = self.counted.pop(numbers, None)
        if rows is None:
            rows = self._rows(self.source, numbers, pin=pin)
        if then and then not in self.counted:
            self.ahead = (then, self.reader.submit(stacked, self.source, then, pin=pin))
        return on_device(rows, device)

    def share(self, microbatches: list[range], device: torch.device) -> float:
        """What the loss of each of these microbatches is multiplied by: their mean is that over all labels.

        1/number of microbatches where every position has a label. Else it is larger by the positions of all
        ranks over their labels: ranks and microbatches with few labels count little. A collective call with
        --labels; `batch` then takes what was read.
        """
        if self.options.labels is None or self.source is None:
            return 1 / len(microbatches)
        pin = device.type == "cuda"
        self.counted = {numbers: self._rows(self.source, numbers, pin=pin) for numbers in microbatches}
        labels = [rows[:, 2, 1:] for rows in self.counted.values()]
        learnt = torch.tensor([sum(int((x != IGNORED).sum()) for x in labels), labels[0].numel()])
        dist.all_reduce(learnt)  # tensor ranks have the same samples: both are counted as often
        if not learnt[0]:
            raise RefusedError(
                f"samples {microbatches[0].start} and on have no label to learn: all of --labels "
                f"{self.options.labels} are {IGNORED}; check the column, or raise --global-batch"
            )
        return float(learnt[1] / learnt[0])

    def _rows(self, source: Source, numbers: range, *, pin: bool) -> Tensor:
        ahead, self.ahead = self.ahead, None
        if ahead is not None and ahead[0] == numbers:
            return ahead[1].result()
        return stacked(source, numbers, pin=pin)
