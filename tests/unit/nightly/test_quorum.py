"""What nights conclude together: two nodes agree or a person does, a floor of figures, cases by date."""

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest

import result_files
import small_checkout as checkouts
from nights import Nights, Node
from small_checkout import CHECKS
from stackcheck.matrix import resolve
from stackcheck.nightly import summary
from stackcheck.vendors import amd

pytestmark = pytest.mark.usefixtures("no_disk_flushes")

REAL_AMD = {name: getattr(amd, name) for name in ("devices", "driver", "present")}
GEMM = CHECKS[1]


@pytest.fixture
def nights(tmp_path, monkeypatch) -> Nights:
    return Nights(tmp_path, checkouts.make_checkout(tmp_path, monkeypatch), monkeypatch, REAL_AMD)


def nodes(nights: Nights, revoke: str, *, shared: bool) -> tuple[Node, Node]:
    """Two nodes, with one history or with two."""
    found = tuple(
        nights.node(name, revoke=revoke, first_id=number) for name, number in (("a", 100), ("b", 200))
    )
    if shared:
        for node in found:
            with (node.root / "matrix.yaml").open("a", encoding="utf-8") as file:
                file.write(
                    f"\nhistory: {{records: {nights.folder / 'history'}, index: 'sqlite:///{nights.folder}/i.db'}}\n"
                )
    (stack,) = resolve.load_stacks(found[0].root, ("rocm7.1.0-torch2.10.0-*",))
    nights.publish(found[0], stack, "A1")
    return found[0], found[1]


def ended(nights: Nights, node: Node) -> Any:
    plan = nights.play(node, force=True)
    (item,) = plan.items
    assert item.ended is not None
    assert summary.exit_code(plan) == item.ended.exit_code
    return item.ended


def test_the_second_node_that_finds_the_same_revokes(nights):
    first, second = nodes(nights, "quorum 2", shared=True)
    nights.finds = lambda _digest, _driver, _run: {GEMM: "failed"}
    for _ in range(2):  # the same node again is no second word
        told = ended(nights, first)
        assert (told.action, told.exit_code) == ("hold", 6)
        assert "a person has to decide: it failed twice, on 1 of the 2 nodes" in told.because
    assert ended(nights, second).action == "revoke"


@pytest.mark.parametrize(("revoke", "shared"), [("quorum 2", False), ("report", True), ("quorum 3", True)])
def test_nodes_that_do_not_hear_of_each_other_or_must_not_leave_it_to_a_person(nights, revoke, *, shared):
    first, second = nodes(nights, revoke, shared=shared)
    nights.finds = lambda _digest, _driver, _run: {GEMM: "failed"}
    assert [ended(nights, node).action for node in (first, second)] == ["hold", "hold"]


@pytest.mark.parametrize("here", [{CHECKS[2]: "failed"}, {GEMM: "failed", CHECKS[2]: "invalid"}])
def test_another_failure_or_an_unfit_machine_there_is_no_agreement(nights, here):
    first, second = nodes(nights, "quorum 2", shared=True)
    nights.finds = lambda _digest, _driver, _run: here
    assert ended(nights, first).action == "hold"
    nights.finds = lambda _digest, _driver, _run: {GEMM: "failed"}
    assert ended(nights, second).action == "hold"


SPEED = CHECKS[2]


def bounds(_root: Path, question: Any) -> str:
    """The answer of the suites' own program: a wide bound for each figure."""
    bound = {"unit": "TFLOP/s", "direction": "min", "bound": 500.0, "class": "derived"}
    count = len(question["figures"])
    return json.dumps({"reached": [True] * count, "bounds": [bound] * count, "missing": [], "unmeasured": []})


@pytest.fixture
def measured(tmp_path, monkeypatch) -> Nights:
    """Nights in which the suites measure `speeds`, one value a run."""
    made = Nights(tmp_path, checkouts.make_checkout(tmp_path, monkeypatch), monkeypatch, REAL_AMD)
    made.speeds = []
    usual = made._answer

    def answer(told: dict[str, Any]) -> str:
        document = json.loads(usual(told))
        value = made.speeds.pop(0) if made.speeds else 700.0
        figure = result_files.metric("gemm_tflops", value, unit="TFLOP/s", repeats=[value], bound=500.0)
        next(check for check in document["checks"] if check["id"] == SPEED)["metrics"] = [figure]
        return json.dumps(document)

    monkeypatch.setattr(made, "_answer", answer)
    monkeypatch.setattr("stackcheck.suite.bounds.ask_suites", bounds)
    return made


def test_a_loss_of_ten_percent_is_repeated_once_and_then_revokes(measured):
    node = measured.node("one", first_id=1)
    (stack,) = resolve.load_stacks(node.root, ("rocm7.1.0-torch2.10.0-*",))
    measured.publish(node, stack, "A1")
    (item,) = measured.play(node, force=True).items
    assert item.figures[0].value == 700.0
    measured.speeds = [620.0, 690.0]  # once low, then not
    plan = measured.play(node, force=True)
    assert [run.slow for run in plan.items[0].runs] == [(SPEED,), (), ()]
    assert plan.items[0].ended.action == "renew"
    assert plan.items[0].ended.flaky
    for _ in range(6):
        assert measured.play(node, force=True).items[0].ended.action == "renew"
    measured.speeds = [650.0]  # inside bound and floor, below the chip's own nights
    plan = measured.play(node, force=True)
    assert plan.items[0].ended.action == "renew"
    assert summary.exit_code(plan) == 0
    assert "7.1% worse than its own nights (700)" in summary.line(plan)
    measured.speeds = [700.0]
    measured.play(node, force=True)
    measured.speeds = [615.0, 616.0]
    plan = measured.play(node, force=True)
    assert plan.items[0].ended.action == "revoke"
    assert summary.exit_code(plan) == 6
    assert f"far below its certificate: gemm_tflops of {SPEED}: 616 TFLOP/s, 12.0% worse" in summary.line(
        plan
    )


def seeds(nights: Nights, node: Node) -> list[str]:
    """The seeds of one night's runs."""
    before = len(node.engine.runs)
    nights.play(node, force=True)
    commands = [run.beside.command for run in node.engine.runs[before:] if _is_of_suites(run)]
    return [word for command in commands for word in command if word.startswith("--case-seed")]


def _is_of_suites(run: Any) -> bool:
    return getattr(run, "beside", None) is not None


def test_nights_of_one_day_agree_and_the_next_day_draws_others(nights):
    """Seven nights have seven seeds, none of them a first certificate's; a failing night repeats its own."""
    first, second = nights.node("a", first_id=100), nights.node("b", first_id=200)
    (stack,) = resolve.load_stacks(first.root, ("rocm7.1.0-torch2.10.0-*",))
    nights.publish(first, stack, "A1")
    drawn = []
    for _ in range(7):
        mine = {*seeds(nights, first), *seeds(nights, second)}
        assert len(mine) == 1
        drawn += mine
        nights.clock.now += dt.timedelta(days=1)
    assert len(set(drawn)) == 7
    assert "--case-seed=0" not in drawn
    nights.finds = lambda _digest, _driver, _run: {CHECKS[1]: "failed"}
    again = seeds(nights, first)
    assert len(again) == 2
    assert len(set(again)) == 1
