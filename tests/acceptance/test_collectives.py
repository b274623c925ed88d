"""Collectives: exact values on every rank, and a rank that never joins. In: n devices, or two gloo ranks."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from harness import processes
from harness.calls import SHARED_FAILED, Launch, RecordMetric, once
from harness.overdue import OverdueError
from harness.readings import needs_pair, only_with
from harness.session import AcceptanceSession
from vendors import multicast
from workloads import cases, generated, generated_report, margins

# `ranks` is every device of this run. What worlds leave behind is read as the device's memory, so no other
# check may use it then.
RANKS = {"cpu": 2, "whole": ("test_groups_set_up_and_torn_down",)}
HANG_S = 3.0
# A waiting rank must notice within this much more time: a process group checks its clock every second.
NOTICED_S = 20.0
# Only the library's log says whether switches add; these lines are written when a group is set up.
LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NVLS"}
RANKS_ADD = {**LOG, multicast.SWITCH: "0"}  # the order of these sums is NCCL's own, and the same each time
AGAIN_S = 120  # as in smoke: 200 sums of 8 MiB take less than a second, and the start of ranks the rest
TIMEOUT_S = {"smoke": 120, "standard": 240, "soak": 1800}
CYCLE_S = 20.0  # to set up and tear down a world; it takes less than a second
# Of drawn cases: so many in any case, then more until these seconds are over, at most so many. The fixed ones
# are the same in every run, as a tier that certifies must ask: 5 s of two ranks of a busy processor.
DRAWN = {
    "fixed": {"seed": generated.STANDARD_SEED, "least": 200, "most": 200, "seconds": 0},
    "more": {"least": 1000, "most": 20_000, "seconds": 300},
}
REFUSED = 0.1  # the largest share of them that a backend may refuse
# What a process may hold more of after all worlds than after the first ones. One that is left behind holds
# descriptors, threads, and on a GPU tens of MiB.
GROWTH = {"descriptors": 3.0, "threads": 3.0, "host_mib": 64.0, "device_mib": 64.0}


@pytest.fixture
def shared(kept: dict[str, Any], acceptance: AcceptanceSession, launch: Launch, ranks: int) -> dict[str, Any]:
    """The report of the launch that these checks share."""
    log = {**LOG, "NCCL_DEBUG_FILE": str(processes.inside(acceptance.result_dir) / "nccl-values.%h.%p")}
    arguments, timeout_s = ("collective_values.py", "--tier", acceptance.tier), TIMEOUT_S[acceptance.tier]
    run = functools.partial(launch, *arguments, nproc=ranks, timeout_s=timeout_s, env=log)
    report: dict[str, Any] = once(kept, "report", run, SHARED_FAILED)
    assert report["ranks"] == ranks, f"{report['ranks']} ranks took part, expected {ranks}"
    return report


@pytest.fixture
def values(shared: dict[str, Any], record_metric: RecordMetric) -> Callable[[str], None]:
    """Judge one operation of the shared launch, which uses exact data."""
    return lambda operation: cases.require(
        {"cases": [case for case in shared["cases"] if case["name"].startswith(f"{operation}: ")]},
        record_metric,
    )


def test_all_reduce_values(values: Callable[[str], None]) -> None:
    """All-reduce gives the exact sum, maximum and minimum, and the same bits on every rank."""
    values("all_reduce")


def test_all_gather_values(values: Callable[[str], None]) -> None:
    """All-gather puts every rank's values in rank order, byte for byte."""
    values("all_gather")


def test_reduce_scatter_values(values: Callable[[str], None]) -> None:
    """Reduce-scatter gives each rank exactly its own share of the sum."""
    values("reduce_scatter")


def test_all_to_all_values(values: Callable[[str], None]) -> None:
    """All-to-all exchanges equal, unequal and empty shares without mixing them up."""
    values("all_to_all")


