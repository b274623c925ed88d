"""The speed of collectives by size, and of every pair. In: n devices, or two gloo ranks. Out: metrics."""

import functools
import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest

from harness import causes, processes, skips
from harness.calls import SHARED_FAILED, Launch, RecordMetric, once
from harness.check import Check
from harness.readings import linked_pairs, links_of_pairs, needs_pair
from harness.session import AcceptanceSession
from vendors import Device, Host
from workloads import speed_conditions, speed_outliers

# `ranks` is every device of this run; these checks have the machine alone.
RANKS = {"cpu": 2, "perf": True}
LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,TUNING,ENV,NET,NVLS"}
GATE_LOG = {**LOG, "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,NVLS"}  # nothing at a call, so it slows none down
GATE_BYTES = 64 << 20  # the largest size of a gate
OPERATIONS = speed_conditions.COLLECTIVES
TIMEOUT_S = 300
# torch.distributed beside the library called directly, by bytes: it passes the buffers on as they are. At
# 16 MiB a busy host's launches take part of the time: H200s read 0.81 to 1.02 there, from 64 MiB on 0.98.
LEAST_TORCH_SHARE = {16 << 20: 0.7, 64 << 20: 0.9, 256 << 20: 0.9, 1 << 30: 0.9}
# A sum of float32 moves the same bytes over the same links with half of the additions. Both are timed in one
# launch, so the share needs no bound of the device model; it holds on every one.
LEAST_FP32_SHARE = 0.9


@pytest.fixture
def links(
    kept: dict[str, Any], acceptance: AcceptanceSession, launch: Launch, ranks: int, check: Check
) -> dict[str, Any]:
    """The speed of every pair, and the library's choices for each size: one launch with its log on."""
    needs_pair(ranks)
    subsystems = GATE_LOG if acceptance.is_gate else LOG
    log = {**subsystems, "NCCL_DEBUG_FILE": str(processes.inside(acceptance.result_dir) / "nccl.%h.%p")}
    # Without a GPU there is no log that could slow the calls down, so one launch measures everything.
    largest = ("--timed", str(GATE_BYTES)) if acceptance.is_gate else ("--timed", str(1 << 30))
    timed = largest if acceptance.shares_devices or acceptance.is_gate else ()
    arguments = ("collective_links.py", *OPERATIONS, *timed)
    make = functools.partial(launch, *arguments, nproc=ranks, timeout_s=TIMEOUT_S, env=log)
    run: dict[str, Any] = once(kept, "links", make, SHARED_FAILED)
    if run["figures"] is not None:
        kept["timed"] = {"figures": run["figures"]}
    names = ("warnings", "files", "kernel", "network")
    check.more_evidence["collectives"] = {name: run[name] for name in names}
    check.hints = causes.of_host(run["warnings"], run["kernel"])
    # Such a file lies in the image, so it would reach every user.
    if set_up := [f"{path} sets {', '.join(lines)}" for path, lines in run["files"].items() if lines]:
        words = f"a configuration file sets the library up: {'; '.join(set_up)}; remove it"
        pytest.fail(words, pytrace=False)
    return run


@pytest.fixture
def timed(
    kept: dict[str, Any], acceptance: AcceptanceSession, launch: Launch, links: dict[str, Any], ranks: int
) -> dict[str, Any]:
    """The times of every operation and size, from one shared launch without the log."""
    largest = ("--largest", str(speed_conditions.PLATEAU_BYTES)) if acceptance.tier == "soak" else ()
    arguments = ("collective_bandwidth.py", *OPERATIONS, *largest)
    run = functools.partial(launch, *arguments, nproc=ranks, timeout_s=TIMEOUT_S)
    return {**links, **once(kept, "timed", run, SHARED_FAILED)}


@pytest.fixture
def curves_of(timed: dict[str, Any], record_metric: RecordMetric, ranks: int) -> Callable[[str], None]:
    """Record and judge the bandwidth curve of one operation."""
    return lambda operation: record_curve(timed, operation, ranks, record_metric)


