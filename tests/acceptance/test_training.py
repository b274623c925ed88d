"""Training end to end: does a sharded job learn, agree, resume and run fast? In: n devices. Out: metrics,
problems.

The smoke tier runs small jobs without a compiler: two starts of torchrun, under 30 s on GPUs. The standard
tier times Llama 3.1 8B within a time budget. If the machine fails its preflight, every check is invalid.
"""

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from harness import preflight, skips
from harness.check import invalid
from harness.fixtures import Launch, RecordMetric
from harness.session import AcceptanceSession, session_of
from workloads import margins, speed_conditions

GIB = 2**30
MOST_RANKS = 2
STEPS, RESUME_AT = 60, 23
# The job of trainers/curves/CPU/llama-tiny.json, sharded over the ranks.
TINY = (
    *("--model", "llama", "--size", "tiny", "--data", "text", "--steps", STEPS, "--global-batch", 8),
    *("--lr", "3e-3", "--portable", "--no-compile", "--no-preflight", "--warmup", 5),
)
# Two layers of real width with 16-bit attention, which take less than two seconds.
PROXY = (
    *("--model", "llama", "--size", "8b", "--layers", 2, "--seq-len", 2048, "--micro-batch", 2),
    *("--precision", "bf16", "--no-compile", "--steps", 16, "--warmup", 6, "--no-digest"),
)
SMOKE_S = 120  # longer means a hang: start, preflight and both jobs take about 15 s on GPUs
LARGE_WARM_S, LARGE_BUDGET_S, LARGE_S = 25, 40, 200
LARGE = (
    *("--size", "8b", "--precision", "bf16", "--parallel", "zero1", "--implementation", "fused"),
    *("--reduce", "bf16", "--lr", "3e-5", "--steps", 1000, "--no-digest", "--phase-limit-s", 150),
    # A chip reaches its power cap within seconds. The timed steps come after that, and the budget ends the
    # job.
    *("--warmup", 5, "--warmup-s", LARGE_WARM_S, "--budget-s", LARGE_BUDGET_S),
)
LARGE_MEMORY = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}  # 116 of an H200's 139 GiB on two GPUs
LARGE_PARAMETERS = 8.03e9
# Measured on H200s (docs/results/training-h200.md): activations of 8,192 tokens, and a constant part.
SAMPLE_GIB, FIXED_GIB = 23.3, 2.0
OUTSIDE_TORCH_GIB = 3.0  # contexts and NCCL's buffers
TWO_SAMPLES_FROM_GIB = 120  # device memory from which a rank takes two samples instead of one
PLANNED = {
    "seq": "seq_len",
    "batch": "global_batch",
    "micro_batch": "micro_batch",
}  # condition -> key of the plan
LEAST_TIMED = 5
LEARNED = 0.9  # of the first loss: the tiny model reaches 0.5 here, an untrained model stays at 1.0
FUSED = {"cudnn", "flash", "efficient"}

