"""A waiver accepts a check that it names and that ran; all else that goes wrong never gives PASSED."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import result_files
from result_files import check
from small_verdicts import HEALTHY, REQUIRED, judged
from stackcheck.policy import Waiver


def waiver(name: str, until: str = "2999-01-01") -> Waiver:
    return Waiver.model_validate(result_files.waiver(name, until=until))


def waived(*names: str) -> dict[str, Any]:
    return {"waivers": tuple(waiver(name) for name in names)}


@pytest.mark.parametrize("outcome", ["failed", "skipped"])
def test_a_waived_check_is_warned_and_named(outcome: str) -> None:
    allowed = waived("test_a.py::test_one[3]")
    verdict = judged(*HEALTHY, check("test_a.py::test_one[3]", outcome), held_to=allowed)
    assert (verdict.status, verdict.warned) == ("PASSED", ("test_a.py::test_one[3]",))
    assert verdict.waivers == allowed["waivers"]
    assert verdict.as_json()["waivers"][0]["until"] == "2999-01-01"


def test_waivers_for_everything_prove_nothing() -> None:
    failing = (check("test_a.py::test_one", "failed"), check("test_b.py::test_two", "failed"))
    ids = tuple(str(item["id"]) for item in failing)
    allowed = waived("test_a.py::test_one", "test_b.py::test_two")
    assert judged(*failing, required=ids, held_to=allowed).status == "FAILED"


def test_a_failure_whose_waiver_ended_names_its_last_day() -> None:
    expired = {"expired": (waiver("test_a.py::test_one[3]", until="2026-01-31"),)}
    verdict = judged(*HEALTHY, check("test_a.py::test_one[3]", "failed"), held_to=expired)
    assert "test_a.py::test_one[3]: its waiver ended on 2026-01-31" in verdict.reasons


@pytest.mark.parametrize(
    "name",
    ["*", "test_a.py::*", "test_?", "", " ", "test_a.py", "test_a.py::test_x[*]", "test_a.py::test_x[?-*]"],
)
def test_a_waiver_for_a_pattern_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="is not a check"):
        waiver(name)


def test_a_waiver_for_one_way_leaves_every_other_way_to_decide() -> None:
    ways = [f"test_a.py::test_one[{way}-{kind}]" for way in ("cudnn", "flash", "flex") for kind in ("a", "b")]
    results = [check(name, "failed") for name in ways]
    found = judged(
        *HEALTHY, *results, required=(*REQUIRED, *ways), held_to=waived("test_a.py::test_one[cudnn-*]")
    )
    assert found.warned == tuple(name for name in ways if "cudnn" in name)
    assert {reason.partition(" ")[0] for reason in found.reasons} == {*ways} - {*found.warned}


outcomes = st.sampled_from(["passed", "failed", "skipped", "error", "invalid"])
names = st.sampled_from(
    [f"test_{a}.py::test_{b}{c}" for a in "ab" for b in ("one", "two") for c in ("", "[1]")]
)
runs = st.dictionaries(names, outcomes, max_size=6)
waived_names = st.lists(names, max_size=2, unique=True)
RANK = {"PASSED": 0, "UNFIT": 1, "FAILED": 2}
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy


@UNHURRIED
@given(runs, waived_names, names, st.sampled_from(["failed", "error"]))
def test_adding_a_failure_never_makes_a_verdict_better(
    run: dict[str, str], waivers: list[str], name: str, outcome: str
) -> None:
    """Unless a waiver names that check: it ran, and the certificate states who accepted it."""
    new = name + "[new]"
    covered = any(waiver(item).covers(new) for item in waivers)
    before = judged(*(check(k, v) for k, v in run.items()), held_to=waived(*waivers))
    after = judged(*(check(k, v) for k, v in (run | {new: outcome}).items()), held_to=waived(*waivers))
    assert new in after.failed
    assert (new in after.warned) == covered
    if not covered:
        assert RANK[after.status] >= RANK[before.status]
        assert after.status == "FAILED"


@UNHURRIED
@given(runs, waived_names, st.data())
def test_losing_a_result_never_makes_a_verdict_passed(
    run: dict[str, str], waivers: list[str], data: st.DataObject
) -> None:
    lost = data.draw(st.sets(st.sampled_from(sorted(run)), min_size=1)) if run else set()
    kept = [check(k, v) for k, v in run.items() if k not in lost]
    selection = {"arguments": [], "collected": len(run), "deselected": 0}
    verdict = judged(*kept, required=tuple(run), held_to=waived(*waivers), selection=selection)
    assert not lost or verdict.status == "FAILED"


@UNHURRIED
@given(runs, st.sampled_from(REQUIRED))
def test_a_run_without_one_of_its_checks_is_never_passed_even_if_it_was_never_collected(
    run: dict[str, str], name: str
) -> None:
    kept = [check(k, v) for k, v in run.items() if k != name]
    assert judged(*kept, required=(*run, name)).status == "FAILED"
