"""What a night concludes from the runs of one image, every row of the table, and what it tells of them."""

import itertools
import json
from collections.abc import Iterator
from typing import Any, get_args
from xml.etree import ElementTree as ET

import pytest
from pydantic import ValidationError

import result_files
from made_plans import BROKEN, FRESH, NOW, RENEWED, SKIP, UNFIT, WARNED, plan
from stackcheck.nightly import summary
from stackcheck.nightly.decide import (
    GOOD,
    Action,
    Agreement,
    Certified,
    Decision,
    RunOutcome,
    RunStatus,
    Standing,
    decide,
    outcome,
    standing,
)
from stackcheck.nightly.state import Ended, JudgedStep, NotRun
from stackcheck.policy import Policy
from stackcheck.suite import results
from stackcheck.suite.results import RunResult
from stackcheck.suite.verdict import Verdict


@pytest.mark.parametrize(
    ("night", "code"),
    [
        (plan(RENEWED), 0),
        (plan(RENEWED, WARNED, BROKEN, UNFIT), 6),
        (plan(RENEWED, BROKEN, UNFIT), 4),
        (plan(RENEWED, UNFIT), 9),
        (plan(skipped=(FRESH, SKIP)), 0),
        (plan(skipped=(SKIP,)), 3),
        (plan(), 3),
        (plan(skipped=(NotRun(tag="x", why="not selected", for_here=True, postponed="sha256:1"),)), 3),
        (plan(skipped=(FRESH,), reboot_pending="amdgpu: A runs, B is installed"), 9),
    ],
)
def test_the_exit_code_is_that_of_the_worst_outcome_and_never_0_for_silence(night, code):
    assert summary.exit_code(night) == code


def test_every_outcome_has_words():
    assert set(summary.WORDS) == {*get_args(Action), "error"} - {"repeat"}


def test_when_every_image_fails_the_machine_is_suspected_too():
    assert "look at the machine" in summary.line(plan(WARNED, WARNED))
    assert "look at the machine" not in summary.line(plan(WARNED, RENEWED))


def test_a_reboot_that_is_pending_is_in_every_form():
    night = plan(skipped=(FRESH,), reboot_pending="amdgpu: 6.14 runs, 6.16 is installed")
    for text in (summary.line(night), summary.markdown(night)):
        assert "REBOOT PENDING, nothing was run: amdgpu: 6.14 runs, 6.16 is installed" in text
    assert ET.fromstring(summary.junit(night)).get("errors") == "1"


def test_junit_has_a_case_for_every_image_also_for_those_that_were_not_run():
    step = JudgedStep(run_id="a", record="sha256:1", judged=NOW, status="FAILED", reasons=("a\x00b <&>",))
    night = plan(RENEWED, WARNED, BROKEN, UNFIT, skipped=(SKIP, FRESH))
    night = night.with_item(night.items[1].model_copy(update={"runs": (step,)}))
    suite = ET.fromstring(summary.junit(night))
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "6", "failures": "1", "errors": "2", "skipped": "2"}
    kinds = {case.get("name"): [child.tag for child in case] for case in suite}
    assert kinds["stack-0"] == []
    assert kinds["stack-1"] == ["failure"]
    assert kinds["stack-3"] == ["error"]  # not a skip, which would be green
    assert [case.find("skipped").get("message") for case in suite if case.get("name") == "other"] == [
        SKIP.why
    ]  # type: ignore[union-attr]


def test_what_an_image_writes_cannot_break_out_of_a_line_or_colour_a_terminal():
    nasty = Ended(action="nothing", because="first\nsecond \x1b[31mred\x00", exit_code=9)
    for text in (
        summary.line(plan(nasty)),
        *summary.warnings(plan(nasty)),
        *summary.markdown(plan(nasty)).split("\n"),
    ):
        assert text.isprintable(), text


def test_markdown_lists_every_image_and_no_check_breaks_its_table():
    night = plan(RENEWED, WARNED, skipped=(SKIP,))
    text = summary.markdown(night)
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(rows) == 1 + 3
    assert all(row.replace("\\|", "").count("|") == 5 for row in rows), rows
    assert r"test\_gemm\[bf16\|8192\]" in text


def test_a_night_is_delivered_to_files_and_to_the_summary_of_a_github_job(tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "step.md"))
    (tmp_path / "step.md").write_text("# before\n")
    night = plan(WARNED, skipped=(SKIP,))
    summary.deliver(night, tmp_path / "nightly")
    document = json.loads((tmp_path / "nightly/night.json").read_text())
    assert (document["exit_code"], document["skipped"][0]["why"]) == (6, SKIP.why)
    assert (tmp_path / "nightly/junit.xml").read_bytes() == summary.junit(night)
    assert (tmp_path / "step.md").read_text() == "# before\n" + summary.markdown(night)


