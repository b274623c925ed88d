"""Each rule finds what it is for, and is quiet about the rest; what earlier nights say of a run."""

import dataclasses
import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

import result_files
from kept_runs import GEMM, PASSED, gemm, result
from small_checkout import call
from stackcheck.history import alerts, regressions
from stackcheck.history.history import History, open_history
from stackcheck.history.runs import Run

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")

RECORDED = Path(__file__).parents[3] / "docs" / "results" / "paired-h200.json"
RUNS = json.loads(RECORDED.read_text())["runs"]


def recorded(metric: str, arm: str) -> list[float]:
    """What ten fresh processes on one H200 measured."""
    return [statistics.median(run[metric]) for run in RUNS if run["arm"] == arm]


@pytest.mark.parametrize("metric", ["gemm_tflops", "attention_forward_tflops", "copy_gb_per_s"])
@pytest.mark.parametrize(
    ("arm", "verdict"), [("2 % slow", "slower"), ("5 % slow", "slower"), ("healthy again", "equal")]
)
def test_planted_slow_downs_of_an_h200_are_found(metric, arm, verdict):
    healthy = recorded(metric, "healthy")
    found = regressions.paired(
        healthy[:5], recorded(metric, arm)[5:], "min", again=(healthy[5:], healthy[:5])
    )
    assert found.verdict == verdict
    assert found.resolves < regressions.RESOLUTION


def test_of_a_thousand_pairs_with_recorded_noise_95_percent_of_the_losses_are_found():
    chance = random.Random(1)
    pool = recorded("gemm_tflops", "healthy") + recorded("gemm_tflops", "healthy again")

    def pair(drop: float) -> str:
        first, second, a, b = ([chance.choice(pool) for _ in range(5)] for _ in range(4))
        return regressions.paired(
            a, [value * (1 - drop) for value in b], "min", again=(first, second)
        ).verdict

    assert sum(pair(0.02) == "slower" for _ in range(1000)) >= 950
    assert sum(pair(0.0) == "slower" for _ in range(1000)) < 10


def test_a_noisy_node_says_noisy_and_never_equal():
    values = [100.0, 97.0, 103.0, 95.0, 105.0]
    found = regressions.paired(values, values, "min", again=(values, values[::-1]))
    assert found.verdict == "noisy"
    assert found.resolves > regressions.RESOLUTION


@pytest.mark.parametrize(
    ("first", "again", "decision"),
    [(95.0, None, "pass"), (85.0, None, "repeat"), (85.0, 99.0, "pass"), (85.0, 86.0, "fail")],
)
def test_the_floor_fails_only_twice(first, again, decision):
    assert regressions.floor(100.0, first, again, "min") == decision


def test_a_chip_is_judged_against_its_own_nights():
    nights = [790.0, 791.0, 789.0, 790.5, 789.5, 790.2, 789.8]
    assert regressions.below_own_baseline(nights, 760.0, "min") is True
    assert regressions.below_own_baseline(nights, 775.0, "min") is False
    assert regressions.below_own_baseline(nights[:3], 700.0, "min") is None


def nights(drop: float, seed: int = 0, count: int = 40) -> tuple[float, ...]:
    chance = random.Random(seed)
    return tuple(chance.gauss(100, 0.4) * (1 - drop if night >= 30 else 1) for night in range(count))


@pytest.mark.parametrize("values", [nights(0.0), (1.0,) * 40, (1.0, 2.0), (), (0.0,) * 20])
def test_no_step_is_found_where_there_is_none(values):
    assert regressions.steps(values, "min") == []


SERIES = regressions.Series(
    node="n1", check="c", metric="m", direction="min", nights=tuple(range(40)), values=nights(0.05)
)


@pytest.mark.parametrize("change", [{"node": "n2"}, {"metric": "other"}])
def test_two_nodes_or_two_metrics_warn(change):
    second = dataclasses.replace(SERIES, values=nights(0.04, seed=3), **change)  # type: ignore[arg-type]
    (warned,) = regressions.warnings([SERIES, second])
    assert abs(warned.night - 30) <= 1
    assert warned.loss == pytest.approx(0.05, abs=0.01)


def test_the_same_night_is_needed():
    other = dataclasses.replace(SERIES, node="n2", nights=tuple(range(100, 140)))
    assert regressions.warnings([SERIES, other]) == []


