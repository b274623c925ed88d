"""--labels, and heads that hold no full logits or share the vocabulary: loss and gradients stay the same."""

import dataclasses
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mosaic
import pytest
import torch
from agree import same_sums, same_training
from layout_flags import LAYOUTS, each
from torch import nn

import initial
import options
import presets
import whole
from conftest import Record
from errors import RefusedError
from fused import ops
from layouts import job, prepare
from models import layers
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
def folder(tmp_path_factory) -> Path:
    return mosaic.saved(tmp_path_factory.mktemp("data") / "rows", rows_of(random.Random(5)))


@pytest.fixture(scope="module")
def alone(record: Record, folder: Path) -> dict[str, Any]:
    return record(1, *JOB, str(folder), "--micro-batch", "8")


@each(NAMES, quick=set())
def test_a_step_is_the_mean_over_its_labels_in_every_layout(layout, alone, folder, record):
    ranks, *flags = LAYOUTS[layout]
    got = record(ranks, *JOB, str(folder), *flags)
    assert got["ranks_agree"]
    same_training(got, alone)


def test_what_fills_a_row_up_changes_nothing(alone, folder, record):
    longer = [word if word != f"{SEQ}" else f"{2 * SEQ}" for word in JOB]
    cut = [{name: row[name][: SEQ + 1] for name in row} for row in rows_of(random.Random(5))]
    got = record(1, *longer, str(mosaic.saved(folder.with_name("cut"), cut)), "--micro-batch", "8")
    same_training(got, alone)


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("ignored", [0.0, 0.5, 0.97, 1.0])
def test_a_head_has_the_loss_and_gradient_of_the_labels_that_are_learnt(chunks, ignored):
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
def test_labels_that_cannot_be_meant_are_refused(name, tmp_path, record):
    rows, said = BAD[name]
    with pytest.raises(Exception, match=said):
        record(1, *JOB, str(mosaic.saved(tmp_path / "rows", rows)))


@pytest.mark.parametrize("source", ["synthetic", "text", "corpus"])
def test_labels_of_data_without_columns_are_refused(source, tmp_path):
    import data

    (tmp_path / "a.txt").write_text("abc" * 100)
    named = str(tmp_path) if source == "corpus" else source
    with pytest.raises(RefusedError, match="--labels"):
        data.open_source(options.parse(["--labels", "labels", "--data", named]), vocab=VOCAB, seq_len=SEQ)


def gradients(head: LossHead, chunks: int, *, compiled: bool) -> tuple[torch.Tensor, ...]:
    head.chunks = chunks
    values = torch.Generator().manual_seed(0)
    x = torch.randn(2, 16, 32, generator=values, requires_grad=True)
    labels = torch.randint(64, (2, 16), generator=values)
    loss = (torch.compile(head, backend="aot_eager") if compiled else head)(x, labels)
    return torch.autograd.grad(loss, (x, *head.parameters()))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("chunks", [4, layers.BY_ROWS], ids=["four", "by rows"])
def test_chunks_have_the_gradient_of_the_whole(compiled, chunks, monkeypatch):
    monkeypatch.setattr(layers, "ROWS", 12)
    # Compiled by torch 2.11, a sum in place had a gradient of zero, and a whole 8B model learnt nothing.
    torch.manual_seed(0)
    head = LossHead(nn.RMSNorm(32), nn.Linear(32, 64, bias=False), chunks=1)
    whole = gradients(head, 1, compiled=False)
    same_sums(gradients(head, chunks, compiled=compiled), whole, terms=32 + 64 + 32)
    assert all(gradient.norm() > 0 for gradient in whole)


HEADS = Path(__file__).with_name("heads.py")
HEAD_JOB = ("--steps", "6", "--global-batch", "8", "--clip", "0.5", "--no-backend-check")


@pytest.mark.parametrize("ignored", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("vocab", "chunks", "words"),
    [(64, 1, [32, 32]), (64, 4, [32, 32]), (65, 1, [33, 32]), (37, 5, [13, 13, 11]), (10, 2, [3, 3, 3, 1])],
)
def test_a_head_of_several_ranks_has_the_loss_and_gradients_of_one(vocab, chunks, words, ignored, program):
    found = program(HEADS, len(words), f"{vocab}", f"{chunks}", f"{ignored}")
    want = found["want"]
    assert [each.pop("words") for each in found["got"]] == words
    for rank in found["got"]:
        same_sums(rank["loss"], want["loss"])
        same_sums(rank["alone"], want["alone"])
        same_sums(tensors(rank), tensors(want))


def tensors(figures: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {**figures["gradients"], "logits": figures["logits"]}
    return {name: torch.tensor(value) for name, value in found.items()}


@pytest.fixture(scope="module")
def single(record: Record) -> dict[str, Any]:
    return record(1, *HEAD_JOB, "--micro-batch", "8")


@pytest.mark.parametrize("flags", [(), ("--parallel", "zero1"), ("--loss-chunks", "3")], ids=" ".join)
def test_a_job_whose_ranks_share_the_words_is_the_job_of_one(flags, single, record):
    got = record(2, *HEAD_JOB, "--tp", "2", "--micro-batch", "8", *flags)
    same_training(got, single)
    assert got["ranks_agree"]


def test_a_job_with_an_uneven_vocabulary_is_that_of_one(record, tmp_path):
    config = dataclasses.replace(presets.find("llama", "tiny").config, vocab=257)
    model = prepare.skeleton(presets.MODELS["llama"], config, loss_chunks=1)
    prepare.give_weights(model, model, "", options.parse(["--seed", "3"]), torch.device("cpu"))
    state = dict(sorted(model.state_dict().items()))
    whole.write(tmp_path / initial.OURS, {name: value.shape for name, value in state.items()}, state.items())
    (tmp_path / initial.SHAPE).write_text(initial.shape("llama", config))
    started = (*HEAD_JOB, "--size", "config", "--weights", str(tmp_path), "--seq-len", "32", "--lr", "3e-3")
    want = record(1, *started, "--micro-batch", "8")
    got = record(4, *started, "--tp", "2", "--micro-batch", "4")
    same_training(got, want)
    assert got["ranks_agree"]


@pytest.mark.parametrize(
    ("vocab", "tp", "parallel", "tied", "splits"),
    [
        (128256, 8, "zero1", False, True),
        (50257, 8, "zero1", False, False),
        (50257, 8, "fsdp2", False, True),
        (5, 4, "fsdp2", False, False),
        (128256, 8, "fsdp2", True, False),
        (128256, 1, "fsdp2", False, False),
    ],
)
def test_which_heads_are_split(vocab, tp, parallel, tied, splits):
    given: Any = SimpleNamespace(tp=tp, parallel=parallel, pp=1)
    config: Any = SimpleNamespace(vocab=vocab, tied=tied)
    assert prepare.splits_head(given, config) == splits


def test_a_checkpoint_of_flat_buffers_says_that_its_head_is_split():
    parsed = options.parse(["--parallel", "zero1", "--tp", "2"])
    assert job.kept_as(parsed, presets.find("llama", "tiny")) == "zero1 --tp 2 --pp 1, in rows, head split"
    whole = options.parse(["--parallel", "zero1"])
    assert job.kept_as(whole, presets.find("llama", "tiny")) == "zero1 --tp 1 --pp 1, in rows"
