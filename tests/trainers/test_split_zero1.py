"""ZeRO-1 with tensor and pipeline parallel: the job of one process, half the state with two data ranks, exact
resumption. Tensor parallel with FP8: one scale on all ranks.
"""

from pathlib import Path
from typing import Any

import pytest
from agree import same_bits, same_loss_in_half, same_scales, same_training

from conftest import Record
from harness.processes import WorkloadError

# Norms lie above the limit of clipping, so a norm that is wrong on any axis changes the losses.
JOB = ("--steps", "10", "--global-batch", "8", "--seed", "3", "--clip", "0.5", "--no-backend-check")
ZERO1 = (*JOB, "--parallel", "zero1")
TENSOR, PIPELINE = (*ZERO1, "--tp", "2"), (*ZERO1, "--pp", "2", "--micro-batch", "2")
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def alone(record: Record) -> dict[str, Any]:
    return record(1, *JOB, "--micro-batch", "8")


@pytest.mark.parametrize(
    ("ranks", "flags", "layout"),
    [
        (4, (*TENSOR, "--micro-batch", "4"), {"data": 2, "tensor": 2, "pipeline": 1}),
        (4, PIPELINE, {"data": 2, "tensor": 1, "pipeline": 2}),
        pytest.param(8, (*PIPELINE, "--tp", "2"), {"data": 2, "tensor": 2, "pipeline": 2}, marks=SLOW),
    ],
    ids=["tensor", "pipeline", "both"],
)
def test_losses_and_norms_are_those_of_one_process(
    ranks: int, flags: tuple[str, ...], layout: dict[str, int], alone: dict[str, Any], record: Record
) -> None:
    got = record(ranks, *flags)
    same_training(got, alone)
    assert min(got["gradient_norms"]) > 0.5
    assert got["ranks_agree"]
    assert {**got["layout"], **layout} == got["layout"]


@SLOW
@pytest.mark.parametrize("flags", [TENSOR, PIPELINE], ids=["tensor", "pipeline"])
def test_a_second_data_rank_halves_the_state_and_a_job_resumes_exactly(
    flags: tuple[str, ...], record: Record, tmp_path: Path
) -> None:
    kept = ("--checkpoint", str(tmp_path), "--checkpoint-every", "5", "--full-every", "5")
    whole = record(4, *flags, *kept)
    (tmp_path / "step_00000010").rename(tmp_path / "later")
    again = record(4, *flags, *kept)
    assert again["first_step"] == 5
    same_bits(again["losses"], whole["losses"][5:])
    assert again["digest"] == whole["digest"]
    (tmp_path / "step_00000010").rename(tmp_path / "again")
    one = record(2, *flags, *kept)
    assert one["first_step"] == 5
    same_training(one, whole, first=5)
    bytes_of = [record["layout"]["optimizer_bytes_per_rank"] for record in (whole, one)]
    padding = 2 * bytes_of[0] - bytes_of[1]  # each unit is as long as its ranks can share evenly
    assert 0 <= padding < bytes_of[1] // 100
    (tmp_path / "step_00000010").rename(tmp_path / "one")
    with pytest.raises(
        WorkloadError,
        match=r"was written by --parallel zero1 --tp \d --pp \d, in rows(, head split)?, this run has",
    ):
        record(1, *ZERO1, *kept)
    brought = record(1, *ZERO1, "--weights", str(tmp_path / "step_00000005"), "--until", "1")
    assert brought["losses"][0] < whole["losses"][0] - 0.1, "whole weights start a job in any layout"


@SLOW
def test_gpt_with_biases_a_tied_embedding_and_two_microbatches_in_16_bits(record: Record) -> None:
    gpt = ("--model", "gpt", "--precision", "bf16", "--reduce", "bf16", "--moments", "bf16")
    alone = record(1, *ZERO1, *gpt, "--micro-batch", "8")
    split = record(4, *TENSOR, *gpt, "--micro-batch", "2", "--recompute", "full")
    same_loss_in_half(split["losses"], alone["losses"])
    assert split["ranks_agree"]


@SLOW
def test_fp8_with_tensor_parallel_has_the_scales_of_whole_tensors_on_all_ranks(scales: Record) -> None:
    pytest.importorskip("torchao")
    fp8 = (*JOB, "--precision", "fp8", "--micro-batch", "4", "--until", "3")
    # Data ranks have other samples, and so other scales; tensor ranks are neighbours.
    whole, split = scales(2, *fp8), scales(4, *fp8, "--tp", "2")
    same_loss_in_half(split["losses"], whole["losses"])
    assert split["ranks_agree"]
    (one, two), neighbours = whole["scales"], split["scales"]
    assert neighbours[0] == neighbours[1]
    assert neighbours[2] == neighbours[3]
    assert len(neighbours[0]) == len(one) > 100
    # Each scale follows the largest of many values, which bfloat16 and FP8 rounded in another order.
    same_scales(neighbours[0], one)
    same_scales(neighbours[2], two)
