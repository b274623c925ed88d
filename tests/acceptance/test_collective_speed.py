"""The speed of collectives by size, and of every pair. In: n devices, or two gloo ranks. Out: figures."""

import statistics
from collections.abc import Callable
from typing import Any

import pytest

from harness import causes
from harness.check import Check, invalid
from harness.fixtures import Launch, RecordMetric
from harness.session import AcceptanceSession, every_device
from workloads import speed_conditions, speed_outliers

CPU_RANKS = 2
LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,TUNING,ENV,NVLS"}
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
TIMEOUT_S = 300


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`ranks` is every device of this run; what times them has the machine alone."""
    every_device(metafunc, cpu=CPU_RANKS, perf=bool({"links", "timed"} & set(metafunc.fixturenames)))


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    """What one launch found, for the checks that share it: importing torch on every rank costs seconds."""
    return {}


@pytest.fixture
def links(
    kept: dict[str, Any], acceptance: AcceptanceSession, launch: Launch, ranks: int, check: Check
) -> dict[str, Any]:
    """What every pair carries, and what the library chose for each size: one launch with its log on."""
    if ranks == 1:
        pytest.skip("one device has no link to measure")
    if "links" not in kept:
        assert "no links" not in kept, "the run that these checks share has failed; see the first"
        kept["no links"] = True
        log = {**LOG, "NCCL_DEBUG_FILE": str(acceptance.result_dir / "nccl.%h.%p")}
        # Without a GPU there is no log that could disturb the figures, and one launch gives all of them.
        arguments = ("collective_links.py", *OPERATIONS, *(("--timed",) if acceptance.shares_devices else ()))
        kept["links"] = launch(*arguments, nproc=ranks, timeout_s=TIMEOUT_S, env=log)
        if kept["links"]["figures"] is not None:
            kept["timed"] = {"figures": kept["links"]["figures"]}
    run: dict[str, Any] = kept["links"]
    keep_host_facts(run, check)
    return run


def keep_host_facts(run: dict[str, Any], check: Check) -> None:
    """What the library warned of becomes evidence; a file that sets it up unseen makes figures invalid."""
    check.more_evidence["collectives"] = {name: run[name] for name in ("warnings", "files", "kernel")}
    check.hints = causes.of_host(run["warnings"], run["kernel"])
    if set_up := [f"{path} sets {', '.join(lines)}" for path, lines in run["files"].items() if lines]:
        invalid(f"the figures are of a configuration file, not of the image: {'; '.join(set_up)}")


@pytest.fixture
def timed(
    kept: dict[str, Any], acceptance: AcceptanceSession, launch: Launch, links: dict[str, Any], ranks: int
) -> dict[str, Any]:
    """The figures of every operation and size, out of the launch that all of them share; with no log."""
    if "timed" not in kept:
        assert "no figures" not in kept, "the run that these checks share has failed; see the first"
        kept["no figures"] = True
        largest = ("--largest", str(speed_conditions.PLATEAU_BYTES)) if acceptance.tier == "soak" else ()
        arguments = ("collective_bandwidth.py", *OPERATIONS, *largest)
        kept["timed"] = launch(*arguments, nproc=ranks, timeout_s=TIMEOUT_S)
    return {**links, **kept["timed"]}


@pytest.fixture
def curves_of(timed: dict[str, Any], record_metric: RecordMetric, ranks: int) -> Callable[[str], None]:
    """Record and judge the bandwidth curve of one operation."""
    return lambda operation: record_curve(timed, operation, ranks, record_metric)


def record_curve(run: dict[str, Any], operation: str, ranks: int, record_metric: RecordMetric) -> None:
    """Every size is gated by its own bound; the curve may not dip; the data of every size were right.

    Small sizes are gated inside a graph where there is one: launched one by one they show the host. On one
    whose processor was busy 64 KiB took twice as long, and inside a graph as long as ever.
    """
    figures = [figure for figure in run["figures"] if figure["op"] == operation]
    graphed = {figure["bytes"] for figure in figures if figure["mode"] == "graph"}
    curve = {}
    for figure in figures:
        if figure["mode"] == "values":
            continue
        name, repeats, unit = reading(figure, operation, ranks)
        value, eager = statistics.median(repeats), figure["mode"] == "eager"
        gated = figure["mode"] == "graph" or (eager and figure["bytes"] not in graphed)
        conditions = conditions_of(run, figure, operation)
        record_metric(name, value, unit=unit, repeats=repeats, conditions=conditions, gate=gated)
        if eager:
            curve[figure["bytes"]] = value
    assert curve, f"no figure for {operation}"
    wrong = [text for figure in figures for text in figure.get("failures", ())]
    assert not wrong, "\n".join(wrong)
    dips = speed_outliers.dips(curve)
    assert not dips, f"{operation} bandwidth falls where it should not: {'; '.join(dips)}"


def reading(figure: dict[str, Any], operation: str, ranks: int) -> tuple[str, list[float], str]:
    """(metric, repeats, unit) of one figure: bandwidth, or the latency of a call inside a graph."""
    if figure["mode"] == "graph":
        return f"{operation}_latency_us", [seconds * 1e6 for seconds in figure["seconds"]], "us"
    rates = [speed_outliers.busbw_gb_per_s(operation, figure["moved"], s, ranks) for s in figure["seconds"]]
    return f"{operation}_{'torch_' if figure['mode'] == 'torch' else ''}busbw", rates, "GB/s"


def conditions_of(run: dict[str, Any], figure: dict[str, Any], operation: str) -> dict[str, Any]:
    """What selects the bound, and what may have changed the figure."""
    return {
        "bytes": figure["bytes"],
        "dtype": "bf16",
        "nvls": run["nvls"],
        "graph": figure["mode"] == "graph",
        "choice": chosen(run["choices"], operation, figure["bytes"]),
        "library": run["library"],
        "environment": run["environment"],
        "configuration_files": run["files"],
    }


def chosen(choices: dict[str, dict[str, str]], operation: str, size: int) -> str | None:
    """What the library's debug file says it used, as in RING/LL128; None where it said nothing."""
    return choices.get(operation.replace("_", " ").title().replace(" ", ""), {}).get(str(size))


