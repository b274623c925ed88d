"""Training end to end: does a sharded job learn, agree, resume and run fast? In: n devices.
Out: metrics, problems.

The smoke tier runs small jobs without a compiler: three launches of ranks, under 30 s on GPUs. The standard
tier times Llama 3.1 8B, and eight of its layers with FSDP2, in one more start. If the preflight of a timed
job fails, so does each check of it; with evidence about the machine it is invalid.
"""

import functools
import math
import re
import shutil
import statistics
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import pytest

from harness import about, preflight, skips, training_jobs
from harness.asked import of_image
from harness.calls import Launch, RecordMetric, once
from harness.check import Check
from harness.readings import needs_pair
from harness.session import AcceptanceSession, session_of
from workloads import large_job, margins

MOST_RANKS = 2
STEPS, RESUME_AT = 60, 23
UNEVEN_STEPS, UNEVEN_RESUME_AT = 20, 9
# The job of trainers/curves/CPU/llama-tiny.json, sharded over the ranks.
TINY = (
    *("--model", "llama", "--size", "tiny", "--data", "text", "--steps", STEPS, "--global-batch", 8),
    *("--lr", "3e-3", "--portable", "--no-compile", "--no-preflight", "--warmup", 5),
    # Its bits are compared, and ROCm's libraries repeat theirs only where that is asked for.
    "--prefer-deterministic",
)
# The same job with a vocabulary of 257 and a width of 66, which the ranks cannot divide evenly.
UNEVEN = (*TINY, "--size", "tiny-uneven", "--steps", UNEVEN_STEPS, "--no-backend-check")
CPU_PROXY = (*TINY, "--precision", "bf16", "--steps", training_jobs.PROXY_STEPS, "--warmup", 6, "--no-digest")
SMOKE_S = 120  # longer means a hang: start, preflight and both jobs take about 15 s on GPUs
# Of the mean of the first three losses, after sixteen steps, ten of which warm up the learning rate.
# H200s read 0.991; a job that does not learn stays within 0.0005 of 1.
BF16_LEARNED = 0.995
LEARNED = 0.9  # of the first loss: the tiny model reaches 0.5 here, an untrained model stays at 1.0
FUSED = {"cudnn", "flash", "efficient"}
# How far FlashAttention 4 may take the bf16 job from torch's attention, relative: losses, gradient norms.
SAME_LOSS, SAME_NORM = 5e-3, 5e-2

