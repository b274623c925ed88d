"""Samples depend on their number alone, and the shipped shards are MosaicML's format."""

import struct
from pathlib import Path

import pytest
import torch

import data
import metrics


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_step_has_the_same_samples_on_any_number_of_ranks(ranks: int) -> None:
    source = data.Synthetic(vocab=64, seq_len=16, seed=9)
    per_rank = 8 // ranks
    numbers = [range(8 + r * per_rank, 8 + (r + 1) * per_rank) for r in range(ranks)]
    rows = torch.cat([data.batch(source, part, torch.device("cpu"))["tokens"] for part in numbers])
    assert torch.equal(rows, data.batch(source, range(8, 16), torch.device("cpu"))["tokens"])


def test_labels_are_the_next_tokens_and_not_the_inputs() -> None:
    batch = data.batch(data.Synthetic(vocab=64, seq_len=16, seed=9), range(2), torch.device("cpu"))
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    assert not torch.equal(batch["tokens"], batch["labels"])


def test_shards_hold_the_text_in_the_published_layout(tmp_path: Path) -> None:
    text = data.TEXT.read_bytes()
    data.write_shards(tmp_path, text, sample_bytes=100, per_shard=7)
    raw = (tmp_path / "shard.00000.mds").read_bytes()
    count, first, second = struct.unpack("<3I", raw[:12])
    assert (count, first) == (7, 4 + 4 * 8)
    assert raw[first + 4 : second] == text[:100]


def test_each_epoch_reads_every_sample_once_in_its_own_order(tmp_path: Path) -> None:
    data.write_shards(tmp_path, data.TEXT.read_bytes(), sample_bytes=100, per_shard=7)
    source = data.Shards(tmp_path, seq_len=99, seed=1)
    count = source.ends[-1]
    epochs = [[bytes(source.sample(e * count + i).tolist()) for i in range(count)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]


def test_cost_of_a_trillion_tokens_is_the_guides() -> None:
    assert metrics.cost(2750, 5.01)["dollars_per_1t_tokens"] == pytest.approx(506e3, rel=2e-3)
    assert metrics.cost(2500, 2.05)["dollars_per_1t_tokens"] == pytest.approx(228e3, rel=2e-3)