GEMM, OTHER = "test_kernels.py::test_gemm", "test_devices.py::test_device_count"
SUITES = "sha256:" + "5" * 64


def ran(status: RunStatus = "FAILED", *failed: str, **changes: Any) -> RunOutcome:
    reasons = tuple(f"{name} failed: wrong" for name in failed)
    return RunOutcome(status=status, failed=failed, **({"reasons": reasons, "suites": SUITES} | changes))


PASSED = ran("PASSED")
FAILED, ELSEWHERE = ran("FAILED", GEMM), ran("FAILED", OTHER)
UNFIT_RUN = ran("UNFIT", reasons=("the machine was throttled",))
UNBOUNDED = ran("FAILED", GEMM, reasons=("no bound: x",), lacks_only_bounds=True)
CRASHED = ran("FAILED", reasons=("the run did not finish: its state is crashed",))
SLOW, SLOW_ELSEWHERE = ran("PASSED", slow=(GEMM,)), ran("PASSED", slow=(OTHER,))
NEW_SUITES = ran("FAILED", GEMM, suites="sha256:" + "6" * 64)
BESIDE_A_BAD_LINK = ran("FAILED", GEMM, unfit=("test_devices_links.py::test_pcie_link_is_full",))
BY_THE_SUITES = ran("FAILED", GEMM, broken=(GEMM,))
EVERY = (
    *(PASSED, FAILED, ELSEWHERE, UNFIT_RUN, UNBOUNDED, CRASHED, SLOW, SLOW_ELSEWHERE),
    *(NEW_SUITES, BESIDE_A_BAD_LINK, BY_THE_SUITES),
)
CHANGES = ("driver 6.14.5 -> 6.16.6",)
ALONE = Agreement(nodes=1)  # policy.revoke: auto


def certified(standing: Standing, *passed: str) -> Certified:
    changes = () if standing in {"same", "new image"} else CHANGES
    named = frozenset(passed or (GEMM, OTHER))
    return Certified(standing=standing, changes=changes, passed=named, suites=SUITES)


TABLE: list[tuple[Standing, tuple[RunOutcome, ...], str]] = [
    ("same", (PASSED,), "renew"),
    ("same", (FAILED,), "repeat"),
    ("same", (FAILED, PASSED), "repeat"),  # one against one: a third run decides
    ("same", (FAILED, PASSED, PASSED), "renew"),
    ("same", (FAILED, PASSED, FAILED), "revoke"),
    ("same", (FAILED, FAILED), "revoke"),
    ("same", (FAILED, ELSEWHERE), "repeat"),  # two failures of two checks do not agree
    ("same", (FAILED, ELSEWHERE, PASSED), "hold"),
    ("same", (FAILED, ELSEWHERE, FAILED), "revoke"),
    ("same", (FAILED, UNFIT_RUN), "nothing"),
    ("same", (UNFIT_RUN,), "nothing"),
    ("same", (UNBOUNDED,), "hold"),
    ("same", (FAILED, UNBOUNDED), "hold"),
    ("same", (CRASHED, CRASHED), "hold"),
    ("same", (SLOW,), "repeat"),  # the hard floor
    ("same", (SLOW, SLOW), "revoke"),
    ("same", (SLOW, PASSED, PASSED), "renew"),
    ("same", (SLOW, SLOW_ELSEWHERE, PASSED), "hold"),
    ("same", (SLOW, UNFIT_RUN), "nothing"),
    ("same", (NEW_SUITES, NEW_SUITES), "hold"),
    ("same", (BESIDE_A_BAD_LINK, FAILED), "hold"),
    ("same", (BY_THE_SUITES, FAILED), "hold"),
    ("new driver", (SLOW, SLOW), "warn"),
    ("new driver", (SLOW, PASSED, PASSED), "hold"),
    ("new image", (SLOW, SLOW), "hold"),
    ("changed", (PASSED,), "renew"),
    ("changed", (FAILED,), "repeat"),
    ("changed", (FAILED, PASSED, PASSED), "hold"),
    ("changed", (FAILED, FAILED), "warn"),
    ("changed", (UNFIT_RUN,), "nothing"),
    ("new driver", (PASSED,), "widen"),
    ("new driver", (FAILED,), "repeat"),
    ("new driver", (FAILED, PASSED, PASSED), "hold"),
    ("new driver", (FAILED, PASSED, FAILED), "warn"),
    ("new driver", (CRASHED, CRASHED), "warn"),
    ("new driver", (FAILED, UNFIT_RUN), "nothing"),
    ("new driver", (UNFIT_RUN,), "nothing"),
    ("new driver", (UNBOUNDED,), "hold"),
    ("new image", (PASSED,), "certify"),
    ("new image", (FAILED,), "repeat"),
    ("new image", (FAILED, PASSED, PASSED), "hold"),
    ("new image", (FAILED, FAILED), "hold"),
    ("new image", (UNFIT_RUN,), "nothing"),
]


