"""Under --tp the ranks share the head's vocabulary: losses and gradients are those of one rank."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agree import same_sums, same_training

import initial
import options
import presets
import whole
from conftest import Record
from layouts import job, prepare

Program = Callable[..., dict[str, Any]]
HEADS = Path(__file__).with_name("heads.py")
JOB = ("--steps", "6", "--global-batch", "8", "--clip", "0.5", "--no-backend-check")


@pytest.mark.parametrize("ignored", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("vocab", "chunks", "words"),
    [(64, 1, [32, 32]), (64, 4, [32, 32]), (65, 1, [33, 32]), (37, 5, [13, 13, 11]), (10, 2, [3, 3, 3, 1])],
)
def test_a_head_of_several_ranks_has_the_loss_and_gradients_of_one(
    vocab: int, chunks: int, words: list[int], ignored: float, program: Program
) -> None:
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
def alone(record: Record) -> dict[str, Any]:
    return record(1, *JOB, "--micro-batch", "8")


@pytest.mark.parametrize("flags", [(), ("--parallel", "zero1"), ("--loss-chunks", "3")], ids=" ".join)
def test_a_job_whose_ranks_share_the_words_is_the_job_of_one(
    flags: tuple[str, ...], alone: dict[str, Any], record: Record
) -> None:
    got = record(2, *JOB, "--tp", "2", "--micro-batch", "8", *flags)
    same_training(got, alone)
    assert got["ranks_agree"]


def test_a_job_with_an_uneven_vocabulary_is_that_of_one(record: Record, tmp_path: Path) -> None:
    config = dataclasses.replace(presets.find("llama", "tiny").config, vocab=257)
    model = prepare.skeleton(presets.MODELS["llama"], config, loss_chunks=1)
    prepare.give_weights(model, model, "", options.parse(["--seed", "3"]), torch.device("cpu"))
    state = dict(sorted(model.state_dict().items()))
    whole.write(tmp_path / initial.OURS, {name: value.shape for name, value in state.items()}, state.items())
    (tmp_path / initial.SHAPE).write_text(initial.shape("llama", config))
    started = (*JOB, "--size", "config", "--weights", str(tmp_path), "--seq-len", "32", "--lr", "3e-3")
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
def test_which_heads_are_split(vocab: int, tp: int, parallel: str, tied: bool, splits: bool) -> None:
    given: Any = SimpleNamespace(tp=tp, parallel=parallel, pp=1)
    config: Any = SimpleNamespace(vocab=vocab, tied=tied)
    assert prepare.splits_head(given, config) == splits


def test_a_checkpoint_of_flat_buffers_says_that_its_head_is_split() -> None:
    parsed = options.parse(["--parallel", "zero1", "--tp", "2"])
    assert job.kept_as(parsed, presets.find("llama", "tiny")) == "zero1 --tp 2 --pp 1, in rows, head split"
    whole = options.parse(["--parallel", "zero1"])
    assert job.kept_as(whole, presets.find("llama", "tiny")) == "zero1 --tp 1 --pp 1, in rows"
