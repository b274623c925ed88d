"""torchao's FP8 under FSDP2: weights are gathered in 8 bits, and checkpoints hold plain float32."""

import pytest
import torch
from agree import same_bits, same_loss_in_half

from whole import read

pytest.importorskip("torchao")

JOB = ("--global-batch", "8", "--seed", "3", "--steps", "4", "--no-backend-check")
FP8 = (*JOB, "--precision", "fp8")
KEPT = ("--checkpoint-every", "2", "--full-every", "2")
SLOW = pytest.mark.slow


def test_weights_are_gathered_in_8_bits_and_a_job_resumes_exactly(gathered, tmp_path):
    kept = (*KEPT, "--checkpoint", str(tmp_path))
    half, whole = gathered(2, *JOB, "--precision", "bf16"), gathered(2, *FP8, *kept)
    same_loss_in_half(whole["losses"], half["losses"])
    # Embedding, head and norms stay in 16 bits: they are a fifth of the tiny model.
    assert 0.5 < whole["gathered_bytes"] / half["gathered_bytes"] < 0.65
    (tmp_path / "step_00000004").rename(tmp_path / "later")
    again = gathered(2, *FP8, *kept)
    assert again["first_step"] == 2
    same_bits(again["losses"], whole["losses"][2:])  # scales are those of the loaded weights
    assert again["digest"] == whole["digest"]
    weights = read(tmp_path / "step_00000002" / "weights.safetensors")
    assert {(type(value), value.dtype) for value in weights.values()} == {(torch.Tensor, torch.float32)}


@SLOW
def test_a_checkpoint_of_fp8_continues_in_16_bits_on_one_rank(record, tmp_path):
    kept = (*KEPT, "--checkpoint", str(tmp_path), "--asynchronous")
    whole = record(2, *FP8, *kept)
    (tmp_path / "step_00000004").rename(tmp_path / "later")
    again = record(1, *JOB, *kept, "--precision", "bf16", "--micro-batch", "8")
    assert again["first_step"] == 2
    same_loss_in_half(again["losses"], whole["losses"][2:])


@SLOW
@pytest.mark.parametrize(
    ("ranks", "flags", "share"),
    [
        (4, ("--replicas", "2", "--micro-batch", "2"), 0.65),
        (4, ("--tp", "2", "--micro-batch", "2"), 0.75),  # norms and embedding are whole on each tensor rank
        (4, ("--pp", "2", "--micro-batch", "1"), 0.75),  # a stage has one end of the model
        (3, ("--global-batch", "6"), 1.01),  # three ranks cannot share these weights evenly
    ],
    ids=["replicas", "tensor", "pipeline", "uneven"],
)
def test_every_division_of_the_ranks_gathers_what_it_can_in_8_bits(ranks, flags, share, gathered):
    flags = ("--until", "2", *flags)
    half, got = gathered(ranks, *JOB, *flags, "--precision", "bf16"), gathered(ranks, *FP8, *flags)
    same_loss_in_half(got["losses"], half["losses"])
    assert got["ranks_agree"]
    assert share - 0.3 < got["gathered_bytes"] / half["gathered_bytes"] < share
