"""--lean, --no-flat-gradients and ZeRO-1 with tensor and pipeline parallel train the same model."""

import dataclasses
from typing import Any

import pytest
import torch
from agree import TINY_WEIGHTS, same_bits, same_loss_in_half, same_scales, same_sums, same_training
from one_rank import job_of

import presets
from conftest import Record
from harness.processes import WorkloadError
from models import flux, moe

STEPS = 3
LR = 1e-2
FP32, BF16 = ("--precision", "fp32"), ("--precision", "bf16", "--reduce", "bf16")


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a few steps of one rank left: losses of microbatches, norms of steps, the gradients before the
    first step (empty with --no-flat-gradients) and the weights.
    """

    losses: list[torch.Tensor]
    norms: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def trained(*flags: str) -> Trained:
    """A few steps. The last microbatch runs twice, as for a profile: the gradients of the run before a step
    must not count.
    """
    with job_of(*flags, "--parallel", "zero1") as run:
        job, several = run.job, run.plan.accumulate
        losses, norms, gradients = [], [], {}
        for step in range(STEPS):
            if step == 1:
                job.microbatch(run.batch(9, 0), last=True, share=1.0)
            for micro in range(several):
                batch, last = run.batch(step, micro), micro == several - 1
                losses.append(job.microbatch(batch, last=last, share=1 / several))
            if step == 0 and run.options.flat_gradients:
                named = job.model.named_parameters()
                gradients = {name: weight.main_grad.clone() for name, weight in named}
            norms.append(job.step(LR))
        return Trained(losses, norms, gradients, dict(job.weights()))


@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
def test_lean_experts_change_no_bit(precision):
    plain, lean = trained("--model", "moe", *precision), trained("--model", "moe", *precision, "--lean")
    for part in ("losses", "norms", "gradients", "weights"):
        same_bits(getattr(lean, part), getattr(plain, part))


def test_lean_positions_have_the_same_losses_gradients_and_norms():
    # Sums over tokens have another order in memory, so that a step of AdamW may have another sign.
    plain, lean = trained("--model", "flux", *FP32), trained("--model", "flux", *FP32, "--lean")
    same_sums(lean.gradients, plain.gradients)
    records = (
        {"losses": [float(x) for x in one.losses], "gradient_norms": [float(x) for x in one.norms]}
        for one in (lean, plain)
    )
    same_training(*records, lr=LR)


@pytest.mark.parametrize(
    ("model", "precision", "batch"),
    [
        pytest.param(
            *(model, precision, batch),
            id=f"{model}-{name}-{count}",
            marks=() if (name, count) == ("bf16", "accumulated") or model == "llama" else pytest.mark.slow,
        )
        for model in ("moe", "flux", "llama")
        for name, precision in (("fp32", FP32), ("bf16", BF16))
        for count, batch in (("one", ()), ("accumulated", ("--global-batch", "8")))
    ],
)
def test_gradients_left_in_place_train_the_same(model, precision, batch):
    # Only the sum of the norm has another order. A limit that no norm reaches takes it out of the weights.
    flags = ("--model", model, *precision, *batch, "--clip", "1e6")
    flat, apart = trained(*flags), trained(*flags, "--no-flat-gradients")
    same_bits(apart.losses, flat.losses)
    same_sums(apart.norms, flat.norms, terms=TINY_WEIGHTS)
    same_bits(apart.weights, flat.weights)


@pytest.mark.parametrize("active", [1, 2, 3])
def test_experts_give_the_same_values_and_gradients_in_float64(active):
    config = dataclasses.replace(presets.find("moe", "tiny").config, active_experts=active)
    torch.manual_seed(5)
    plain, lean = (moe.Experts(dataclasses.replace(config, lean=lean)).double() for lean in (False, True))
    for weight in plain.parameters():
        torch.nn.init.normal_(weight)
    lean.load_state_dict(plain.state_dict())
    x, upstream = (torch.randn(2, 24, config.width, dtype=torch.float64) for _ in range(2))
    found = []
    for experts in (plain, lean):
        inputs = x.clone().requires_grad_()
        out = experts(inputs)
        assert experts.penalty is not None
        ((out * upstream).sum() + experts.penalty).backward()
        found.append((out, inputs.grad, *(weight.grad for weight in experts.parameters())))
    same_sums(found[1], found[0], dtype=torch.float64)


def test_orders_sort_by_expert_and_lead_back():
    chosen = torch.tensor([[2, 0], [0, 1], [2, 1]])
    for experts in (4, 300):
        order, back = moe.orders(chosen, experts)
        assert order.tolist() == [1, 2, 3, 5, 0, 4]
        assert order[back].tolist() == list(range(6))


def test_tables_of_coordinates_turn_as_tables_of_pairs():
    config = presets.find("flux", "tiny").config
    cpu, grads = torch.device("cpu"), []
    x = torch.randn(2, config.heads, config.text_tokens + config.side**2, sum(config.axes))
    for lean in (False, True):
        table = flux.rotary(dataclasses.replace(config, lean=lean), cpu)
        inputs = x.clone().requires_grad_()
        out = flux.turn(inputs, table)
        out.square().sum().backward()
        grads.append((out, inputs.grad))
    same_bits(grads[1], grads[0])


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
def test_losses_and_norms_are_those_of_one_process(ranks, flags, layout, alone, record):
    got = record(ranks, *flags)
    same_training(got, alone)
    assert min(got["gradient_norms"]) > 0.5
    assert got["ranks_agree"]
    assert {**got["layout"], **layout} == got["layout"]


@SLOW
@pytest.mark.parametrize("flags", [TENSOR, PIPELINE], ids=["tensor", "pipeline"])
def test_a_second_data_rank_halves_the_state_and_a_job_resumes_exactly(flags, record, tmp_path):
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
def test_gpt_with_biases_a_tied_embedding_and_two_microbatches_in_16_bits(record):
    gpt = ("--model", "gpt", "--precision", "bf16", "--reduce", "bf16", "--moments", "bf16")
    alone = record(1, *ZERO1, *gpt, "--micro-batch", "8")
    split = record(4, *TENSOR, *gpt, "--micro-batch", "2", "--recompute", "full")
    same_loss_in_half(split["losses"], alone["losses"])
    assert split["ranks_agree"]


@SLOW
def test_fp8_with_tensor_parallel_has_the_scales_of_whole_tensors_on_all_ranks(scales):
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
