"""Only complete evidence gives PASSED, with a waiver too."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import result_files
from result_files import check, host, metric
from small_verdicts import HEALTHY, REQUIRED, judged
from stackcheck.matrix.matrix import TestTarget
from stackcheck.policy import Advisory, Waiver
from stackcheck.suite.bounds import Bound, Bounds
from stackcheck.suite.skips import Facts
from stackcheck.suite.verdict import MADE_UP

GPU_ROW = {"model": "H200", "memory_bytes": 150 << 30, "lacks": ["fp8"], "unreadable": ["fan speed"]}


def test_a_made_up_result_is_failed_for_that_alone():
    found = judged(*HEALTHY, made_up=True)
    assert (found.status, found.reasons) == ("FAILED", (MADE_UP,))


def test_no_required_checks_are_failed():
    assert judged(*HEALTHY, required=()).status == "FAILED"


@pytest.mark.parametrize("state", ["running", "crashed"])
def test_a_run_that_did_not_finish_is_failed(state):
    verdict = judged(*HEALTHY, state=state, finished=None)
    assert verdict.status == "FAILED"
    assert state in verdict.reasons[0]


def test_a_check_that_the_suites_do_not_have_is_failed():
    verdict = judged(*HEALTHY, check("test_c.py::test_three"), required=REQUIRED)
    assert verdict.reasons == ("test_c.py::test_three: not a check of this checkout's suites",)


def test_a_missing_or_renamed_check_is_failed():
    verdict = judged(*HEALTHY[:2], check("test_b.py::test_too"), required=REQUIRED)
    assert "test_b.py::test_two: no result" in verdict.reasons


def selected(dropped: int) -> dict[str, Any]:
    return {"arguments": ["-k"], "collected": 2, "deselected": 0, "dropped": dropped}


def test_a_check_that_another_certificate_vouches_for_need_not_run():
    held = {"carried": frozenset({REQUIRED[2], "test_z.py::of_no_suite"})}
    of_suites = {"carried": frozenset({REQUIRED[2]})}
    found = judged(*HEALTHY[:2], held_to=of_suites, selection=selected(1))
    assert (found.status, found.reasons) == ("PASSED", ())
    assert REQUIRED[2] in found.required
    assert REQUIRED[2] not in found.passed
    assert judged(*HEALTHY, held_to=of_suites).status == "PASSED"  # it ran all the same
    for reasons in (
        judged(*HEALTHY[:2], selection=selected(1)).reasons,
        judged(*HEALTHY[:2], held_to=of_suites, selection=selected(2)).reasons,
        judged(*HEALTHY[:2], held_to=of_suites, selection=selected(0)).reasons,
        judged(HEALTHY[0], held_to=of_suites, selection=selected(1)).reasons,
        judged(*HEALTHY[:2], held_to=held, selection=selected(1)).reasons,
    ):
        assert reasons
    failing = check(REQUIRED[2], "failed")
    assert judged(*HEALTHY[:2], failing, held_to=of_suites).status == "FAILED"


@pytest.mark.parametrize("outcome", ["failed", "error", "skipped"])
def test_an_advisory_check_does_not_decide_but_has_to_be_there(outcome):
    advisory = (Advisory(check="test_c.py::test_three[1]", reason="a virtual machine hides it"),)
    held = {"advisory": advisory}
    assert judged(*HEALTHY, check("test_c.py::test_three[1]", outcome), held_to=held).status == "PASSED"
    missing = judged(*HEALTHY, required=(*REQUIRED, "test_c.py::test_three[1]"), held_to=held)
    assert missing.status == "FAILED"


def skip(kind: str, **needs: Any) -> dict[str, Any]:
    return check("test_c.py::test_x", "skipped", skip={"kind": kind, "needs": needs})


@pytest.mark.parametrize(
    ("skipped", "accepted"),
    [
        (skip("not on this device", feature="fp8"), True),
        (skip("not on this device", feature="tf32"), False),
        (skip("not on this device", devices=2), True),
        (skip("not on this device", devices=1), False),
        (skip("not on this device", memory_gib=200.0), True),
        (skip("not on this device", memory_gib=40.0), False),
        # The device has 150 GiB, of which a driver leaves 97 % and more to a job.
        (skip("not on this device", memory_gib=149.0), True),
        (skip("not on this device", memory_gib=145.0), False),
        (skip("not in this stack", package="flash-attn"), True),
        (skip("not in this stack", package="triton"), False),
        (skip("not in this stack", package="torch>=2.13"), True),
        (skip("not in this stack", package="torch>=2.10"), False),
        (skip("not in this stack", package="declaration"), False),
        (skip("not in this stack", package=""), False),
        (skip("not in this stack", arch="sm_100"), True),
        (skip("not in this stack", arch="sm_90"), False),
        (skip("not readable here", reading="fan speed"), True),
        (skip("not readable here", reading="ECC mode"), False),
        (skip("because"), False),
        (check("test_c.py::test_x", "skipped"), False),
    ],
)
def test_a_skip_is_accepted_only_if_this_hosts_data_confirm_it(skipped, accepted):
    facts = Facts(rows=[GPU_ROW], packages={"torch": "2.11.0", "triton": "3.6.0"}, archs=("sm_90",))
    verdict = judged(*HEALTHY, skipped, held_to={"facts": facts})
    assert verdict.status == ("PASSED" if accepted else "FAILED")
    assert accepted or "the skip is not accepted" in verdict.reasons[0]


def test_a_stack_without_torch_is_never_certified():
    held = {"facts": Facts(rows=[GPU_ROW], packages={})}
    verdict = judged(*HEALTHY, skip("not in this stack", package="torch"), held_to=held)
    assert verdict.status == "FAILED"
    assert "a stack without torch is never certified" in verdict.reasons[0]


def test_devices_that_this_host_does_not_see_are_failed():
    assert judged(*HEALTHY, held_to={"devices": ("d0",)}).status == "PASSED"
    verdict = judged(*HEALTHY, held_to={"devices": ("d0", "d1")})
    assert verdict.reasons == ("the result is about 1 devices, this host sees 2 (by id)",)


@pytest.mark.parametrize(
    ("seen", "used", "says"),
    [
        (["d0"], ["d0"], None),
        ([], ["d0"], "the suites saw 0 devices, this host sees 1 (by id)"),
        (["d1"], ["d0"], "the suites saw 1 devices, this host sees 1 (by id)"),
        (["d0", "d0"], ["d0"], "the suites saw 2 devices, this host sees 1 (by id)"),
        (["d0"], ["d0", "d1"], "checks used 1 devices that this host does not have (by id)"),
    ],
)
def test_the_suites_see_and_use_the_devices_of_this_host(seen, used, says):
    checks = [check | {"devices": used} for check in HEALTHY]
    verdict = judged(*checks, held_to={"devices": ("d0",)}, seen_devices=seen)
    assert verdict.reasons == ((says,) if says else ())


FAST = check("test_b.py::test_speed", metrics=[metric()])
KEY = ("test_b.py::test_speed", 0)


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (Bound(bound=5.0, direction="min", unit="GB/s", kind="measured"), "PASSED"),
        (
            Bound(bound=6.0, direction="min", unit="GB/s", kind="measured"),
            "FAILED",
        ),  # the image reported a looser bound
        (Bound(bound=5.0, direction="max", unit="GB/s", kind="measured"), "FAILED"),
        (None, "FAILED"),
    ],
)
def test_the_bound_of_this_checkout_decides(found, status):
    assert judged(*HEALTHY, FAST, bounds=Bounds({KEY: found})).status == status


def test_a_standard_run_measures_everything_that_has_a_bound():
    found = Bounds(unmeasured=("copy_gb_per_s with {}",))
    assert judged(*HEALTHY, bounds=found).status == "PASSED"  # a smoke run measures no speed
    verdict = judged(*HEALTHY, bounds=found, tier="standard")
    assert verdict.reasons == ("no check measured copy_gb_per_s with {}, which has a bound",)


def test_a_deselected_instance_is_failed_and_says_by_what_although_another_instance_passed():
    selection = {"arguments": ["-k", "not one[2]"], "collected": 2, "deselected": 0, "dropped": 1}
    verdict = judged(HEALTHY[0], HEALTHY[2], selection=selection)
    assert verdict.reasons[0] == "1 checks of the tier were deselected; arguments: -k not one[2]"
    assert verdict.status == "FAILED"


def test_checks_of_a_later_tier_may_be_left_out():
    selection = {"arguments": [], "collected": 3, "deselected": 7, "dropped": 0}
    assert judged(*HEALTHY, selection=selection).status == "PASSED"


@pytest.mark.parametrize("dropped", [{}, {"dropped": None}])
def test_a_result_that_does_not_say_what_was_left_out_of_its_tier_is_failed(dropped):
    verdict = judged(*HEALTHY, selection={"arguments": [], "collected": 3, "deselected": 3, **dropped})
    assert verdict.reasons == ("the result does not say how many checks of the tier were deselected",)
    assert verdict.status == "FAILED"


@pytest.mark.parametrize("deselected", [0, 1, 9])
def test_fewer_reports_than_selected_checks_are_failed(deselected):
    selection = {"arguments": [], "collected": 4, "deselected": deselected, "dropped": 0}
    assert "4 checks were selected and 3 reported" in judged(*HEALTHY, selection=selection).reasons[0]


@pytest.mark.parametrize("vendor", ["amd", "nvidia"])
def test_a_vendor_without_a_device_is_failed_with_that_reason(vendor):
    verdict = judged(*HEALTHY, host=host(vendor))
    assert f"vendor {vendor} was named and no {vendor.upper()} device is visible" in verdict.reasons


def test_a_run_on_another_vendor_than_the_stack_is_for_is_failed():
    verdict = judged(*HEALTHY, held_to={"vendor": "amd"})
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
def test_a_required_metric_without_proof_is_failed(broken):
    verdict = judged(*HEALTHY, check("test_b.py::test_speed", metrics=[broken]))
    assert verdict.status == "FAILED"
    assert "busbw" in verdict.reasons[0]


NO_BOUND = metric(verdict="no_threshold", bound=None, direction=None)


def test_a_missing_bound_is_an_outcome_of_its_own_with_the_next_command():
    bare = check("test_b.py::test_speed", "failed", cause="no_threshold", metrics=[NO_BOUND])
    verdict = judged(*HEALTHY, bare)
    assert (verdict.status, verdict.unbounded, verdict.lacks_only_bounds) == ("FAILED", (bare["id"],), True)
    assert verdict.reasons == (
        "no bound: test_b.py::test_speed: busbw on this device model; next: stackcheck baseline",
    )


@pytest.mark.parametrize("metrics", [[], [metric()], [NO_BOUND, metric(value=4.0, verdict="fail")]])
def test_a_check_that_only_claims_to_lack_a_bound_is_failed(metrics):
    verdict = judged(
        *HEALTHY, check("test_b.py::test_speed", "failed", cause="no_threshold", metrics=metrics)
    )
    assert (verdict.unbounded, verdict.lacks_only_bounds) == ((), False)
    assert verdict.reasons == ("test_b.py::test_speed failed: because",)


H200 = TestTarget(device="H200", count=8, driver="580.95.05")
MIXED = (H200, TestTarget(device="MI300X", count=8), TestTarget(device="H200", count=4))


@pytest.mark.parametrize("models", [["H200"] * 8, ["H200"] * 4, ["MI300X"] * 8])
def test_a_run_on_one_of_the_machines_that_the_stack_names_is_passed(models):
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
    models, machines, reason
):
    verdict = judged(*HEALTHY, host=host("nvidia", *models), machines=machines)
    assert verdict.status == "UNFIT"
    assert (len(verdict.reasons), verdict.invalid) == (1, ())
    assert reason in verdict.reasons[0]


def test_a_run_without_any_device_is_on_no_machine():
    assert judged(*HEALTHY, host=host() | {"devices": []}).status == "UNFIT"


def waiver(name: str, until: str = "2999-01-01") -> Waiver:
    return Waiver.model_validate(result_files.waiver(name, until=until))


def waived(*names: str) -> dict[str, Any]:
    return {"waivers": tuple(waiver(name) for name in names)}


@pytest.mark.parametrize("outcome", ["failed", "skipped"])
def test_a_waived_check_is_warned_and_named(outcome):
    allowed = waived("test_a.py::test_one[3]")
    verdict = judged(*HEALTHY, check("test_a.py::test_one[3]", outcome), held_to=allowed)
    assert (verdict.status, verdict.warned) == ("PASSED", ("test_a.py::test_one[3]",))
    assert verdict.waivers == allowed["waivers"]
    assert verdict.as_json()["waivers"][0]["until"] == "2999-01-01"


def test_waivers_for_everything_prove_nothing():
    failing = (check("test_a.py::test_one", "failed"), check("test_b.py::test_two", "failed"))
    ids = tuple(str(item["id"]) for item in failing)
    allowed = waived("test_a.py::test_one", "test_b.py::test_two")
    assert judged(*failing, required=ids, held_to=allowed).status == "FAILED"


def test_a_failure_whose_waiver_ended_names_its_last_day():
    expired = {"expired": (waiver("test_a.py::test_one[3]", until="2026-01-31"),)}
    verdict = judged(*HEALTHY, check("test_a.py::test_one[3]", "failed"), held_to=expired)
    assert "test_a.py::test_one[3]: its waiver ended on 2026-01-31" in verdict.reasons


@pytest.mark.parametrize(
    "name",
    ["*", "test_a.py::*", "test_?", "", " ", "test_a.py", "test_a.py::test_x[*]", "test_a.py::test_x[?-*]"],
)
def test_a_waiver_for_a_pattern_is_refused(name):
    with pytest.raises(ValidationError, match="is not a check"):
        waiver(name)


def test_a_waiver_for_one_way_leaves_every_other_way_to_decide():
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
def test_adding_a_failure_never_makes_a_verdict_better(run, waivers, name, outcome):
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
@given(runs, st.sampled_from(REQUIRED))
def test_a_run_without_one_of_its_checks_is_never_passed_even_if_it_was_never_collected(run, name):
    kept = [check(k, v) for k, v in run.items() if k != name]
    assert judged(*kept, required=(*run, name)).status == "FAILED"
