"""Timing settings keeps what it has when time runs out, and each lever's flags are flags of the trainer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import options as cli

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import ablation  # noqa: E402 - benchmarks/ has to be on the path first

TINY = "--size tiny --steps 6 --no-preflight"


def run(out: Path, *arguments: str) -> str:
    command = [sys.executable, BENCHMARKS / "train.py", "--out", out, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=250).stdout


@pytest.mark.parametrize("base", sorted(ablation.BASES))
def test_each_lever_changes_the_base_and_is_a_flag_that_can_run(base: str) -> None:
    _, first, *others = ablation.settings(base, 1)
    settled = cli.parse(first.partition(":")[2].split())
    for setting in others:
        assert cli.parse(setting.partition(":")[2].split()) != settled, setting


def test_a_failure_is_kept_beside_results_and_neither_is_run_again(tmp_path: Path) -> None:
    settings = ("1", f"good: {TINY}", "bad: --size none")
    first = run(tmp_path / "out.jsonl", *settings)
    good, bad = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    assert good["performance"]["tokens_per_s_per_gpu"] > 0
    assert "no preset" in bad["said"]
    assert "no preset" in first
    again = run(tmp_path / "out.jsonl", *settings)
    assert again.count("is in") == 2
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2


def test_a_setting_that_hangs_is_ended_and_named_by_its_phase(tmp_path: Path) -> None:
    said = run(tmp_path / "out.jsonl", "--limit-s", "40", "2", "slow: --size tiny --steps 100000000")
    assert "did not end in 40 s in phase" in said
    assert "timed" in said.partition("\n")[0]
    assert said.count("train.py") >= 2, said
    assert said.count("most recent call first") >= 2, said  # the stacks of both ranks


def test_nothing_starts_when_the_budget_is_spent(tmp_path: Path) -> None:
    assert "not run: 5 s are left" in run(tmp_path / "out.jsonl", "--budget-s", "5", "1", f"late: {TINY}")
    assert not (tmp_path / "out.jsonl").exists()


def test_the_table_tells_ratios_and_what_is_missing() -> None:
    def result(name: str, rate: float) -> dict:
        speed = {"tokens_per_s_per_gpu": rate, "tflops_noncausal": 1.0}
        return {"name": name, "performance": speed, "memory": None, "extra": {}, "problems": []}

    rows = ablation.table(
        "fused",
        [
            result("fused", 100.0),
            result("fused, batch 1", 80.0),
            {"name": "fused, bf16 moments", "outcome": "x"},
        ],
    ).splitlines()
    assert "| fused, batch 1 | 80 | 0.800 |" in "\n".join(rows)
    assert "| fused, bf16 moments | x |" in "\n".join(rows)
    assert "| fused, fp32 reduction | not run |" in "\n".join(rows)
    assert "CUDA graph of the step | not measured" in "\n".join(rows)