def test_broadcast_values(values: Callable[[str], None]) -> None:
    """Broadcast from each root reaches every rank unchanged."""
    values("broadcast")


def test_reduce_values(values: Callable[[str], None]) -> None:
    """Reduce to each root gives it the exact sum."""
    values("reduce")


def test_scatter_values(values: Callable[[str], None]) -> None:
    """Scatter from each root gives every rank exactly its own share."""
    values("scatter")


def test_gather_values(values: Callable[[str], None]) -> None:
    """Gather to each root puts every rank's values in rank order there, and writes nothing elsewhere."""
    values("gather")


def test_scaled_sums(acceptance: AcceptanceSession, values: Callable[[str], None]) -> None:
    """The mean and the premultiplied sum, with which trainers average gradients, are exact."""
    only_with(acceptance.vendor != "cpu", "gpu", "gloo has neither a mean nor a premultiplied sum")
    values("all_reduce_scaled")


def test_send_receive_values(ranks: int, values: Callable[[str], None]) -> None:
    """Every pair of ranks can send to each other, and what arrives is what was sent."""
    needs_pair(ranks)
    values("send_receive")


def test_sub_group_values(values: Callable[[str], None]) -> None:
    """Groups that reduce at the same time, apart or sharing ranks, do not disturb each other."""
    values("sub_groups")


def test_collectives_in_flight(values: Callable[[str], None]) -> None:
    """Several collectives under way at once each end with their own values."""
    values("in_flight")


def test_collectives_keep_their_input(values: Callable[[str], None]) -> None:
    """Out-of-place collectives leave the data that they send untouched."""
    values("keeps_input")


def test_coalesced_collectives(values: Callable[[str], None]) -> None:
    """Several tensors in one coalesced call each end with their own values."""
    values("coalesced")


@pytest.mark.tier("standard")
def test_counts_around_powers_of_two(values: Callable[[str], None]) -> None:
    """Every collective is exact at every power of two, and one and three elements beside it."""
    values("counts")


@pytest.mark.tier("standard")
def test_group_of_one(values: Callable[[str], None]) -> None:
    """Every collective of a group of one rank, and its mean, gives it its own values to the last element."""
    values("group_of_one")


@pytest.mark.tier("standard")
def test_module_used_twice(values: Callable[[str], None]) -> None:
    """With FSDP2, a block that runs twice and tied weights have the gradients of the unsharded model."""
    values("used_twice")


@pytest.mark.tier("standard")
def test_same_bits_from_call_to_call(
    shared: dict[str, Any], launch: Launch, ranks: int, record_metric: RecordMetric
) -> None:
    """The same sum of the same 16-bit data has the same bits 50 times on every rank.

    The order in which a switch adds is its own: such sums are recorded, and judged again where ranks add.
    """
    judged = _sums(shared, record_metric)
    if shared["nvls"] == "on":
        again = launch("collective_values.py", "--repeats", nproc=ranks, timeout_s=AGAIN_S, env=RANKS_ADD)
        assert again["nvls"] != "on", f"switches add with {RANKS_ADD} too"
        judged = _sums(again, record_metric)
    restless = [
        f"{f['op']} of {f['dtype']}, {f['bytes']} B: {f['different']} of {f['repeats']} results differ"
        for f in judged
        if f["different"]
    ]
    margins.record(record_metric, margins.of(max(f["different"] for f in judged), 0), len(judged))
    assert not restless, "\n".join(restless)


def _sums(report: Mapping[str, Any], record_metric: RecordMetric) -> list[dict[str, Any]]:
    """The repeated sums of a launch, recorded."""
    figures: list[dict[str, Any]] = report["repeats"]
    assert figures, "no reduction was repeated"
    for figure in figures:
        conditions = {key: figure[key] for key in ("op", "dtype", "bytes", "repeats")}
        conditions["nvls"] = report["nvls"]
        different = float(figure["different"])
        record_metric("results_with_other_bits", different, unit="calls", conditions=conditions)
    return figures


