"""Half an hour of training at full power: does the speed last, and is the machine still right? In: n devices.
Out: metrics, problems.

The soak tier alone runs it. Heat, power and memory that wears out show in minutes, not in the seconds of the
other suites.
"""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from harness import host_memory, preflight, skips, training_jobs
from harness.calls import Launch, RecordMetric
from harness.check import Check
from harness.session import AcceptanceSession
from test_training import TINY
from vendors import Device, is_known
from workloads import large_job

RANKS = {"cpu": 2, "perf": True}  # `ranks` is every device of this run, which has the machine alone
SECONDS, CPU_SECONDS = 1800.0, 6.0
MARGIN_S = 420.0  # start, preflight, compilation and the tiny job
PART_MINUTES, LARGEST_LOSS = 5, 0.03  # the last minutes may be this much slower than the first
# Of the cap. H200s draw 98 % of it in this job; under half of it the chip was idle or held back.
LEAST_POWER = 0.5
STEADY = ("--steps", 1_000_000, "--budget-s")


@pytest.fixture
def ran(
    ranks: int, *, acceptance: AcceptanceSession, check: Check, device_row: Mapping[str, Any], launch: Launch
) -> Mapping[str, Any]:
    """One launch: preflight, the long job, and the tiny job on the hot machine."""
    on_cpu = acceptance.shares_devices
    seconds = CPU_SECONDS if on_cpu else SECONDS
    present, needed = device_row["memory_bytes"] / large_job.GIB, large_job.fsdp2_gib(ranks)
    if needed > present and not on_cpu:
        skips.without_memory(needed, present)
    acceptance.ended.expect(seconds + MARGIN_S)
    job = (*TINY, "--no-digest", "--no-backend-check") if on_cpu else training_jobs.FSDP2_JOB
    flags = {"long": (*job, *STEADY, seconds), "tiny": (*TINY, "--no-backend-check")}
    limit_s, began_s = seconds + MARGIN_S, time.time()
    found = training_jobs.launched(launch, flags, ranks, limit_s, env=training_jobs.LARGE_MEMORY)
    preflight.require_usual(found["preflight"], ranks, acceptance, check)
    return {**found, "host_memory": acceptance.host_memory.readings(began_s)}


@pytest.mark.tier("soak")
def test_training_at_full_power(
    ran: Mapping[str, Any],
    acceptance: AcceptanceSession,
    devices: tuple[Device, ...],
    check: Check,
    record_metric: RecordMetric,
) -> None:
    """FSDP2 trains for half an hour at full power without losing speed; a tiny job then stays in its band."""
    record = ran["records"]["long"]
    assert record["problems"] == [], "\n".join(record["problems"])
    require_learnt(record["losses"])
    speed = record["performance"]
    assert speed is not None, f"no step was timed; seconds by phase: {record['phases_s']}"
    training_jobs.record_speed(record, record_metric, metric="train_soak_tokens_per_s_per_gpu", gate=False)
    training_jobs.require_planned(record, "fsdp2", acceptance.model)
    host_memory.record(ran["host_memory"], record_metric)
    check.more_evidence["minutes"] = {"tokens_per_s_per_gpu": speed["tokens_per_s_per_gpu_by_minute"]}
    if not acceptance.shares_devices:  # a busy processor has no steady speed, and no power reading
        require_power(speed, devices, record_metric)
        require_steady(speed["tokens_per_s_per_gpu_by_minute"], record_metric)
    growing = host_memory.growing(ran["host_memory"]) if acceptance.shares_devices else []
    assert not growing, "\n".join(growing)
    verdict = ran["curves"]["tiny"]
    assert verdict is not None, "trainers/curves has no reference curve for the tiny job"
    record_metric("train_soak_worst_deviation", verdict["worst_share"] or 0.0, unit="band widths")
    assert verdict["problems"] == [], "\n".join(verdict["problems"])


def require_learnt(losses: Sequence[float | None]) -> None:
    """Every loss is a number, and the last ones are lower than the first ones."""
    known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    assert known, "no step has a loss"
    assert len(known) == len(losses), f"{len(losses) - len(known)} of {len(losses)} losses are no numbers"
    part = max(1, len(known) // 10)
    first, last = (statistics.mean(some) for some in (known[:part], known[-part:]))
    assert last < first, f"the last losses are {last:.4f} on average, the first {first:.4f}"


def require_power(speed: Mapping[str, Any], devices: Sequence[Device], record_metric: RecordMetric) -> None:
    """The job used the chip: a machine that idles shows nothing."""
    watts = speed.get("power_w")
    why = speed.get("energy_unread", "the record does not say why")
    assert watts is not None, f"the device's energy was not read, so nothing shows that it worked: {why}"
    record_metric("train_soak_power_w", watts, unit="W")
    cap = devices[0].power.cap_w
    if is_known(cap):
        least = LEAST_POWER * float(cap)
        assert watts >= least, f"rank 0 drew {watts:.0f} W on average, expected {least:.0f} of {cap} W"


def require_steady(minutes: Sequence[float], record_metric: RecordMetric) -> None:
    """The last minutes are as fast as the first."""
    assert len(minutes) >= 2 * PART_MINUTES, f"{len(minutes)} whole minutes were timed, expected 10 and more"
    first, last = (statistics.mean(some) for some in (minutes[:PART_MINUTES], minutes[-PART_MINUTES:]))
    record_metric("train_soak_speed_kept", last / first, unit="ratio", repeats=minutes)
    assert last >= (1 - LARGEST_LOSS) * first, (
        f"the last {PART_MINUTES} minutes ran at {last:.0f} tokens/s and GPU, the first at {first:.0f}: "
        f"{1 - last / first:.1%} slower, {LARGEST_LOSS:.0%} allowed"
    )
