"""Each rule finds what it is for, and is quiet about what it is not."""

import dataclasses
import json
import random
import statistics
from pathlib import Path

import pytest

from stackcheck.history import regressions

RECORDED = Path(__file__).parents[3] / "docs" / "results" / "paired-h200.json"
RUNS = json.loads(RECORDED.read_text())["runs"]


def recorded(metric: str, arm: str) -> list[float]:
    """What ten fresh processes on one H200 measured."""
    return [statistics.median(run[metric]) for run in RUNS if run["arm"] == arm]


@pytest.mark.parametrize("metric", ["gemm_tflops", "attention_forward_tflops", "copy_gb_per_s"])
@pytest.mark.parametrize(
    ("arm", "verdict"), [("2 % slow", "slower"), ("5 % slow", "slower"), ("healthy again", "equal")]
)
def test_planted_slow_downs_of_an_h200_are_found(metric: str, arm: str, verdict: str) -> None:
    healthy = recorded(metric, "healthy")
    found = regressions.paired(
        healthy[:5], recorded(metric, arm)[5:], "min", again=(healthy[5:], healthy[:5])
    )
    assert found.verdict == verdict
    assert found.resolves < regressions.RESOLUTION


def test_of_a_thousand_pairs_with_recorded_noise_95_percent_of_the_losses_are_found() -> None:
    chance = random.Random(1)
    pool = recorded("gemm_tflops", "healthy") + recorded("gemm_tflops", "healthy again")

    def pair(drop: float) -> str:
        first, second, a, b = ([chance.choice(pool) for _ in range(5)] for _ in range(4))
        return regressions.paired(
            a, [value * (1 - drop) for value in b], "min", again=(first, second)
        ).verdict

    assert sum(pair(0.02) == "slower" for _ in range(1000)) >= 950
    assert sum(pair(0.0) == "slower" for _ in range(1000)) < 10


def test_a_noisy_node_says_noisy_and_never_equal() -> None:
    values = [100.0, 97.0, 103.0, 95.0, 105.0]
    found = regressions.paired(values, values, "min", again=(values, values[::-1]))
    assert found.verdict == "noisy"
    assert found.resolves > regressions.RESOLUTION


@pytest.mark.parametrize(
    ("first", "again", "decision"),
    [(95.0, None, "pass"), (85.0, None, "repeat"), (85.0, 99.0, "pass"), (85.0, 86.0, "fail")],
)
def test_the_floor_fails_only_twice(first: float, again: float | None, decision: str) -> None:
    assert regressions.floor(100.0, first, again, "min") == decision


def test_a_chip_is_judged_against_its_own_nights() -> None:
    nights = [790.0, 791.0, 789.0, 790.5, 789.5, 790.2, 789.8]
    assert regressions.below_own_baseline(nights, 760.0, "min") is True
    assert regressions.below_own_baseline(nights, 775.0, "min") is False
    assert regressions.below_own_baseline(nights[:3], 700.0, "min") is None


def nights(drop: float, seed: int = 0, count: int = 40) -> tuple[float, ...]:
    chance = random.Random(seed)
    return tuple(chance.gauss(100, 0.4) * (1 - drop if night >= 30 else 1) for night in range(count))


@pytest.mark.parametrize("values", [nights(0.0), (1.0,) * 40, (1.0, 2.0), (), (0.0,) * 20])
def test_no_step_is_found_where_there_is_none(values: tuple[float, ...]) -> None:
    assert regressions.steps(values, "min") == []


SERIES = regressions.Series(
    node="n1", check="c", metric="m", direction="min", nights=tuple(range(40)), values=nights(0.05)
)


@pytest.mark.parametrize("change", [{"node": "n2"}, {"metric": "other"}])
def test_two_nodes_or_two_metrics_warn(change: dict[str, str]) -> None:
    second = dataclasses.replace(SERIES, values=nights(0.04, seed=3), **change)  # type: ignore[arg-type]
    (warned,) = regressions.warnings([SERIES, second])
    assert abs(warned.night - 30) <= 1
    assert warned.loss == pytest.approx(0.05, abs=0.01)


def test_the_same_night_is_needed() -> None:
    other = dataclasses.replace(SERIES, node="n2", nights=tuple(range(100, 140)))
    assert regressions.warnings([SERIES, other]) == []