def record_curve(run: dict[str, Any], operation: str, ranks: int, record_metric: RecordMetric) -> None:
    """Judge every size by its own bound, the curve for dips, and the data of every size for errors.

    Small sizes are judged inside a captured graph, if there is one. Launched one by one they measure the
    host: with a busy processor 64 KiB took twice as long, but inside a graph as long as before.
    """
    figures = [figure for figure in run["figures"] if figure["op"] == operation]
    graphed = {figure["bytes"] for figure in figures if figure["mode"] == "graph"}
    curve = {}
    for figure in figures:
        if figure["mode"] in {"values", "fp32"}:
            continue
        name, repeats, unit = reading(figure, operation, ranks)
        value, eager = statistics.median(repeats), figure["mode"] == "eager"
        gated = figure["mode"] == "graph" or (eager and figure["bytes"] not in graphed)
        # What selects the bound, and the settings that may have changed the speed.
        conditions = {
            "bytes": figure["bytes"],
            "dtype": "bf16",
            "nvls": run["nvls"],
            "graph": figure["mode"] == "graph",
            "choice": chosen(run["choices"], operation, figure["bytes"]),
            "library": run["library"],
            "environment": run["environment"],
            "configuration_files": run["files"],
        }
        record_metric(name, value, unit=unit, repeats=repeats, conditions=conditions, gate=gated)
        if eager:
            curve[figure["bytes"]] = value
    assert curve, f"{operation} was not measured"
    wrong = [text for figure in figures for text in figure.get("failures", ())]
    assert not wrong, "\n".join(wrong)
    dips = speed_outliers.dips(curve)
    assert not dips, f"{operation} bandwidth falls with growing size: {'; '.join(dips)}"


def reading(figure: dict[str, Any], operation: str, ranks: int) -> tuple[str, list[float], str]:
    """(metric, repeats, unit) of one measurement: bandwidth, or latency for a call inside a graph."""
    if figure["mode"] == "graph":
        return f"{operation}_latency_us", [seconds * 1e6 for seconds in figure["seconds"]], "us"
    rates = [speed_outliers.busbw_gb_per_s(operation, figure["moved"], s, ranks) for s in figure["seconds"]]
    return f"{operation}_{'torch_' if figure['mode'] == 'torch' else ''}busbw", rates, "GB/s"


def chosen(choices: dict[str, dict[str, str]], operation: str, size: int) -> str | None:
    """The algorithm and protocol in the library's log, such as RING/LL128; None if the log has none."""
    return choices.get(operation.replace("_", " ").title().replace(" ", ""), {}).get(str(size))


@pytest.mark.gate
@pytest.mark.tier("standard")
def test_all_reduce_busbw(curves_of: Callable[[str], None]) -> None:
    """All-reduce reaches this device model's bandwidth at every size. It is never slower at a larger size."""
    curves_of("all_reduce")


@pytest.mark.gate
@pytest.mark.tier("standard")
def test_all_gather_busbw(curves_of: Callable[[str], None]) -> None:
    """All-gather reaches this device model's bandwidth at every size. It is never slower at a larger size."""
    curves_of("all_gather")


@pytest.mark.gate
@pytest.mark.tier("standard")
def test_reduce_scatter_busbw(curves_of: Callable[[str], None]) -> None:
    """Reduce-scatter reaches this device model's bandwidth at every size.
    It is never slower at a larger size.
    """
    curves_of("reduce_scatter")


@pytest.mark.gate
@pytest.mark.tier("standard")
def test_all_to_all_busbw(curves_of: Callable[[str], None]) -> None:
    """All-to-all reaches this device model's bandwidth at every size. It is never slower at a larger size."""
    curves_of("all_to_all")


@pytest.mark.tier("standard")
def test_fp32_beside_bf16_speed(
    timed: dict[str, Any], ranks: int, acceptance: AcceptanceSession, record_metric: RecordMetric
) -> None:
    """Sums of float32, in which gradients are reduced, are as fast as sums of the same bytes of bfloat16."""
    by_mode = rates_by_mode(timed, ranks)
    wide = [key for key in by_mode if key[2] == "fp32"]
    assert wide, "no sum of float32 was timed"
    slow = []
    for op, size, _ in wide:
        other = "eager" if acceptance.shares_devices else "torch"
        rate = {}
        for dtype, mode in (("fp32", "fp32"), ("bf16", other)):
            repeats = by_mode[op, size, mode]
            rate[dtype] = value = statistics.median(repeats)
            conditions = {"bytes": size, "dtype": dtype, "nvls": timed["nvls"]}
            record_metric(f"{op}_torch_busbw", value, unit="GB/s", repeats=repeats, conditions=conditions)
        if not rate["fp32"] >= LEAST_FP32_SHARE * rate["bf16"]:
            slow.append(
                f"{op} of {size} B: {rate['fp32']:.1f} GB/s in fp32, {rate['bf16']:.1f} in bf16; "
                f"expected at least {LEAST_FP32_SHARE:.0%} of it"
            )
    # Without links and with a busy processor the share says nothing.
    assert not slow or acceptance.shares_devices, "\n".join(slow)


