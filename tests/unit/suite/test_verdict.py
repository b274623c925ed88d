"""Only complete evidence gives PASSED, and nothing that goes wrong can."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from result_files import CONFIG_DIGEST, check, host, metric, result
from stackcheck.errors import ConfigurationError
from stackcheck.matrix.matrix import TestTarget
from stackcheck.suite import results
from stackcheck.suite.verdict import Verdict, Waiver, judge, matches

REQUIRED = ("test_a.py::test_one", "test_b.py::*")
CPU = TestTarget(device="CPU", count=1)
HEALTHY = (check("test_a.py::test_one[1]"), check("test_a.py::test_one[2]"), check("test_b.py::test_two"))


def judged(
    *checks: dict[str, Any],
    required: tuple[str, ...] = REQUIRED,
    waivers: tuple[Waiver, ...] = (),
    machines: tuple[TestTarget, ...] | None = (CPU,),
    **changes: Any,
) -> Verdict:
    run = results.parse(json.dumps(result(*checks, **changes)).encode())
    return judge(run, required, image_config_digest=CONFIG_DIGEST, machines=machines, waivers=waivers)


def waiver(name: str) -> Waiver:
    return Waiver(check=name, reason="known slow fabric", by="the cluster's owner")


def test_every_required_check_passed_is_passed() -> None:
    verdict = judged(*HEALTHY)
    assert (verdict.status, verdict.reasons) == ("PASSED", ())
    assert verdict.passed == tuple(item["id"] for item in HEALTHY)


def test_no_results_are_failed() -> None:
    assert "the run has no results" in judged().reasons


def test_no_required_checks_are_failed() -> None:
    assert judged(*HEALTHY, required=()).status == "FAILED"


@pytest.mark.parametrize("state", ["running", "crashed"])
def test_a_run_that_did_not_finish_is_failed(state: str) -> None:
    verdict = judged(*HEALTHY, state=state, finished=None)
    assert verdict.status == "FAILED"
    assert state in verdict.reasons[0]


@pytest.mark.parametrize("outcome", ["failed", "error", "skipped"])
def test_one_required_instance_that_did_not_pass_is_failed(outcome: str) -> None:
    verdict = judged(*HEALTHY, check("test_a.py::test_one[3]", outcome))
    assert verdict.reasons == (f"test_a.py::test_one[3] {outcome}: because",)
    assert verdict.status == "FAILED"


@pytest.mark.parametrize("outcome", ["failed", "error"])
def test_a_failure_of_a_check_nobody_required_is_failed_too(outcome: str) -> None:
    assert judged(*HEALTHY, check("test_c.py::test_three", outcome)).status == "FAILED"


def test_a_skipped_check_nobody_required_is_no_obstacle() -> None:
    verdict = judged(*HEALTHY, check("test_c.py::test_three", "skipped"))
    assert (verdict.status, verdict.skipped) == ("PASSED", ("test_c.py::test_three",))


def test_a_deselected_instance_is_failed_and_says_by_what_although_another_instance_passed() -> None:
    selection = {"arguments": ["-k", "not one[2]"], "collected": 2, "deselected": 0, "dropped": 1}
    verdict = judged(HEALTHY[0], HEALTHY[2], selection=selection)
    assert verdict.reasons == ("1 checks of the tier were deselected; arguments: -k not one[2]",)
    assert verdict.status == "FAILED"


def test_checks_of_a_later_tier_may_be_left_out() -> None:
    selection = {"arguments": [], "collected": 3, "deselected": 7, "dropped": 0}
    assert judged(*HEALTHY, selection=selection).status == "PASSED"


@pytest.mark.parametrize("dropped", [{}, {"dropped": None}])
def test_a_result_that_does_not_say_what_was_left_out_of_its_tier_is_failed(dropped: dict[str, None]) -> None:
    verdict = judged(*HEALTHY, selection={"arguments": [], "collected": 3, "deselected": 3, **dropped})
    assert verdict.reasons == ("the result does not say how many checks of the tier were deselected",)
    assert verdict.status == "FAILED"


@pytest.mark.parametrize("deselected", [0, 1, 9])
def test_fewer_reports_than_selected_checks_are_failed(deselected: int) -> None:
    selection = {"arguments": [], "collected": 4, "deselected": deselected, "dropped": 0}
    assert "4 checks were selected and 3 reported" in judged(*HEALTHY, selection=selection).reasons[0]


def test_another_image_is_failed() -> None:
    run = results.parse(json.dumps(result(*HEALTHY)).encode())
    other = "sha256:" + "d" * 64
    assert judge(run, REQUIRED, image_config_digest=other, machines=(CPU,)).status == "FAILED"
    assert judged(*HEALTHY, image=None).status == "FAILED"


@pytest.mark.parametrize("vendor", ["amd", "nvidia"])
def test_a_vendor_without_a_device_is_failed_with_that_reason(vendor: str) -> None:
    verdict = judged(*HEALTHY, host=host(vendor))
    assert f"vendor {vendor} was named and no {vendor.upper()} device is visible" in verdict.reasons


def test_a_run_on_another_vendor_than_the_stack_is_for_is_failed() -> None:
    run = results.parse(json.dumps(result(*HEALTHY)).encode())
    verdict = judge(run, REQUIRED, image_config_digest=CONFIG_DIGEST, machines=(CPU,), vendor="amd")
    assert verdict.reasons == ("the stack is for amd, the run was on vendor cpu",)


@pytest.mark.parametrize(
    "broken",
    [
        metric(value=None, verdict="recorded", bound=None),
        metric(value=None),
        metric(verdict="fail"),
        metric(verdict="no_threshold", bound=None),
        metric(value=4.0),
        metric(bound=None),
        metric(direction=None),
        metric(value=6.0, direction="max"),
    ],
    ids=["null", "null-pass", "fail", "no-threshold", "below-min", "no-bound", "no-direction", "above-max"],
)
def test_a_required_metric_without_proof_is_failed(broken: dict[str, Any]) -> None:
    verdict = judged(*HEALTHY, check("test_b.py::test_speed", metrics=[broken]))
    assert verdict.status == "FAILED"
    assert "busbw" in verdict.reasons[0]


def test_a_recorded_metric_needs_no_bound() -> None:
    recorded = metric(bound=None, direction=None, verdict="recorded")
    assert judged(*HEALTHY, check("test_b.py::test_speed", metrics=[recorded])).status == "PASSED"


def test_a_metric_without_threshold_of_a_check_nobody_required_is_no_obstacle() -> None:
    extra = check("test_c.py::test_x", metrics=[metric(verdict="no_threshold", bound=None)])
    assert judged(*HEALTHY, extra).status == "PASSED"


def test_an_unfit_machine_is_neither_passed_nor_failed() -> None:
    verdict = judged(*HEALTHY, check("test_c.py::test_x", "invalid"))
    assert (verdict.status, verdict.invalid) == ("UNFIT", ("test_c.py::test_x",))


def test_a_real_failure_on_an_unfit_machine_is_failed() -> None:
    verdict = judged(*HEALTHY, check("test_c.py::x", "invalid"), check("test_c.py::y", "failed"))
    assert verdict.status == "FAILED"


H200 = TestTarget(device="H200", count=8, driver="580.95.05")
MIXED = (H200, TestTarget(device="MI300X", count=8), TestTarget(device="H200", count=4))


@pytest.mark.parametrize("models", [["H200"] * 8, ["H200"] * 4, ["MI300X"] * 8])
def test_a_run_on_one_of_the_machines_that_the_stack_names_is_passed(models: list[str]) -> None:
    on = host(
        "nvidia", *models, driver="999.9"
    )  # nightly runs are there for drivers that the matrix does not know
    assert judged(*HEALTHY, host=on, machines=MIXED).status == "PASSED"


@pytest.mark.parametrize(
    ("models", "machines", "reason"),
    [
        (["H200"] * 4, (H200,), "the machine has H200 x4, and the stack names H200 x8"),
        (["H200"] * 16, (H200,), "the machine has H200 x16, and the stack names H200 x8"),
        (["H100"] * 8, (H200,), "the machine has H100 x8, and the stack names H200 x8"),
        (["MI300X"] * 4, MIXED, "MI300X x4, and the stack names H200 x8 or MI300X x8 or H200 x4"),
        (["H200"] * 8 + ["H100"], (H200,), "the machine has H100 x1 and H200 x8, and"),
        (["H200"] * 8, (), "the machine has H200 x8, and the stack names none (tested_on in matrix.yaml)"),
    ],
    ids=["fewer", "more", "another model", "none of several", "others beside them", "names none"],
)
def test_a_run_on_another_machine_is_unfit_and_says_where_it_was_and_where_it_has_to_be(
    models: list[str], machines: tuple[TestTarget, ...], reason: str
) -> None:
    verdict = judged(*HEALTHY, host=host("nvidia", *models), machines=machines)
    assert verdict.status == "UNFIT"
    assert (len(verdict.reasons), verdict.invalid) == (1, ())
    assert reason in verdict.reasons[0]


def test_an_image_without_a_stack_may_be_judged_on_any_machine() -> None:
    assert judged(*HEALTHY, host=host("nvidia", "H200", "H200"), machines=None).status == "PASSED"


def test_a_failure_on_another_machine_stays_a_failure() -> None:
    verdict = judged(*HEALTHY, check("test_c.py::y", "failed"), machines=(H200,))
    assert verdict.status == "FAILED"
    assert verdict.reasons == ("test_c.py::y failed: because", verdict.reasons[1])
    assert "the machine has CPU x1" in verdict.reasons[1]


def test_a_run_without_any_device_is_on_no_machine() -> None:
    assert judged(*HEALTHY, host=host() | {"devices": []}).status == "UNFIT"


@pytest.mark.parametrize("outcome", ["failed", "skipped"])
def test_a_waived_check_is_warned_and_named(outcome: str) -> None:
    allowed = waiver("test_a.py::test_one[3]")
    verdict = judged(*HEALTHY, check("test_a.py::test_one[3]", outcome), waivers=(allowed,))
    assert (verdict.status, verdict.warned) == ("PASSED", ("test_a.py::test_one[3]",))
    assert verdict.waivers == (allowed,)


def test_a_waiver_cannot_stand_in_for_a_check_that_never_ran() -> None:
    assert judged(*HEALTHY[:2], waivers=(waiver("test_b.py::test_two"),)).status == "FAILED"


def test_a_waiver_cannot_make_an_unfit_machine_fit() -> None:
    bad = check("test_a.py::test_one[3]", "invalid")
    assert judged(*HEALTHY, bad, waivers=(waiver("test_a.py::test_one"),)).status == "UNFIT"


def test_waivers_for_everything_prove_nothing() -> None:
    failing = (check("test_a.py::test_one", "failed"), check("test_b.py::test_two", "failed"))
    waivers = (waiver("test_a.py::test_one"), waiver("test_b.py::test_two"))
    assert judged(*failing, waivers=waivers).status == "FAILED"


@pytest.mark.parametrize("name", ["*", "test_a.py::*", "test_?", "", " "])
def test_a_waiver_for_a_pattern_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError):
        waiver(name)


@pytest.mark.parametrize(
    ("check_id", "entry", "expected"),
    [
        ("test_a.py::test_g[bf16-1]", "test_a.py::test_g", True),
        ("test_a.py::test_g[bf16-1]", "test_a.py::test_g[bf16-1]", True),
        ("test_a.py::test_g[bf16-1]", "test_a.py::test_*", True),
        ("test_a.py::test_gb", "test_a.py::test_g[bf16-1]", False),
        ("test_a.py::test_gemm", "test_a.py::test_g", False),
        ("test_a.py::T::test_g[a]", "test_a.py::T::test_g", True),
    ],
)
def test_brackets_are_parameters_and_never_a_character_class(
    check_id: str, entry: str, expected: bool
) -> None:
    assert matches(check_id, entry) is expected


outcomes = st.sampled_from(["passed", "failed", "skipped", "error", "invalid"])
names = st.sampled_from(
    [f"test_{a}.py::test_{b}{c}" for a in "ab" for b in ("one", "two") for c in ("", "[1]")]
)
runs = st.dictionaries(names, outcomes, max_size=6)
waived = st.lists(names, max_size=2, unique=True)
RANK = {"PASSED": 0, "UNFIT": 1, "FAILED": 2}


@given(runs, waived, names, st.sampled_from(["failed", "error"]))
def test_adding_a_failure_never_makes_a_verdict_better(
    run: dict[str, str], waivers: list[str], name: str, outcome: str
) -> None:
    """Unless a waiver names that check: it ran, and the certificate states who accepted it."""
    allowed = tuple(waiver(item) for item in waivers)
    new = name + "[new]"
    covered = any(matches(new, item) for item in waivers)
    before = judged(*(check(k, v) for k, v in run.items()), waivers=allowed)
    after = judged(*(check(k, v) for k, v in (run | {new: outcome}).items()), waivers=allowed)
    assert new in after.failed
    assert (new in after.warned) == covered
    if not covered:
        assert RANK[after.status] >= RANK[before.status]
        assert after.status == "FAILED"


@given(runs, waived, st.data())
def test_losing_a_result_never_makes_a_verdict_passed(
    run: dict[str, str], waivers: list[str], data: st.DataObject
) -> None:
    allowed = tuple(waiver(item) for item in waivers)
    lost = data.draw(st.sets(st.sampled_from(sorted(run)), min_size=1)) if run else set()
    kept = [check(k, v) for k, v in run.items() if k not in lost]
    selection = {"arguments": [], "collected": len(run), "deselected": 0}
    assert not lost or judged(*kept, waivers=allowed, selection=selection).status == "FAILED"


@given(runs, st.sampled_from(REQUIRED))
def test_a_run_without_a_required_check_is_never_passed_even_when_it_was_never_collected(
    run: dict[str, str], entry: str
) -> None:
    kept = [check(k, v) for k, v in run.items() if not matches(k, entry)]
    assert judged(*kept).status == "FAILED"
