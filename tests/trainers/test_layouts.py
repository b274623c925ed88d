"""Every layout of ranks trains the same model: losses within a band of one process, and clear refusals."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agree import nearer, same_bits, same_loss_in_half, same_training
from layout_flags import LAYOUTS, each

import waits
from conftest import Record
from whole import read

TRAIN = Path(__file__).resolve().parents[2] / "trainers" / "train.py"
BATCH = ("--steps", "6", "--global-batch", "8", "--seed", "3")
SLOW = pytest.mark.slow


def start(ranks: int, *arguments: str) -> subprocess.Popen:
    run = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node")
    command = [sys.executable, *run, str(ranks), str(TRAIN), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def alone(record: Record) -> dict[str, Any]:
    return record(1, *BATCH, "--micro-batch", "8")


@each()
def test_losses_equal_one_process(layout, alone, record):
    ranks, *flags = LAYOUTS[layout]
    got = record(ranks, *BATCH, *flags)
    assert got["ranks_agree"]
    same_training(got, alone)


COMPILED = TRAIN.parents[1] / "tests/trainers/compiled.py"


@each(quick={"fsdp2"})
def test_a_compiled_model_trains_the_same_in_every_layout(layout, alone, program):
    ranks, *flags = LAYOUTS[layout]
    same_training(program(COMPILED, ranks, *BATCH, *flags), alone)


DECAY = ("--weight-decay", "30")


@pytest.fixture(scope="module")
def decayed_alone(record: Record) -> dict[str, Any]:
    return record(1, *BATCH, "--micro-batch", "8", *DECAY)


@each()
def test_weight_decay_is_of_matrices_alone_in_every_layout(layout, decayed_alone, record):
    ranks, *flags = LAYOUTS[layout]
    same_training(record(ranks, *BATCH, *flags, *DECAY), decayed_alone)


UNUSED = TRAIN.parents[1] / "tests/trainers/unused.py"


@pytest.fixture(scope="module")
def unused_alone(program: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return program(UNUSED, 1, *BATCH, "--micro-batch", "8")


@each()
def test_an_unused_and_a_frozen_weight_change_nothing_for_the_others(layout, unused_alone, tmp_path, program):
    ranks, *flags = LAYOUTS[layout]
    kept = ("--checkpoint", str(tmp_path), "--checkpoint-every", "3", "--full-every", "3")
    got = program(UNUSED, ranks, *BATCH, *flags, *kept)
    assert got["ranks_agree"]
    same_training(got, unused_alone)
    assert got["moved"] == unused_alone["moved"] == 0.0
    shutil.rmtree(tmp_path / "step_00000006")
    again = program(UNUSED, ranks, *BATCH, *flags, *kept)
    assert again["first_step"] == 3
    same_training(again, unused_alone, first=3)


@pytest.mark.parametrize(
    ("ranks", "layout"), [(1, "full_shard"), pytest.param(2, "no_shard", marks=SLOW)], ids=["alone", "copies"]
)
def test_fsdp1_with_whole_parameters_accumulates_in_bf16(ranks, layout, alone, record):
    got = record(ranks, *BATCH, "--precision", "bf16", "--parallel", layout, "--micro-batch", "2")
    same_loss_in_half(got["losses"], alone["losses"])


def test_fsdp1_sums_the_gradients_of_microbatches_in_the_type_that_reduce_names(record):
    job = ("--steps", "1", "--global-batch", "8", "--seed", "3", "--precision", "bf16", "--micro-batch", "1")
    jobs = ((), ("--reduce", "bf16"), ("--parallel", "full_shard"))
    exact, half, got = (record(2, *job, *flags)["gradient_norms"][0] for flags in jobs)
    nearer(got, to=exact, than=half)


def test_a_tied_embedding_trains_in_zero1_as_in_fsdp2(record):
    tied = (*BATCH, "--model", "gpt")
    got, want = record(2, *tied, "--parallel", "zero1"), record(2, *tied)
    assert got["ranks_agree"]
    same_training(got, want)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, ()),
        (2, ("--parallel", "zero1")),
        pytest.param(4, ("--parallel", "zero1"), marks=SLOW),
        pytest.param(4, ("--tp", "2"), marks=SLOW),
        pytest.param(3, ("--pp", "3", "--layers", "4"), marks=SLOW),
        pytest.param(3, ("--parallel", "zero1", "--pp", "3", "--layers", "4"), marks=SLOW),
    ],
    ids=["fsdp2", "zero1", "zero1 shared", "tensor", "fsdp2 of 3 stages", "zero1 of 3 stages"],
)
def test_a_pipeline_trains_a_tied_embedding_as_one_weight(ranks, flags, tmp_path, record):
    tied = (*BATCH, "--model", "gpt", "--layers", flags[-1] if "--layers" in flags else "2")
    want = record(1, *tied, "--micro-batch", "8")
    got = record(ranks, *tied, "--micro-batch", "2", "--pp", "2", *flags, "--checkpoint", str(tmp_path))
    same_training(got, want)
    weights = read(tmp_path / "step_00000006" / "weights.safetensors")
    same_bits(weights["embedding.weight"], weights["head.out.weight"])


@pytest.mark.parametrize("flags", [(), ("--implementation", "fused")], ids=["autograd", "fused"])
def test_bf16_zero1_stays_in_its_band(flags, alone, record):
    got = record(2, *BATCH, "--precision", "bf16", "--parallel", "zero1", *flags)
    same_loss_in_half(got["losses"], alone["losses"])


@SLOW
def test_the_fused_layer_has_windows(record):
    flags = (*BATCH, "--model", "mistral", "--precision", "bf16", "--parallel", "zero1")
    windowed = record(1, *flags)["losses"]
    whole = record(1, *flags, "--model", "llama")["losses"]  # the same shape without a window
    nearer(record(1, *flags, "--implementation", "fused")["losses"], to=windowed, than=whole)


@SLOW
def test_recomputation_changes_no_loss(record):
    # test_blocks.py holds where it happens: this alone passes in torch 2.13 with it around a block too.
    flags = (*BATCH, "--precision", "bf16", "--parallel", "fsdp2", "--no-reshard")
    same_bits(record(2, *flags, "--recompute", "full")["losses"], record(2, *flags)["losses"])


def test_fp8_stays_in_its_band(alone, record):
    got = record(2, *BATCH, "--precision", "fp8", "--parallel", "zero1", "--implementation", "fused")
    same_loss_in_half(got["losses"], alone["losses"])


@SLOW
def test_the_librarys_own_model_is_the_same_job_in_our_loop(alone, record):
    pytest.importorskip("transformers")
    same_training(record(2, *BATCH, "--implementation", "transformers"), alone)


@pytest.mark.parametrize(
    "model", ["flux", *(pytest.param(name, marks=SLOW) for name in ("moe", "mistral", "mpt", "gpt"))]
)
def test_each_family_trains(model, record):
    losses = record(2, "--model", model, "--steps", "24", "--lr", "5e-3")["losses"]
    assert sum(losses[-6:]) < 0.97 * sum(losses[:6])


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=SLOW), 2])
def test_a_run_within_a_budget_warms_up_by_time_and_ends_itself_on_every_rank(ranks, record):
    got = record(ranks, "--steps", "1000000", "--warmup-s", "1", "--budget-s", "8", "--no-digest")
    assert got["ranks_agree"]
    assert got["last_step"] == len(got["losses"]) < 1000000
    assert not got["stopped"]
    assert 0 < got["performance"]["timed_steps"] < got["last_step"]
    if ranks == 1:  # the clock is the slowest rank's, and the record is rank 0's, which may start later
        assert got["phases_s"]["compile"] + got["phases_s"]["warm-up"] > 0.5
    assert got["phases_s"]["timed"] < 20


@pytest.mark.parametrize(
    ("parallel", "model"), [("fsdp2", "llama"), ("zero1", "llama"), pytest.param("zero1", "gpt", marks=SLOW)]
)
def test_a_checkpoint_resumes_on_another_number_of_ranks(parallel, model, tmp_path, record):
    job = ("--model", model, "--parallel", parallel)
    flags = (*job, "--global-batch", "8", "--checkpoint-every", "3", "--full-every", "3")
    whole = record(2, *flags, "--steps", "6", "--checkpoint", str(tmp_path))
    (tmp_path / "step_00000006").rename(tmp_path / "later")
    again = record(1, *flags, "--steps", "6", "--checkpoint", str(tmp_path), "--micro-batch", "8")
    assert again["first_step"] == 3
    same_training(again, whole, first=3)


def test_a_zero1_checkpoint_resumes_on_ranks_that_do_not_divide_its_rows(tmp_path, record):
    flags = ("--parallel", "zero1", "--global-batch", "6", "--steps", "4", "--checkpoint", str(tmp_path))
    flags += ("--checkpoint-every", "2", "--full-every", "2")
    whole = record(2, *flags)
    shutil.rmtree(tmp_path / "step_00000004")
    same_training(record(3, *flags, "--micro-batch", "1"), whole, first=2)


@pytest.mark.parametrize("parallel", ["fsdp2", pytest.param("zero1", marks=SLOW)])
def test_a_pipeline_of_several_data_ranks_writes_checkpoints_while_it_trains(parallel, tmp_path, record):
    job = ("--steps", "4", "--global-batch", "8", "--micro-batch", "2", "--pp", "2", "--parallel", parallel)
    kept = ("--checkpoint-every", "2", "--full-every", "4", "--asynchronous", "--checkpoint", str(tmp_path))
    whole = record(4, *job, *kept)
    shutil.rmtree(tmp_path / "step_00000004")
    again = record(4, *job, *kept)
    assert again["first_step"] == 2
    same_bits(again["losses"], whole["losses"][2:])


@SLOW
def test_sigterm_leaves_a_checkpoint_and_resume_repeats_the_uninterrupted_run(tmp_path, record):
    flags = ("--steps", "200", "--parallel", "zero1", "--lr-warmup", "25", "--checkpoint-every", "10")
    whole = record(2, *flags)
    process = start(2, *flags, "--checkpoint", str(tmp_path), "--asynchronous")
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("step_*/COMPLETE")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=waits.LIMIT_S)
    assert process.returncode == 1
    assert "forcefully exiting" not in said, "torchrun kills what has not ended 30 s after SIGTERM"
    assert list(tmp_path.glob("step_*/COMPLETE"))
    assert not list(tmp_path.glob("*.partial"))
    resumed = record(2, *flags, "--checkpoint", str(tmp_path))
    assert 0 < resumed["first_step"] < 200
    same_bits(resumed["losses"], whole["losses"][resumed["first_step"] :])
    assert resumed["digest"] == whole["digest"]