@pytest.mark.tier("standard")
def test_groups_set_up_and_torn_down(
    ranks: int, launch: Launch, acceptance: AcceptanceSession, record_metric: RecordMetric
) -> None:
    """A world that is set up and torn down many times works each time and leaves nothing behind.
    It is tried with and without a device id. So are groups of one world, on a GPU in `soak` alone.
    """
    words, timeout_s = ("--groups", "--tier", acceptance.tier), TIMEOUT_S[acceptance.tier]
    report = launch("collective_values.py", *words, nproc=ranks, timeout_s=timeout_s)
    assert report["groups"], "no world was set up"
    for ways in report["groups"]:
        way = ways["way"]
        late = f"{way}: a world was not set up and torn down in time"
        assert not ways["error"], f"{late}; {ways['error']}"
        if ways["stuck"]:
            raise OverdueError(late)
        conditions = {"way": way, "cycles": ways["cycles"]}
        record_metric("world_cycle_s", ways["median_s"], unit="s", conditions=conditions)
        for name, grown in ways["grown"].items():
            record_metric(f"world_cycle_growth_{name}", grown, unit=name, conditions=conditions)
        assert not ways["wrong"], f"{way}: the sums of worlds {ways['wrong']} were wrong"
        slowest = ways["slowest_s"]
        limit_s = acceptance.limit_s(CYCLE_S, ranks)
        more = {name: grown for name, grown in ways["grown"].items() if not grown <= GROWTH[name]}
        assert not more, f"{way}: after {ways['counted']} more worlds this process holds more: {more}"
        if slowest > limit_s:
            raise OverdueError(f"{way}: the slowest world took {slowest:.1f} s, expected {limit_s:g} s")


@pytest.mark.parametrize(
    "cases_of",
    [
        pytest.param("fixed", marks=pytest.mark.tier("standard")),
        pytest.param("more", marks=pytest.mark.tier("soak")),
    ],
)
def test_generated_collectives(
    cases_of: str, ranks: int, launch: Launch, record_metric: RecordMetric, pytestconfig: pytest.Config
) -> None:
    """Drawn collectives are right in every type, size, buffer, group and order, and write nothing else.

    Of `more`, two runs with one seed draw the same cases; the one on a slower machine ends earlier, but never
    before the least number of them.
    """
    asked = {"seed": pytestconfig.getoption("case_seed"), **DRAWN[cases_of]}
    words = [str(word) for name, value in asked.items() for word in (f"--{name}", value)]
    timeout_s = TIMEOUT_S["standard" if cases_of == "fixed" else "soak"]
    report = launch("generated_collectives.py", *words, nproc=ranks, timeout_s=timeout_s)
    if report["hung"]:
        raise OverdueError("\n".join([f"did not end: {report['hung']}", *report["failed"]]))
    conditions = {"lacks": ", ".join(report["lacks"])}  # it draws what is nearest to that
    record_metric("generated_lacking", len(report["lacks"]), unit="features", conditions=conditions)
    generated_report.require(report, record_metric, 1 - REFUSED)


@pytest.mark.tier("standard")
def test_absent_rank_is_named(ranks: int, launch: Launch) -> None:
    """A collective that one rank never joins ends with an error within seconds, and the rank is named."""
    needs_pair(ranks)
    # By default NCCL ends the process, and nothing could report; in blocking mode it raises, as gloo does.
    blocking = {
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }
    found = launch("collective_hang.py", HANG_S, NOTICED_S, nproc=ranks, timeout_s=120, env=blocking)
    assert found["absent"] == [ranks - 1], (
        f"ranks {found['absent']} were named, but rank {ranks - 1} did not join"
    )
    silent = [rank for rank, error in found["errors"].items() if not error]
    assert not silent, f"ranks {silent} waited {HANG_S + NOTICED_S:g} s for rank {ranks - 1} without an error"