@pytest.mark.tier("standard")
def test_torch_beside_the_library_speed(
    timed: dict[str, Any], ranks: int, acceptance: AcceptanceSession, record_metric: RecordMetric
) -> None:
    """A collective through torch.distributed is as fast as the same call of the library, from 16 MiB on."""
    if acceptance.shares_devices:
        skips.without_feature("gpu", "a CPU has no library of collectives beside torch's")
    by_mode = rates_by_mode(timed, ranks)
    sizes = [(op, size) for op, size, mode in by_mode if mode == "torch" and size in LEAST_TORCH_SHARE]
    assert sizes, "no collective was timed through torch"
    slow = []
    for op, size in sizes:
        rate = {mode: statistics.median(by_mode[op, size, mode]) for mode in ("torch", "eager")}
        share, least = rate["torch"] / rate["eager"], LEAST_TORCH_SHARE[size]
        told = {"kernel": f"{op} through torch", "beside": "the library", "bytes": size}
        record_metric("share_of_speed", share, unit="of the library", conditions=told)
        if not share >= least:
            slow.append(
                f"{op} of {size} B: {rate['torch']:.1f} GB/s through torch, {rate['eager']:.1f} by the "
                f"library; expected at least {least:.0%} of it"
            )
    assert not slow, "\n".join(slow)


def rates_by_mode(run: dict[str, Any], ranks: int) -> dict[tuple[str, int, str], list[float]]:
    """Operation, bytes and mode -> GB/s of each repeat."""
    return {
        (f["op"], f["bytes"], f["mode"]): [
            speed_outliers.busbw_gb_per_s(f["op"], f["moved"], seconds, ranks) for seconds in f["seconds"]
        ]
        for f in run["figures"]
        if "seconds" in f and f["op"] in OPERATIONS
    }


@pytest.mark.gate
@pytest.mark.tier("standard")
def test_send_receive_bandwidth(
    links: dict[str, Any], devices: tuple[Device, ...], host: Host, ranks: int, record_metric: RecordMetric
) -> None:
    """Every ordered pair of ranks carries its data right.
    It is as fast as its way back and as the other pairs with the same number of links.
    """
    rates, best = {}, {}
    for pair in links["pairs"]:
        repeats = [links["bytes"] / seconds / 1e9 for seconds in pair["seconds"]]
        rates[pair["from"], pair["to"]] = value = statistics.median(repeats)
        best[pair["from"], pair["to"]] = min(repeats) if math.isnan(value) else max(repeats)
        conditions = {"bytes": links["bytes"], "from": pair["from"], "to": pair["to"], "nvls": links["nvls"]}
        record_metric("pair_gb_per_s", value, unit="GB/s", repeats=repeats, conditions=conditions)
    assert len(rates) == ranks * (ranks - 1), (
        f"{len(rates)} ordered pairs were measured, expected {ranks * (ranks - 1)}"
    )
    wrong = [f"{p['from']} to {p['to']}: {text}" for p in links["pairs"] for text in p["failures"]]
    assert not wrong, "\n".join(wrong)
    counted, linked = links_of_pairs(host, devices), linked_pairs(host, devices)
    odd = (
        speed_outliers.odd_pairs(best, counted, linked)
        if links["bytes"] >= speed_outliers.SHAPE_FROM_BYTES
        else []
    )
    assert not odd, "\n".join(odd)


@pytest.mark.tier("standard")
def test_barrier_latency(timed: dict[str, Any], record_metric: RecordMetric) -> None:
    """A barrier of all ranks waits for the last rank; its latency is recorded."""
    figures = {figure["mode"]: figure for figure in timed["figures"] if figure["op"] == "barrier"}
    repeats = [seconds * 1e6 for seconds in figures["torch"]["seconds"]]
    record_metric("barrier_latency_us", statistics.median(repeats), unit="us", repeats=repeats)
    assert not figures["values"]["failures"], "\n".join(figures["values"]["failures"])