Kept = dict[str, Mapping[str, Any]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`ranks` is two, or one on a host with one GPU, which can train as well; `bf16_ranks` too.
    Only the jobs of the first, which are tiny and not timed, share their devices with other checks.

    `large_ranks` is the number of devices of this run, rounded down to a power of two, and at least two: one
    device cannot hold that job.
    """
    session = session_of(metafunc.config)
    count = MOST_RANKS if session.vendor == "cpu" else min(MOST_RANKS, session.device_count)
    for name, whole in (("ranks", False), ("bf16_ranks", True)):
        if name in metafunc.fixturenames:
            marks = (pytest.mark.gpus(count, whole=whole), *(() if whole else (pytest.mark.long,)))
            metafunc.parametrize(name, [pytest.param(count, marks=marks, id=f"{count}")])
    for name, ranks_of in (("large_ranks", large_job.ranks_of), ("fsdp2_ranks", large_job.fsdp2_ranks_of)):
        if name in metafunc.fixturenames:
            count = ranks_of(session.device_count)
            mark = pytest.mark.gpus(count, perf=True, exclusive=True)
            metafunc.parametrize(name, [pytest.param(count, marks=mark, id=f"{count}")])


@pytest.fixture(scope="module")
def used(request: pytest.FixtureRequest) -> frozenset[str]:
    """The fixtures of the checks of this file that run."""
    chosen = (item for item in request.session.items if item.path == request.path)
    return frozenset(name for item in chosen for name in getattr(item, "fixturenames", ()))


@pytest.fixture
def jobs(ranks: int, *, launch: Launch, kept: Kept, used: frozenset[str]) -> Mapping[str, Any]:
    """One launch of the tiny jobs, with a checkpoint in their middle.
    Only jobs run that a chosen check uses by a fixture of their name.
    """
    if "jobs" not in kept:
        folder = PurePath(of_image(about.folder_for, name="training"))
        flags = {
            name: (*of, "--checkpoint", folder / name, "--checkpoint-every", step, "--full-every", step)
            for name, of, step in (("tiny", TINY, RESUME_AT), ("uneven", UNEVEN, UNEVEN_RESUME_AT))
        }
        flags["tiny"] += ("--no-backend-check",)
        flags = {name: of for name, of in flags.items() if name in used}
        ran = training_jobs.launched(launch, flags, ranks, SMOKE_S, "--no-preflight")
        kept["jobs"] = {**ran, "folder": str(folder)}
    return kept["jobs"]


@pytest.fixture
def bf16_job(
    bf16_ranks: int,
    *,
    launch: Launch,
    kept: Kept,
    acceptance: AcceptanceSession,
    check: Check,
    device_row: Mapping[str, Any],
    used: frozenset[str],
) -> Mapping[str, Any]:
    """One launch of the preflight and the bf16 job, whose speed is recorded.
    The job runs also with FlashAttention 4, if a chosen check uses that and the stack has it.
    """
    if acceptance.vendor != "cpu":
        present = device_row["memory_bytes"] / large_job.GIB
        training_jobs.unless_it_fits(large_job.proxy_gib(bf16_ranks), present, acceptance)
    if "bf16" not in kept:
        flags = {"proxy": CPU_PROXY if acceptance.vendor == "cpu" else training_jobs.PROXY}
        if "flash_attn_4" in used and of_image(about.has_flash_attn_4):
            flags["flash_attn_4"] = (*flags["proxy"], "--attention", "fa4")
        kept["bf16"] = training_jobs.launched(launch, flags, bf16_ranks, SMOKE_S)
    preflight.require(kept["bf16"]["preflight"]["problems"], acceptance, check)
    return kept["bf16"]


@pytest.fixture
def resumed(
    jobs: Mapping[str, Any], *, ranks: int, launch: Launch, kept: Kept, used: frozenset[str]
) -> Callable[[str, int], None]:
    """Judge a job that another process resumes from its checkpoint in the middle."""
    if "resumed" not in kept:
        folder = PurePath(of_image(about.folder_for, name="resumed"))
        steps = {"tiny": RESUME_AT, "uneven": UNEVEN_RESUME_AT}
        for name, step in [(name, step) for name, step in steps.items() if name in used]:
            source = PurePath(jobs["folder"], name, f"step_{step:08}")
            target = folder / name / source.name
            of_image(shutil.copytree, src=str(source), dst=str(target))
        flags = {
            "tiny": (*TINY, "--checkpoint", folder / "tiny", "--no-backend-check"),
            "uneven": (*UNEVEN, "--checkpoint", folder / "uneven"),
        }
        flags = {name: of for name, of in flags.items() if name in used}
        kept["resumed"] = training_jobs.launched(launch, flags, ranks, SMOKE_S, "--no-preflight")

    def judge(name: str, step: int) -> None:
        whole, again = jobs["records"][name], kept["resumed"]["records"][name]
        assert again["first_step"] == step, f"resumed at {again['first_step']}, expected {step}"
        for series in ("losses", "gradient_norms"):
            got, expected = again[series], whole[series][step:]
            assert got == expected, f"{series} differ after resuming: got {got}, expected {expected}"
        assert again["digest"] == whole["digest"], "the weights differ after resuming"
        assert len(again["digest"]) == 64, f"no digest of the weights: {again['digest']!r}"

    return judge


@pytest.fixture
def timed_jobs(
    launch: Launch, kept: Kept, device_row: Mapping[str, Any], ranks_of_timed: int
) -> Mapping[str, Any]:
    """One launch of the timed jobs that fit into these devices: the FSDP2 job, then the 8B job."""
    flags = training_jobs.that_fit(ranks_of_timed, device_row["memory_bytes"] / large_job.GIB)
    limit_s, env = training_jobs.TIMED_S, training_jobs.LARGE_MEMORY
    run = functools.partial(training_jobs.launched, launch, flags, ranks_of_timed, limit_s, env=env)
    found: Mapping[str, Any] = once(
        kept, "timed", run, "the launch of the timed jobs failed; look at the check before this one"
    )
    return found


@pytest.fixture
def ranks_of_timed(request: pytest.FixtureRequest) -> int:
    """How many ranks the timed jobs have: the same for both, where both can run."""
    name = "large_ranks" if "large_ranks" in request.fixturenames else "fsdp2_ranks"
    count: int = request.getfixturevalue(name)
    return count


@pytest.fixture
def tiny(jobs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record of the tiny job."""
    record: Mapping[str, Any] = jobs["records"]["tiny"]
    return record


@pytest.fixture
def uneven(jobs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record of the tiny job whose tensors the ranks cannot divide evenly."""
    record: Mapping[str, Any] = jobs["records"]["uneven"]
    return record


@pytest.fixture
def proxy(bf16_job: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record of the bf16 job, whose speed is recorded."""
    record: Mapping[str, Any] = bf16_job["records"]["proxy"]
    return record


@pytest.fixture
def flash_attn_4(bf16_job: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record of the bf16 job with FlashAttention 4, of a stack that has it."""
    if not of_image(about.has_flash_attn_4):
        skips.without_package("flash-attn>3", "FlashAttention 4 is not part of this stack")
    record: Mapping[str, Any] = bf16_job["records"]["flash_attn_4"]
    return record


def test_loss_falls(tiny: Mapping[str, Any], record_metric: RecordMetric) -> None:
    """A tiny Llama, sharded over the ranks with FSDP2, learns:
    losses are finite, and the last ones are lower.
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


@pytest.mark.usefixtures("tiny")
def test_loss_lies_in_the_reference_band(jobs: Mapping[str, Any], record_metric: RecordMetric) -> None:
    """The tiny job's losses stay in the widening band around the CPU's curve.
    They fall as low as they must.
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


def test_bf16_job_learns(proxy: Mapping[str, Any], record_metric: RecordMetric) -> None:
    """A bf16 job, sharded with FSDP2, has no problem; its losses are finite and fall."""
    assert proxy["problems"] == [], "\n".join(proxy["problems"])
    losses, norms = proxy["losses"], proxy["gradient_norms"]
    assert len(losses) == training_jobs.PROXY_STEPS, (
        f"{len(losses)} steps ran, expected {training_jobs.PROXY_STEPS}"
    )
    broken = [value for value in losses + norms if value is None or not 0 < value < math.inf]
    assert not broken, f"not finite, or not above 0: {losses}, {norms}"
    record_metric("train_bf16_loss_first", losses[0], unit="nats")
    record_metric("train_bf16_loss_last", losses[-1], unit="nats", repeats=losses)
    first, last = statistics.fmean(losses[:3]), statistics.fmean(losses[-3:])
    bound = BF16_LEARNED * first
    assert last < bound, (
        f"the mean of the last losses is {last:.3f}, expected less than {bound:.3f}: {losses}"
    )


@pytest.mark.usefixtures("tiny")
def test_resume_is_bit_equal(resumed: Callable[[str, int], None]) -> None:
    """A run resumed from a checkpoint has bitwise the losses, norms and weights of an uninterrupted one."""
    resumed("tiny", RESUME_AT)


@pytest.mark.usefixtures("uneven")
def test_resume_with_uneven_shards(ranks: int, resumed: Callable[[str, int], None]) -> None:
    """The same where ranks hold shards of different length: a vocabulary of 257, a hidden width of 161."""
    needs_pair(ranks)
    resumed("uneven", UNEVEN_RESUME_AT)


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


@pytest.mark.tier("standard")
def test_trains_with_flash_attn_4(
    flash_attn_4: Mapping[str, Any], proxy: Mapping[str, Any], record_metric: RecordMetric
) -> None:
    """The bf16 job runs the kernels of FlashAttention 4 where it has to, and learns as with torch's."""
    assert flash_attn_4["problems"] == [], "\n".join(flash_attn_4["problems"])
    seen = flash_attn_4["extra"]["attention"]
    assert seen["backend"] == "fa4", (
        f"{seen['backend']} ran, expected fa4: {seen['operators']} {seen['kernels']}"
    )
    shares = [
        abs(ours - torchs) / (band * torchs)
        for series, band in (("losses", SAME_LOSS), ("gradient_norms", SAME_NORM))
        for ours, torchs in zip(flash_attn_4[series], proxy[series], strict=True)
    ]
    margins.record(record_metric, max(shares), len(shares))
    assert max(shares) <= 1, (
        f"losses {flash_attn_4['losses']} and norms {flash_attn_4['gradient_norms']}, with torch's attention "
        f"{proxy['losses']} and {proxy['gradient_norms']}"
    )


def test_throughput(
    proxy: Mapping[str, Any],
    *,
    bf16_job: Mapping[str, Any],
    bf16_ranks: int,
    acceptance: AcceptanceSession,
    check: Check,
    record_metric: RecordMetric,
) -> None:
    """A small job's tokens per second and GPU are recorded without a bound.
    Its preflight reached the usual speeds.
    """
    preflight.require_usual(bf16_job["preflight"], bf16_ranks, acceptance, check)
    assert proxy["problems"] == [], "\n".join(proxy["problems"])
    training_jobs.record_speed(proxy, record_metric, gate=False)
    training_jobs.require_planned(proxy, "proxy", acceptance.model)


@pytest.fixture
def judged(
    acceptance: AcceptanceSession, check: Check, ranks_of_timed: int, record_metric: RecordMetric
) -> Callable[[Mapping[str, Any], str, str], None]:
    """Judge one of the timed jobs by its bound."""

    def judge(ran: Mapping[str, Any], name: str, metric: str) -> None:
        preflight.require_usual(ran["preflight"], ranks_of_timed, acceptance, check)
        record = ran["records"][name]
        assert record["problems"] == [], "\n".join(record["problems"])
        assert record["performance"] is not None, f"no step was timed; seconds by phase: {record['phases_s']}"
        timed = record["performance"]["timed_steps"]
        assert timed >= training_jobs.LEAST_TIMED, (
            f"{timed} steps were timed, expected at least {training_jobs.LEAST_TIMED}: {record['phases_s']}"
        )
        training_jobs.record_speed(record, record_metric, metric=metric, gate=True)
        training_jobs.require_planned(record, name, acceptance.model)

    return judge


@pytest.mark.tier("standard")
def test_throughput_8b(
    large_ranks: int,
    *,
    acceptance: AcceptanceSession,
    device_row: Mapping[str, Any],
    request: pytest.FixtureRequest,
    judged: Callable[[Mapping[str, Any], str, str], None],
) -> None:
    """Llama 3.1 8B reaches the device model's bound in tokens per second and GPU, at the power cap."""
    present = device_row["memory_bytes"] / large_job.GIB
    training_jobs.unless_it_fits(
        large_job.large_gib(large_ranks, large_job.samples_of(present)), present, acceptance
    )
    judged(request.getfixturevalue("timed_jobs"), "large", "train_tokens_per_s_per_gpu")


@pytest.mark.tier("standard")
def test_throughput_fsdp2(
    fsdp2_ranks: int,
    acceptance: AcceptanceSession,
    device_row: Mapping[str, Any],
    request: pytest.FixtureRequest,
    judged: Callable[[Mapping[str, Any], str, str], None],
) -> None:
    """Eight layers of Llama 3.1 8B, sharded with FSDP2 and compiled, reach the device model's bound."""
    present = device_row["memory_bytes"] / large_job.GIB
    training_jobs.unless_it_fits(large_job.fsdp2_gib(fsdp2_ranks), present, acceptance)
    judged(request.getfixturevalue("timed_jobs"), "fsdp2", "train_fsdp2_tokens_per_s_per_gpu")
