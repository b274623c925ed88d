"""The collectives: exact values on every rank, and bandwidth by size. In: n devices, or two gloo ranks."""

import statistics
from collections.abc import Callable
from typing import Any

import pytest

from workloads import cases, curves

CPU_RANKS = 2
LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,TUNING,ENV,NVLS"}
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
# One more than a launch of the library takes; the operations of one launch share its communicator.
BANDWIDTH_TIMEOUT_S = 300


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`ranks` is every device of this run: a smaller world would leave links untried."""
    if "ranks" in metafunc.fixturenames:
        session = metafunc.config.pluginmanager.get_plugin("stackcheck-acceptance")
        count = CPU_RANKS if session.vendor == "cpu" else max(1, len(session.devices))
        perf = "curves_of" in metafunc.fixturenames
        mark = pytest.mark.gpus(count, perf=perf)
        metafunc.parametrize("ranks", [pytest.param(count, marks=mark, id=f"{count}")])


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    """What one launch found, for the checks that share it: importing torch on every rank costs seconds."""
    return {}


@pytest.fixture
def values(kept: dict[str, Any], acceptance: Any, launch: Any, ranks: int) -> Callable[[str], None]:
    """Judge one operation of the shared run over exact data."""

    def judge(operation: str) -> None:
        if "report" not in kept:
            assert "report not made" not in kept, (
                "the run that all these checks share has failed; see the first"
            )
            kept["report not made"] = True
            arguments = ("collective_values.py", "--tier", acceptance.tier)
            kept["report"] = launch(*arguments, nproc=ranks, timeout_s=120)
        report = kept["report"]
        assert report["ranks"] == ranks, f"{report['ranks']} ranks took part, expected {ranks}"
        cases.require({"cases": [c for c in report["cases"] if c["name"].startswith(f"{operation}: ")]})

    return judge


@pytest.fixture
def curves_of(
    kept: dict[str, Any], acceptance: Any, launch: Any, record_metric: Any, ranks: int
) -> Callable[[str], None]:
    """Record and judge the bandwidth curve of one operation out of the run that all of them share."""

    def judge(operation: str) -> None:
        if ranks == 1:
            pytest.skip("one device has no link to measure")
        if "curves" not in kept:
            assert "no curves" not in kept, "the run that these checks share has failed; see the first"
            kept["no curves"] = True
            log = {**LOG, "NCCL_DEBUG_FILE": str(acceptance.result_dir / "nccl.%h.%p")}
            largest = ("--largest", str(4 << 30)) if acceptance.tier == "soak" else ()
            arguments = ("collective_bandwidth.py", *OPERATIONS, *largest)
            kept["curves"] = launch(*arguments, nproc=ranks, timeout_s=BANDWIDTH_TIMEOUT_S, env=log)
        record_curve(kept["curves"], operation, ranks, record_metric)

    return judge


def record_curve(run: dict[str, Any], operation: str, ranks: int, record_metric: Any) -> None:
    """Every size is gated by its own bound; the curve may not dip; the data of every size were right."""
    figures = [figure for figure in run["figures"] if figure["op"] == operation]
    curve = {}
    for figure in figures:
        if figure["mode"] != "values":
            name, repeats, unit = reading(figure, operation, ranks)
            value = statistics.median(repeats)
            record_metric(
                name,
                value,
                unit=unit,
                repeats=repeats,
                conditions=conditions_of(run, figure, operation),
                gate=figure["mode"] == "stream",
            )
            if figure["mode"] == "stream":
                curve[figure["bytes"]] = value
    assert curve, f"no figure for {operation}"
    wrong = [text for figure in figures for text in figure.get("failures", ())]
    assert not wrong, "\n".join(wrong)
    dips = curves.dips(curve)
    assert not dips, f"{operation} bandwidth falls where it should not: {'; '.join(dips)}"


def reading(figure: dict[str, Any], operation: str, ranks: int) -> tuple[str, list[float], str]:
    """(metric, repeats, unit) of one figure: bandwidth, or the latency of a call inside a graph."""
    if figure["mode"] == "graph":
        return f"{operation}_latency_us", [seconds * 1e6 for seconds in figure["seconds"]], "us"
    rates = [curves.busbw_gb_per_s(operation, figure["bytes"], s, ranks) for s in figure["seconds"]]
    return f"{operation}_busbw", rates, "GB/s"


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


def test_send_receive_values(ranks: int, values: Callable[[str], None]) -> None:
    """Every pair of ranks can send to each other, and what arrives is what was sent."""
    if ranks == 1:
        pytest.skip("one device has no peer to send to")
    values("send_receive")


def test_sub_group_values(values: Callable[[str], None]) -> None:
    """Two groups that reduce at the same time do not disturb each other."""
    values("sub_groups")


def test_collectives_in_flight(values: Callable[[str], None]) -> None:
    """Several collectives under way at once each end with their own values."""
    values("in_flight")


def test_collectives_keep_their_input(values: Callable[[str], None]) -> None:
    """Out-of-place collectives leave the data that they send untouched."""
    values("keeps_input")


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
