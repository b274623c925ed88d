"""The comparison with nccl-tests: its table is read right, and a difference beyond the goal is seen."""

import importlib.util
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "collectives.py"
ASSETS = Path(__file__).parent / "assets"


@pytest.fixture
def collectives(monkeypatch):
    spec = importlib.util.spec_from_file_location("benchmark_collectives", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_the_median_cycle_out_of_place_is_read(collectives) -> None:
    table = (ASSETS / "nccl-tests.txt").read_text(encoding="utf-8")
    assert collectives.parsed(table) == {65_536: 4.57, 16_777_216: 251.91}


def test_output_without_a_table_is_refused(collectives) -> None:
    with pytest.raises(SystemExit, match="no row"):
        collectives.parsed("Test NCCL failure common.cu:1279 'unhandled cuda error'")


def test_bandwidth_is_nccl_tests_definition(collectives) -> None:
    figure = {"op": "all_reduce", "moved": 65_536, "seconds": [21.51e-6]}
    assert collectives.busbw(figure, 4) == pytest.approx(4.57, rel=1e-3)
    assert collectives.busbw(figure | {"op": "all_gather"}, 4) == pytest.approx(2.285, rel=1e-3)


@pytest.mark.parametrize(
    ("size", "suite", "within"),
    [(65_536, 4.9, True), (65_536, 8.69, False), (16 << 20, 255.0, True), (16 << 20, 270.7, False)],
)
def test_goal_is_two_per_cent_of_large_and_ten_of_small_sizes(collectives, size, suite, within) -> None:
    theirs = 4.57 if size == 65_536 else 251.9
    line = collectives.Line("all_reduce", size, suite, theirs, theirs, suite)
    assert line.within is within
    assert ("met" if within else "missed") in collectives.table([line])