@pytest.mark.parametrize(("where", "runs", "action"), TABLE)
def test_each_row_of_the_table(where, runs, action):
    decision = decide(certified(where), runs, ALONE)
    assert decision.action == action
    assert decision.because


def every_night() -> Iterator[tuple[Standing, tuple[RunOutcome, ...], Decision]]:
    """Every end of a night: runs are added as long as the decision asks for one more."""
    for where, three in itertools.product(get_args(Standing), itertools.product(EVERY, repeat=3)):
        for count in (1, 2, 3):
            decision = decide(certified(where), three[:count], ALONE)
            if decision.action != "repeat":
                yield where, three[:count], decision
                break
        else:
            pytest.fail(f"three runs decide nothing: {where}, {three}")


def test_a_night_ends_well_only_after_one_good_run_or_two_of_three():
    for where, runs, decision in every_night():
        good = [run for run in runs if run.status == "PASSED" and not run.slow]
        if decision.action in GOOD:
            assert (len(runs), len(good)) in {(1, 1), (3, 2)}, (where, runs)
            assert decision.flaky is (len(runs) == 3)
            assert len(runs) == 1 or (where, decision.action) == ("same", "renew")


def test_only_two_clean_failures_of_a_certified_check_revoke():
    clean = {id(run) for run in (FAILED, ELSEWHERE, SLOW, SLOW_ELSEWHERE)}
    revoked = [(where, runs) for where, runs, decision in every_night() if decision.action == "revoke"]
    assert revoked
    for where, runs in revoked:
        bad = [run for run in runs if run.bad]
        agreed = [name for name in (GEMM, OTHER) if sum(name in run.bad for run in bad) >= 2]
        assert where == "same"
        assert agreed
        assert all(id(run) in clean for run in bad if {*agreed} & {*run.bad}), runs


@pytest.mark.parametrize(
    ("nodes", "others", "action"),
    [
        (None, {}, "hold"),
        (None, {"b": {GEMM}, "c": {GEMM}}, "hold"),
        (1, {}, "revoke"),
        (2, {}, "hold"),
        (2, {"b": {OTHER}}, "hold"),
        (2, {"b": {GEMM, OTHER}}, "revoke"),
        (3, {"b": {GEMM}}, "hold"),
        (3, {"b": {GEMM}, "c": {GEMM}}, "revoke"),
    ],
)
def test_a_node_revokes_only_with_as_many_others_as_the_policy_asks_for(nodes, others, action):
    told = {node: frozenset(names) for node, names in others.items()}
    decision = decide(certified("same"), (FAILED, FAILED), Agreement(nodes=nodes, others=told))
    assert decision.action == action
    assert action == "revoke" or "a person has to decide" in decision.because


def test_without_a_word_in_the_policy_two_nodes_have_to_agree():
    assert decide(certified("same"), (FAILED, FAILED)).action == "hold"
    assert Policy(certifies={}).revoke_nodes == Agreement().nodes == 2
    assert [Policy(certifies={}, revoke=text).revoke_nodes for text in ("report", "auto", "quorum 3")] == [
        None,
        1,
        3,
    ]
    for text in ("quorum 1", "quorum", "quorum 0", "always", ""):
        with pytest.raises(ValidationError):
            Policy(certifies={}, revoke=text)


def test_what_must_not_be_rolled_out_is_named_with_the_failing_checks():
    decision = decide(certified("new driver"), (FAILED, FAILED))
    assert (decision.rollout, decision.failed) == (CHANGES, (GEMM,))
    for _, _, decision in every_night():
        assert bool(decision.rollout) == (decision.action == "warn")


def host(driver: str, kernel: str = "6.8") -> dict[str, Any]:
    common = {"vendor": "amd", "partition": "SPX/NPS1", "nvls": "unavailable", "devices": []}
    return {**common, "driver": driver, "kernel": kernel}


def test_what_else_changed_is_named_and_is_no_new_driver():
    assert standing([host("6.14.5")], host("6.14.5", "6.11")) == ("changed", ("kernel 6.8 -> 6.11",), 0)


def test_a_driver_that_no_certificate_names_is_new():
    found = standing([host("6.14.5"), host("6.12")], host("6.16.6"))
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


def result_of(*checks: dict[str, Any]) -> RunResult:
    return results.parse(json.dumps(result_files.result(*checks)).encode())


def test_a_skip_without_an_accepted_reason_counts_as_a_failure_and_a_waived_check_does_not():
    judged = verdict(
        skipped=(GEMM, OTHER), reasons=(f"{GEMM} skipped: because; the skip is not accepted: x",)
    )
    assert outcome(judged, result_of()).failed == (GEMM,)
    assert outcome(verdict(failed=(GEMM,), warned=(GEMM,)), result_of()).failed == ()