@pytest.mark.tier("standard")
def test_all_reduce_busbw(curves_of: Callable[[str], None]) -> None:
    """All-reduce reaches the bandwidth of this device model at every named size, without a dip."""
    curves_of("all_reduce")


@pytest.mark.tier("standard")
def test_all_gather_busbw(curves_of: Callable[[str], None]) -> None:
    """All-gather reaches the bandwidth of this device model at every named size, without a dip."""
    curves_of("all_gather")


@pytest.mark.tier("standard")
def test_reduce_scatter_busbw(curves_of: Callable[[str], None]) -> None:
    """Reduce-scatter reaches the bandwidth of this device model at every named size, without a dip."""
    curves_of("reduce_scatter")


@pytest.mark.tier("standard")
def test_all_to_all_busbw(curves_of: Callable[[str], None]) -> None:
    """All-to-all reaches the bandwidth of this device model at every named size, without a dip."""
    curves_of("all_to_all")


@pytest.mark.tier("standard")
def test_send_receive_bandwidth(links: dict[str, Any], ranks: int, record_metric: RecordMetric) -> None:
    """Every ordered pair of ranks carries its data right, as fast as its way back and as the other pairs."""
    rates = {}
    for pair in links["pairs"]:
        repeats = [links["bytes"] / seconds / 1e9 for seconds in pair["seconds"]]
        rates[pair["from"], pair["to"]] = value = statistics.median(repeats)
        conditions = {"bytes": links["bytes"], "from": pair["from"], "to": pair["to"], "nvls": links["nvls"]}
        record_metric("pair_gb_per_s", value, unit="GB/s", repeats=repeats, conditions=conditions)
    assert len(rates) == ranks * (ranks - 1), f"{len(rates)} ordered pairs of {ranks} ranks were measured"
    wrong = [f"{p['from']} to {p['to']}: {text}" for p in links["pairs"] for text in p["failures"]]
    assert not wrong, "\n".join(wrong)
    odd = speed_outliers.odd_pairs(rates) if links["bytes"] >= speed_outliers.SHAPE_FROM_BYTES else []
    assert not odd, "\n".join(odd)


@pytest.mark.tier("standard")
def test_barrier_latency(timed: dict[str, Any], record_metric: RecordMetric) -> None:
    """A barrier of all ranks waits for the last of them, and how long it takes is on record."""
    figures = {figure["mode"]: figure for figure in timed["figures"] if figure["op"] == "barrier"}
    repeats = [seconds * 1e6 for seconds in figures["torch"]["seconds"]]
    record_metric("barrier_latency_us", statistics.median(repeats), unit="us", repeats=repeats)
    assert not figures["values"]["failures"], "\n".join(figures["values"]["failures"])