COPY = "test_devices_links.py::test_copy"
NUMERICS = "test_kernels.py::test_gemm_numerics"


def margin(value: float) -> dict[str, Any]:
    facts = {"unit": "of the gate", "repeats": [], "conditions": {}, "direction": None, "bound": None}
    return result_files.metric("numeric_worst_margin", value, **facts, verdict="recorded", source=None)


def night(
    number: int, value: float, *, chip: str = "chip0", worst: float = 0.3, node: str = "a", copy: float = 1.0
) -> bytes:
    """One night on a machine of two chips: a product on one of them, a copy on both, a numeric margin."""
    wave = 1 + 0.001 * (number % 5)
    chips = [f"{node}-chip0", f"{node}-chip1"]
    made = result(
        number,
        result_files.check(GEMM, metrics=[gemm(value * wave)], devices=[f"{node}-{chip}"]),
        result_files.check(COPY, metrics=[gemm(copy * 3000 * wave)], devices=chips),
        result_files.check(NUMERICS, metrics=[margin(worst)], devices=[f"{node}-{chip}"]),
        run_id=f"{node}{number}".encode().hex().ljust(32, "0"),
    )
    model = made["host"]["devices"][0]
    made["host"]["devices"] = [model | {"id": name} for name in chips]
    return json.dumps(made).encode()


def newest(history: History, *nights: bytes) -> Run:
    for body in nights:
        history.append(body, PASSED, None, source="test")
    found = history.runs(alerts.Query(limit=1))
    return found[0]


def test_a_chip_is_judged_by_its_own_nights_and_not_by_its_neighbours(small_checkout):
    history = open_history(small_checkout)
    fast = [night(number, 800.0) for number in range(8)]
    slow = [night(number, 760.0, chip="chip1") for number in range(8, 16)]  # a slower chip: never a loss
    run = newest(history, *fast, *slow)
    assert alerts.look(history, run) == ()
    run = newest(history, night(16, 760.0))  # the value of the slow chip, on the fast one
    (found,) = alerts.look(history, run)
    assert (found.rule, found.nodes[0].partition("/")[2]) == ("own nights", "0")
    assert 0.045 < found.loss < 0.055
    assert found.words.startswith(f"{GEMM} gemm_tflops on ")
    assert "worse than its own nights (8" in found.words


def test_numeric_margins_are_watched(small_checkout):
    history = open_history(small_checkout)
    assert alerts.look(history, newest(history, *(night(number, 800.0) for number in range(9)))) == ()
    (found,) = alerts.look(history, newest(history, night(9, 800.0, worst=0.5)))
    assert found.metrics == (f"{NUMERICS} numeric_worst_margin",)
    assert found.against == (pytest.approx(0.3), 0.5, "of the gate")


def test_a_step_is_named_only_if_two_metrics_or_two_nodes_show_it(small_checkout):
    history = open_history(small_checkout)
    before = [night(number, 800.0) for number in range(20)]
    run = newest(history, *before, *(night(number, 784.0) for number in range(20, 26)))
    assert alerts.steps(history, run) == ()  # one metric of one node
    healthy = [night(number, 800.0, node="b") for number in range(30, 50)]
    both = [night(number, 784.0, copy=0.98, node="b") for number in range(50, 56)]
    run = newest(history, *healthy, *both)
    (found,) = alerts.steps(history, run)
    assert found.rule == "step"
    assert len(found.metrics) == 2


def test_the_verb_lists_what_got_worse(small_checkout, capsys):
    history = open_history(small_checkout)
    newest(history, *(night(number, 800.0) for number in range(9)))
    assert "nothing got worse in the newest runs of 1 pair" in call(capsys, "history", "watch").out
    newest(history, night(9, 700.0))
    done = call(capsys, "history", "watch", "--json")
    assert done.code == 0
    (found,) = json.loads(done.out)
    assert (found["rule"], found["since"]) == ("own nights", "2026-01-10")
    shown = call(capsys, "history", "--metric", "gemm*", "--check", GEMM).out
    assert "BELOW by 12." in shown
    assert "nothing got worse" in call(capsys, "history", "watch", "--stack", "rocm*").out
