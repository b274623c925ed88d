"""The comparison with nccl-tests: its table is read right, and a difference beyond the goal is seen."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[3] / "benchmarks" / "collectives.py"
ASSETS = Path(__file__).parents[1] / "assets"


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
    line = collectives.Line("all_reduce", size, (suite,), (theirs,), (theirs,), (suite,))
    assert line.within is within
    assert ("met" if within else "missed") in collectives.table([line])


def test_launches_take_turns_and_their_medians_are_compared(collectives, monkeypatch) -> None:
    asked = []

    def run(command: list[str], **_: str) -> str:
        asked.append(Path(command[0]).name if "_perf" in command[0] else "suite")
        seconds = 16_777_216 * 0.75 / 1e9 / (200.0 if len(asked) == 1 else 100.0)
        modes = [
            {"op": "all_to_all", "bytes": 16_777_216, "moved": 16_777_216, "mode": m}
            for m in ("eager", "torch")
        ]
        figures = [mode | {"seconds": [seconds]} for mode in modes]
        row = "16777216 2097152 bfloat16 none -1 125.8 133.4 100.0 0 0 0 0 0 0"
        return row if "_perf" in command[0] else json.dumps({"figures": figures})

    monkeypatch.setattr(collectives, "run", run)
    rounds = [collectives.one_round(Path(), 4, "/torch/libnccl.so.2", ["all_to_all"]) for _ in range(3)]
    assert asked == ["suite", "alltoall_perf", "alltoall_perf"] * 3
    (line,) = collectives.compared(rounds)
    assert line.suite == pytest.approx((200.0, 100.0, 100.0))
    assert line.within
    assert "100 (100 to 200)" in collectives.table([line])
