"""--labels: a step has the mean over every label that is learnt, however ranks and microbatches share it."""

import random
from pathlib import Path
from typing import Any

import mosaic
import pytest
import torch
from agree import same_sums, same_training
from layout_flags import LAYOUTS, each
from torch import nn

import options
from conftest import Record
from errors import RefusedError
from fused import ops
from models.layers import LossHead

SEQ, VOCAB = 32, 128
JOB = ("--steps", "4", "--global-batch", "8", "--seq-len", f"{SEQ}", "--labels", "labels", "--data")
NAMES = ("fsdp2-accumulated", "fsdp2", "full-shard", "zero1-accumulated", "tensor", "chunked-loss")


def rows_of(drawn: random.Random, count: int = 64) -> list[dict[str, list[int]]]:
    """Rows of 2 to SEQ + 6 tokens, of which 1 to all are learnt: microbatches differ by tens of times."""
    rows = []
    for _ in range(count):
        size = drawn.choice((2, 5, SEQ // 2, SEQ, SEQ + 1, SEQ + 6))
        tokens = [drawn.randrange(VOCAB) for _ in range(size)]
        begin = drawn.choice((1, 1, size - 1))
        rows.append({"input_ids": tokens, "labels": [ops.IGNORED] * begin + tokens[begin:]})
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mosaic.saved(tmp_path_factory.mktemp("data") / "rows", rows_of(random.Random(5)))


@pytest.fixture(scope="module")
def alone(record: Record, folder: Path) -> dict[str, Any]:
    return record(1, *JOB, str(folder), "--micro-batch", "8")


@each(NAMES, quick=set())
def test_a_step_is_the_mean_over_its_labels_in_every_layout(
    layout: str, alone: dict[str, Any], folder: Path, record: Record
) -> None:
    ranks, *flags = LAYOUTS[layout]
    got = record(ranks, *JOB, str(folder), *flags)
    assert got["ranks_agree"]
    same_training(got, alone)


def test_what_fills_a_row_up_changes_nothing(alone: dict[str, Any], folder: Path, record: Record) -> None:
    longer = [word if word != f"{SEQ}" else f"{2 * SEQ}" for word in JOB]
    cut = [{name: row[name][: SEQ + 1] for name in row} for row in rows_of(random.Random(5))]
    got = record(1, *longer, str(mosaic.saved(folder.with_name("cut"), cut)), "--micro-batch", "8")
    same_training(got, alone)


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("ignored", [0.0, 0.5, 0.97, 1.0])
def test_a_head_has_the_loss_and_gradient_of_the_labels_that_are_learnt(chunks: int, ignored: float) -> None:
    torch.manual_seed(3)
    head = LossHead(nn.RMSNorm(32), nn.Linear(32, 64, bias=False), chunks=chunks)
    x, labels = torch.randn(2, 16, 32, requires_grad=True), torch.randint(64, (2, 16))
    labels[torch.rand(2, 16) < ignored] = ops.IGNORED
    learnt = labels.flatten() != ops.IGNORED
    loss = head(x, labels)
    got = torch.autograd.grad(loss, (x, *head.parameters()))
    rows = head.out(head.norm(x)).flatten(0, 1)[learnt]
    want = nn.functional.cross_entropy(rows, labels.flatten()[learnt], reduction="sum") / 32
    same_sums(loss, want, terms=32 + 64)
    same_sums(got, torch.autograd.grad(want, (x, *head.parameters())), terms=32 + 64 + 32)
    assert bool(learnt.any()) == bool(loss > 0)


BAD = {
    "no label at all": ([{"input_ids": [1, 2, 3], "labels": [ops.IGNORED] * 3}], "have no label to learn"),
    "other lengths": ([{"input_ids": [1, 2, 3], "labels": [1, 2]}], "has 3 tokens and 2 labels"),
    "no such token": ([{"input_ids": [1, 2, 3], "labels": [1, 2, 10**6]}], "labels: has tokens from 1 to"),
    "another negative": ([{"input_ids": [1, 2, 3], "labels": [1, -1, 2]}], "labels: has tokens from -1 to"),
    "no such column": ([{"input_ids": [1, 2, 3]}], "--labels labels is no column"),
}


@pytest.mark.parametrize("name", BAD)
def test_labels_that_cannot_be_meant_are_refused(name: str, tmp_path: Path, record: Record) -> None:
    rows, said = BAD[name]
    with pytest.raises(Exception, match=said):
        record(1, *JOB, str(mosaic.saved(tmp_path / "rows", rows)))


@pytest.mark.parametrize("source", ["synthetic", "text", "corpus"])
def test_labels_of_data_without_columns_are_refused(source: str, tmp_path: Path) -> None:
    import data

    (tmp_path / "a.txt").write_text("abc" * 100)
    named = str(tmp_path) if source == "corpus" else source
    with pytest.raises(RefusedError, match="--labels"):
        data.open_source(options.parse(["--labels", "labels", "--data", named]), vocab=VOCAB, seq_len=SEQ)
