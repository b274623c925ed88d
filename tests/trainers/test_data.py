"""Samples depend on their number alone."""

from pathlib import Path
from types import SimpleNamespace

import mosaic
import numpy as np
import pytest
import torch
from figures import figure

import data
import metrics
import options
import presets


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


def test_each_pass_reads_every_sample_once_in_its_own_order(tmp_path: Path) -> None:
    pieces = np.frombuffer(data.TEXT.read_bytes()[:2300], np.uint8).reshape(-1, 100)
    mosaic.write(tmp_path, "ndarray:uint8", list(pieces), size_limit=900)
    assert len(list(tmp_path.glob("shard.*"))) > 2
    source = data.open_source(options.parse(["--data", str(tmp_path)]), vocab=256, seq_len=99)
    passes = [[bytes(source.sample(e * 23 + i).tolist()) for i in range(23)] for e in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(bytes(piece) for piece in pieces)
    assert passes[0] != passes[1]


def test_what_is_read_ahead_is_what_would_be_read() -> None:
    parsed = options.parse(["--data", "text", "--global-batch", "4"])
    preset, cpu = presets.find("llama", "tiny"), torch.device("cpu")
    plan = SimpleNamespace(seq_len=16)
    feeds = [data.Feed(parsed, preset, plan) for _ in range(2)]
    for begin in (0, 4, 8, 40):  # the last one is not what was read ahead
        numbers = range(begin, begin + 4)
        with_thread = feeds[0].batch(numbers, cpu, then=range(begin + 4, begin + 8))
        without = feeds[1].batch(numbers, cpu)
        assert torch.equal(with_thread["tokens"], without["tokens"])


def test_cost_of_a_trillion_tokens_is_the_guides() -> None:
    assert metrics.cost(2750, 5.01)["dollars_per_1t_tokens"] == figure(506e3, rel=2e-3)
    assert metrics.cost(2500, 2.05)["dollars_per_1t_tokens"] == figure(228e3, rel=2e-3)
