"""The collectives: exact values on every rank, and bandwidth by size. In: n devices, or two gloo ranks."""

from collections.abc import Callable
from typing import Any

import pytest
from workloads import cases

CPU_RANKS = 2


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`ranks` is every device of this run: a smaller world would leave links untried."""
    if "ranks" in metafunc.fixturenames:
        session = metafunc.config.pluginmanager.get_plugin("stackcheck-acceptance")
        count = CPU_RANKS if session.vendor == "cpu" else max(1, len(session.devices))
        metafunc.parametrize("ranks", [pytest.param(count, marks=pytest.mark.gpus(count), id=f"{count}")])


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