Kept = dict[str, Mapping[str, Any]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`ranks` is two, or one on a host with one GPU, which can train as well.

    `large_ranks` is the number of devices of this run, rounded down to a power of two, and at least two: one
    device cannot hold that job.
    """
    session = session_of(metafunc.config)
    if "ranks" in metafunc.fixturenames:
        count = MOST_RANKS if session.vendor == "cpu" else min(MOST_RANKS, session.device_count)
        metafunc.parametrize("ranks", [pytest.param(count, marks=pytest.mark.gpus(count), id=f"{count}")])
    if "large_ranks" in metafunc.fixturenames:
        fitting = (ranks for ranks in speed_conditions.LARGE_RANKS if ranks <= session.device_count)
        count = max(fitting, default=min(speed_conditions.LARGE_RANKS))
        mark = pytest.mark.gpus(count, perf=True)
        metafunc.parametrize("large_ranks", [pytest.param(count, marks=mark, id=f"{count}")])


@pytest.fixture(scope="module")
def kept() -> Kept:
    """Results of this module's launches: most checks share one."""
    return {}


@pytest.fixture
def jobs(
    ranks: int, launch: Launch, kept: Kept, device_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Any]:
    """One launch: preflight, the tiny job with a checkpoint in its middle, and on GPUs the proxy job."""
    if "jobs" not in kept:
        folder = tmp_path_factory.mktemp("training") / "whole"
        every = ("--checkpoint-every", RESUME_AT, "--full-every", RESUME_AT)
        flags: dict[str, tuple[object, ...]] = {"tiny": (*TINY, "--checkpoint", folder, *every)}
        if device_model != "CPU":
            flags = {"tiny": (*flags["tiny"], "--no-backend-check"), "proxy": PROXY}
        kept["jobs"] = {**_launched(launch, flags, ranks, SMOKE_S), "folder": str(folder)}
    if kept["jobs"]["preflight"]["problems"]:
        invalid(f"preflight: {'; '.join(kept['jobs']['preflight']['problems'])}")
    return kept["jobs"]


def _launched(
    launch: Launch, flags: Mapping[str, tuple[object, ...]], ranks: int, timeout_s: float, **env: str
) -> dict[str, Any]:
    text = json.dumps({name: [str(word) for word in words] for name, words in flags.items()})
    return launch("training.py", text, nproc=ranks, timeout_s=timeout_s, env=env)


@pytest.fixture
def tiny(jobs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record of the tiny job."""
    record: Mapping[str, Any] = jobs["records"]["tiny"]
    return record


@pytest.fixture
def proxy(jobs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record of the job whose speed is recorded; on a CPU that is the tiny job."""
    record: Mapping[str, Any] = jobs["records"].get("proxy", jobs["records"]["tiny"])
    return record


def test_loss_falls(tiny: Mapping[str, Any], record_metric: RecordMetric) -> None:
    """A tiny Llama, sharded over the ranks with FSDP2, learns: losses are finite, and the last ones are
    lower.
    """
    losses = tiny["losses"]
    record_metric("train_loss_first", losses[0], unit="nats")
    record_metric("train_loss_last", losses[-1], unit="nats", repeats=losses)
    norms = tiny["gradient_norms"]
    assert tiny["problems"] == [], "\n".join(tiny["problems"])
    assert len(losses) == STEPS, f"{len(losses)} steps ran, expected {STEPS}"
    assert all(math.isfinite(value) for value in losses + norms), f"not finite: {losses}, {norms}"
    assert all(value > 0 for value in norms), f"a gradient norm is 0: {norms}"
    bound = LEARNED * losses[0]
    assert max(losses[-3:]) < bound, f"the last losses are {losses[-3:]}, expected less than {bound:.3f}"


def test_loss_lies_in_the_reference_band(jobs: Mapping[str, Any], record_metric: RecordMetric) -> None:
    """The tiny job's losses stay in the widening band around the CPU's curve, and fall as low as they
    must.
    """
    verdict = jobs["curves"]["tiny"]
    assert verdict is not None, "trainers/curves has no reference curve for this job"
    share = math.nan if verdict["worst_share"] is None else verdict["worst_share"]
    record_metric("train_loss_worst_deviation", share, unit="band widths")
    margins.record(record_metric, share, STEPS)
    assert verdict["problems"] == [], "\n".join(verdict["problems"])


def test_ranks_agree(tiny: Mapping[str, Any], ranks: int) -> None:
    """After the last step, losses, gradient norms and weights are bitwise equal on all ranks."""
    assert tiny["world_size"] == ranks, f"the job ran on {tiny['world_size']} ranks, expected {ranks}"
    assert len(tiny["digest"]) == 64, f"no digest of the weights: {tiny['digest']!r}"
    assert tiny["ranks_agree"] is True, "the ranks ended with different losses, gradient norms or weights"


def test_resume_is_bit_equal(
    jobs: Mapping[str, Any], tiny: Mapping[str, Any], ranks: int, launch: Launch, tmp_path: Path
) -> None:
    """A run that resumes from a checkpoint has bitwise the losses, norms and weights of an uninterrupted
    run.
    """
    source = Path(jobs["folder"]) / f"step_{RESUME_AT:08}"
    assert json.loads((source / "COMPLETE").read_text())["step"] == RESUME_AT
    shutil.copytree(source, tmp_path / "again" / source.name)
    again = ("--checkpoint", tmp_path / "again", "--no-backend-check")
    resumed = launch("train.py", *TINY, *again, nproc=ranks, timeout_s=SMOKE_S)
    assert resumed["first_step"] == RESUME_AT, f"resumed at {resumed['first_step']}, expected {RESUME_AT}"
    for name in ("losses", "gradient_norms"):
        whole = tiny[name][RESUME_AT:]
        assert resumed[name] == whole, f"{name} differ after resuming: got {resumed[name]}, expected {whole}"
    assert resumed["digest"] == tiny["digest"], "the weights differ after resuming"


def test_attention_that_ran_is_fused(proxy: Mapping[str, Any]) -> None:
    """A training step runs the kernels of a fused attention, forward and backward, as the profiler shows."""
    seen = proxy["extra"]["attention"]
    ran = set((seen["backend"] or "none").split("+"))
    assert ran <= FUSED, (
        f"{seen['backend']} ran, expected only {sorted(FUSED)}: {seen['operators']} {seen['kernels']}"
    )
    names = seen["operators"] + seen["kernels"]
    assert any(re.search("backward|bwd|bprop|cutlassB", name) for name in names), (
        f"no backward kernel among {names}"
    )


def test_throughput(
    proxy: Mapping[str, Any],
    jobs: Mapping[str, Any],
    ranks: int,
    acceptance: AcceptanceSession,
    record_metric: RecordMetric,
) -> None:
    """A small job's tokens per second and GPU are recorded without a bound, on a machine that passed its
    preflight.
    """
    preflight.keep(jobs["preflight"], record_metric)
    preflight.require_fit(jobs["preflight"], ranks, acceptance)
    record_speed(proxy, record_metric, gate=False)


@pytest.mark.tier("standard")
def test_throughput_8b(
    large_ranks: int,
    acceptance: AcceptanceSession,
    device_row: Mapping[str, Any],
    launch: Launch,
    record_metric: RecordMetric,
) -> None:
    """Llama 3.1 8B reaches the device model's bound in tokens per second and GPU, at the power cap."""
    if acceptance.vendor == "cpu":
        skips.without_feature("gpu", "an 8B model needs a GPU")
    present = device_row["memory_bytes"] / GIB
    one, two = speed_conditions.LARGE_SAMPLES
    micro_batch = two if present >= TWO_SAMPLES_FROM_GIB else one
    needed = large_gib(large_ranks, micro_batch)
    if needed > present:
        skips.without_memory(needed, present)
    flags = {"large": (*LARGE, "--micro-batch", micro_batch)}
    ran = _launched(launch, flags, large_ranks, LARGE_S, **LARGE_MEMORY)
    preflight.keep(ran["preflight"], record_metric)
    preflight.require_fit(ran["preflight"], large_ranks, acceptance)
    record = ran["records"]["large"]
    assert record["problems"] == [], "\n".join(record["problems"])
    assert record["performance"] is not None, f"no step was timed; seconds by phase: {record['phases_s']}"
    timed = record["performance"]["timed_steps"]
    assert timed >= LEAST_TIMED, (
        f"{timed} steps were timed, expected at least {LEAST_TIMED}: {record['phases_s']}"
    )
    record_speed(record, record_metric, gate=True)


def large_gib(ranks: int, samples: int) -> float:
    """The memory in GiB that the large job needs on each device; within 0.1 GiB of
    docs/results/training-h200.md.

    Every rank has weights and gradients of two bytes per parameter each. The rest of the float32 weights and
    both moments are ten bytes per parameter over all ranks. Activations and memory outside torch come on top.
    """
    state = LARGE_PARAMETERS * (2 + 2 + 10 / ranks) / GIB
    return state + FIXED_GIB + SAMPLE_GIB * samples + OUTSIDE_TORCH_GIB


def record_speed(record: Mapping[str, Any], record_metric: RecordMetric, *, gate: bool) -> None:
    """Record the rate, and its share of the device's peak."""
    speed, ran = record["performance"], record["options"]
    conditions = {key: ran[key] for key in ("model", "size", "precision", "layers") if ran[key] is not None}
    plan = record["plan"]
    conditions |= {key: plan[of] for key, of in PLANNED.items()}
    value, wall = speed["tokens_per_s_per_gpu"], speed["tokens_per_s_per_gpu_wall"]
    record_metric(
        "train_tokens_per_s_per_gpu",
        value,
        unit="tokens/s",
        repeats=[wall],
        conditions=conditions,
        gate=gate,
    )
    for name in ("mfu_noncausal_percent", "mfu_noncausal_of_gemm_percent"):
        if speed[name] is not None:
            record_metric(f"train_{name}", speed[name], unit="%", conditions=conditions)
    memory = record.get("memory") or {}
    for name, unit in (("allocated_gib", "GiB"), ("alloc_retries", "times")):
        if name in memory:
            record_metric(f"train_{name}", memory[name], unit=unit, conditions=conditions)
    assert math.isfinite(value)
    assert value > 0
