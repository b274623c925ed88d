"""What a night concludes from the runs of one image: every row of the table."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest

from stackcheck.nightly.decide import (
    GOOD,
    Certified,
    Decision,
    RunOutcome,
    Standing,
    decide,
    outcome,
    standing,
)
from stackcheck.suite.verdict import Verdict

GEMM, OTHER = "test_kernels.py::test_gemm", "test_devices.py::test_device_count"
PASSED = RunOutcome(status="PASSED")
FAILED = RunOutcome(status="FAILED", failed=(GEMM,), reasons=(f"{GEMM} failed: slow",))
UNFIT = RunOutcome(status="UNFIT", reasons=("the machine was throttled",))
UNBOUNDED = RunOutcome(status="FAILED", failed=(GEMM,), reasons=("no bound: x",), lacks_only_bounds=True)
CRASHED = RunOutcome(status="FAILED", reasons=("the run did not finish: its state is crashed",))
SLOW = RunOutcome(status="PASSED", slow=(GEMM,))
SLOW_ELSEWHERE = RunOutcome(status="PASSED", slow=(OTHER,))
CHANGES = ("driver 6.14.5 -> 6.16.6",)


def certified(standing: Standing, *passed: str) -> Certified:
    changes = () if standing in {"same", "new image"} else CHANGES
    return Certified(standing=standing, changes=changes, passed=frozenset(passed or (GEMM, OTHER)))


TABLE: list[tuple[Standing, tuple[RunOutcome, ...], str]] = [
    ("same", (PASSED,), "renew"),
    ("same", (FAILED,), "repeat"),
    ("same", (FAILED, PASSED), "renew"),
    ("same", (FAILED, FAILED), "revoke"),
    ("same", (FAILED, UNFIT), "nothing"),
    ("same", (UNFIT,), "nothing"),
    ("same", (UNBOUNDED,), "hold"),
    ("same", (FAILED, UNBOUNDED), "hold"),
    ("same", (CRASHED, CRASHED), "hold"),
    ("same", (SLOW,), "repeat"),  # the hard floor, with one automatic repeat
    ("same", (SLOW, SLOW), "revoke"),
    ("same", (SLOW, PASSED), "renew"),
    ("same", (SLOW, SLOW_ELSEWHERE), "renew"),
    ("same", (SLOW, UNFIT), "nothing"),
    ("new driver", (SLOW, SLOW), "warn"),
    ("new driver", (SLOW, PASSED), "hold"),
    ("new image", (SLOW, SLOW), "hold"),
    ("changed", (PASSED,), "renew"),
    ("changed", (FAILED,), "repeat"),
    ("changed", (FAILED, PASSED), "hold"),
    ("changed", (FAILED, FAILED), "warn"),
    ("changed", (UNFIT,), "nothing"),
    ("new driver", (PASSED,), "widen"),
    ("new driver", (FAILED,), "repeat"),
    ("new driver", (FAILED, PASSED), "hold"),
    ("new driver", (FAILED, FAILED), "warn"),
    ("new driver", (CRASHED, CRASHED), "warn"),
    ("new driver", (FAILED, UNFIT), "nothing"),
    ("new driver", (UNFIT,), "nothing"),
    ("new driver", (UNBOUNDED,), "hold"),
    ("new image", (PASSED,), "certify"),
    ("new image", (FAILED,), "repeat"),
    ("new image", (FAILED, PASSED), "hold"),
    ("new image", (FAILED, FAILED), "hold"),
    ("new image", (UNFIT,), "nothing"),
]


@pytest.mark.parametrize(("where", "runs", "action"), TABLE)
def test_each_row_of_the_table(where: Standing, runs: tuple[RunOutcome, ...], action: str) -> None:
    decision = decide(certified(where), runs)
    assert decision.action == action
    assert decision.because


def every_case() -> list[tuple[Standing, tuple[RunOutcome, ...]]]:
    kinds = (PASSED, FAILED, UNFIT, UNBOUNDED, CRASHED)
    pairs = [(first, second) for first, second in itertools.product((FAILED, CRASHED), kinds)]
    return [(where, runs) for where in get_args(Standing) for runs in [*((kind,) for kind in kinds), *pairs]]


def test_only_a_last_run_that_passed_ends_well() -> None:
    for where, runs in every_case():
        good = decide(certified(where), runs).action in GOOD
        assert not good or runs[-1] is PASSED, (where, runs)


def test_only_the_certified_configuration_is_ever_revoked() -> None:
    revoked = [
        (where, runs) for where, runs in every_case() if decide(certified(where), runs).action == "revoke"
    ]
    assert revoked
    assert all(where == "same" and runs[0].status == runs[1].status == "FAILED" for where, runs in revoked)


def test_a_check_that_the_certificate_does_not_name_revokes_nothing() -> None:
    """New suites may ask more than the image was certified for; a person decides then."""
    decision = decide(certified("same", OTHER), (FAILED, FAILED))
    assert decision.action == "hold"
    assert GEMM in decision.because
    both = RunOutcome(status="FAILED", failed=(GEMM, OTHER))
    assert decide(certified("same", OTHER), (FAILED, both)).action == "revoke"


def test_what_must_not_be_rolled_out_is_named_with_the_failing_checks() -> None:
    decision = decide(certified("new driver"), (FAILED, FAILED))
    assert (decision.rollout, decision.failed) == (CHANGES, (GEMM,))
    for where, runs in every_case():
        decision = decide(certified(where), runs)
        assert bool(decision.rollout) == (decision.action == "warn")


def test_a_failure_that_did_not_repeat_is_marked() -> None:
    assert decide(certified("same"), (FAILED, PASSED)) == Decision(
        action="renew",
        because="this configuration passed again on the repeat, after one failure",
        failed=(GEMM,),
        flaky=True,
    )
    assert not decide(certified("same"), (PASSED,)).flaky


def host(**changes: Any) -> dict[str, Any]:
    device = {"model": "MI300X", "firmware": "1", "power_cap_w": 750.0}
    common = {
        "vendor": "amd",
        "driver": "6.14.5",
        "kernel": "6.8",
        "partition": "SPX/NPS1",
        "nvls": "unavailable",
    }
    return {**common, "devices": [device] * 8, **changes}


def test_a_configuration_is_the_same_whatever_node_it_is_on() -> None:
    other = [{"model": "MI300X", "firmware": "1", "power_cap_w": 750.0, "id": f"x{n}"} for n in range(8)]
    assert standing([host()], host(devices=other)) == ("same", (), 0)
    assert standing([host(driver="6.16"), host()], host()) == ("same", (), 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kernel": "6.11"}, "kernel 6.8 -> 6.11"),
        ({"partition": "CPX/NPS4"}, "partition SPX/NPS1 -> CPX/NPS4"),
        (
            {"devices": [{"model": "MI300X", "firmware": "2", "power_cap_w": 750.0}] * 8},
            "firmware 1 x8 -> 2 x8",
        ),
        (
            {"devices": [{"model": "MI300X", "firmware": "1", "power_cap_w": 600.0}] * 8},
            "power cap in W 750 x8 -> 600 x8",
        ),
    ],
)
def test_what_else_changed_is_named_and_is_no_new_driver(changes: dict[str, Any], words: str) -> None:
    assert standing([host()], host(**changes)) == ("changed", (words,), 0)


def test_a_driver_that_no_certificate_names_is_new() -> None:
    found = standing([host(), host(driver="6.12")], host(driver="6.16.6"))
    assert found == ("new driver", ("driver 6.14.5 -> 6.16.6",), 0)


def verdict(**changes: Any) -> Verdict:
    fields: dict[str, Any] = {
        "status": "FAILED",
        "reasons": (),
        "passed": (),
        "failed": (),
        "skipped": (),
        "invalid": (),
        "warned": (),
        "required": (),
    }
    return Verdict(**(fields | changes))


def test_a_skip_without_an_accepted_reason_counts_as_a_failure_and_a_waived_check_does_not() -> None:
    judged = verdict(
        skipped=(GEMM, OTHER), reasons=(f"{GEMM} skipped: because; the skip is not accepted: x",)
    )
    assert outcome(judged).failed == (GEMM,)
    assert outcome(verdict(failed=(GEMM,), warned=(GEMM,))).failed == ()
