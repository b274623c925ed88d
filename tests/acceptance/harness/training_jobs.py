"""The timed training jobs: their flags, the memory that they need, and how their speed is recorded.

In: devices, flags, records of trainers/train.py. Out: GiB, launches, metrics.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from harness import skips
from harness.calls import Launch, RecordMetric
from harness.session import AcceptanceSession
from workloads import large_job

# The first step takes up to 9 s of the warm-up. The chips are hot already from the FSDP2 job before it.
LARGE_WARM_S, LARGE_BUDGET_S = 11, 22
TIMED_S = 400  # for both timed jobs
LARGE = (
    *("--size", "8b", "--precision", "bf16", "--parallel", "zero1", "--implementation", "fused"),
    *("--reduce", "bf16", "--lr", "3e-5", "--steps", 1000, "--no-digest", "--phase-limit-s", 150),
    # A chip reaches its power cap within seconds. The timed steps come after that, and the budget ends the
    # job.
    *("--warmup", 5, "--warmup-s", LARGE_WARM_S, "--budget-s", LARGE_BUDGET_S),
)
# FSDP2 as most users run it: float32 master weights, sums of gradients in float32, weights gathered again for
# backward, each block compiled. On an H200 a step takes half a second.
FSDP2_JOB = (
    *("--size", "8b", "--layers", large_job.FSDP2_LAYERS, "--precision", "bf16"),
    *("--micro-batch", large_job.FSDP2_SAMPLES, "--parallel", "fsdp2", "--implementation", "native"),
    *("--lr", "3e-5", "--warmup", 16, "--no-digest", "--phase-limit-s", 150),
)
FSDP2 = (*FSDP2_JOB, "--steps", 30)
# Two layers of real width with 16-bit attention, which take less than two seconds; a CPU has the tiny model.
PROXY_STEPS = 16
PROXY = (
    *("--model", "llama", "--size", "8b", "--layers", 2, "--seq-len", 2048, "--micro-batch", 2),
    *("--precision", "bf16", "--no-compile", "--steps", PROXY_STEPS, "--warmup", 6, "--no-digest"),
)
LARGE_MEMORY = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}  # 116 of an H200's 139 GiB on two GPUs
# Condition -> key of the plan.
PLANNED = {"seq": "seq_len", "batch": "global_batch", "micro_batch": "micro_batch"}
LEAST_TIMED = 5
# The most GiB that a job may have allocated above the least by trainers/memory.py: 1 above what H100s and
# H200s read with 1, 2 or 4 ranks and torch 2.11 (docs/results: up to 2.1, 10.9, 1.6, 1.2 and 2.9 GiB).
ABOVE_LEAST_GIB = {"proxy": 3.2, "fsdp2": 12.1, "large": 2.7, "wide bf16": 2.3, "wide fp8": 3.9}
PEAKS_READ = ("H100", "H200")
MORE_UNREAD = 2.0  # times as much above the least, on a model on which nobody read a peak


def unless_it_fits(needed_gib: float, present_gib: float, acceptance: AcceptanceSession) -> None:
    """Skip a timed job that needs a GPU, or more memory than each device has."""
    if acceptance.vendor == "cpu":
        skips.without_feature("gpu", "layers of an 8B model need a GPU")
    if needed_gib > present_gib:
        skips.without_memory(needed_gib, present_gib)


def that_fit(ranks: int, present_gib: float) -> dict[str, tuple[object, ...]]:
    """The flags of the timed jobs that these devices can hold, in their order."""
    flags: dict[str, tuple[object, ...]] = {}
    if large_job.fsdp2_gib(ranks) <= present_gib:
        flags["fsdp2"] = FSDP2
    samples = large_job.samples_of(present_gib)
    if ranks in large_job.LARGE_RANKS and large_job.large_gib(ranks, samples) <= present_gib:
        flags["large"] = (*LARGE, "--micro-batch", samples)
    return flags


def text_of(flags: Mapping[str, tuple[object, ...]]) -> str:
    """The flags of jobs by name, as the programs read them."""
    return json.dumps({name: [str(word) for word in words] for name, words in flags.items()})


def launched(
    launch: Launch,
    flags: Mapping[str, tuple[object, ...]],
    ranks: int,
    timeout_s: float,
    *more: str,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run jobs by name in one launch of ranks."""
    words = (text_of(flags), *more)
    return launch("training.py", *words, nproc=ranks, timeout_s=timeout_s, env=env)


def record_speed(
    record: Mapping[str, Any],
    record_metric: RecordMetric,
    *,
    metric: str = "train_tokens_per_s_per_gpu",
    gate: bool,
) -> None:
    """Record the rate, and its share of the device's peak."""
    speed, ran = record["performance"], record["options"]
    conditions = {key: ran[key] for key in ("model", "size", "precision", "layers") if ran[key] is not None}
    plan = record["plan"]
    conditions |= {key: plan[of] for key, of in PLANNED.items()}
    value, wall = speed["tokens_per_s_per_gpu"], speed["tokens_per_s_per_gpu_wall"]
    record_metric(metric, value, unit="tokens/s", repeats=[wall], conditions=conditions, gate=gate)
    for name in ("mfu_noncausal_percent", "mfu_noncausal_of_gemm_percent"):
        if speed[name] is not None:
            record_metric(f"train_{name}", speed[name], unit="%", conditions=conditions)
    memory = record.get("memory") or {}
    for name, unit in (("allocated_gib", "GiB"), ("reserved_gib", "GiB"), ("alloc_retries", "times")):
        if name in memory:
            record_metric(f"train_{name}", memory[name], unit=unit, conditions=conditions)
    assert math.isfinite(value)
    assert value > 0


def require_planned(record: Mapping[str, Any], job: str, model: str) -> None:
    """The peak of a job is as little above the arithmetic as on healthy devices; twice that on unread models.
    A CPU has no peak.
    """
    memory = record["memory"]
    if memory is None and model == "CPU":
        return
    assert memory, f"the {job} job says nothing of its memory"
    peak, least = memory["allocated_gib"], memory["least_gib"]
    more = ABOVE_LEAST_GIB[job] * (1.0 if model in PEAKS_READ else MORE_UNREAD)
    assert peak <= least + more, (
        f"{peak:.2f} GiB allocated at once, at most {least + more:.2f} expected: by arithmetic the {job} job "
        f"needs {least:.2f}, and healthy H100s and H200s take up to {ABOVE_LEAST_GIB[job] - 1:.2f} more"
    )
