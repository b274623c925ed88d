"""What earlier nights say of a run: a chip is compared with itself, a step needs two witnesses."""

import json
from pathlib import Path
from typing import Any

import pytest

import result_files
from kept_runs import GEMM, PASSED, gemm, result
from small_checkout import call
from stackcheck.history import alerts
from stackcheck.history.history import History, open_history
from stackcheck.history.runs import Run

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")

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


def test_a_chip_is_judged_by_its_own_nights_and_not_by_its_neighbours(small_checkout: Path) -> None:
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


def test_numeric_margins_are_watched(small_checkout: Path) -> None:
    history = open_history(small_checkout)
    assert alerts.look(history, newest(history, *(night(number, 800.0) for number in range(9)))) == ()
    (found,) = alerts.look(history, newest(history, night(9, 800.0, worst=0.5)))
    assert found.metrics == (f"{NUMERICS} numeric_worst_margin",)
    assert found.against == (pytest.approx(0.3), 0.5, "of the gate")


def test_a_step_is_named_only_if_two_metrics_or_two_nodes_show_it(small_checkout: Path) -> None:
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


def test_the_verb_lists_what_got_worse(small_checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
