"""What a night tells: what was not run is in each of its forms, and its exit code is the worst."""

import json
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree as ET

import pytest

from made_plans import BROKEN, FRESH, NOW, RENEWED, SKIP, UNFIT, WARNED, plan
from stackcheck.nightly import summary
from stackcheck.nightly.decide import Action
from stackcheck.nightly.state import Ended, JudgedStep, NotRun, Plan


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
def test_the_exit_code_is_that_of_the_worst_outcome_and_never_0_for_silence(night: Plan, code: int) -> None:
    assert summary.exit_code(night) == code


def test_every_outcome_has_words() -> None:
    assert set(summary.WORDS) == {*get_args(Action), "error"} - {"repeat"}


def test_when_every_image_fails_the_machine_is_suspected_too() -> None:
    assert "look at the machine" in summary.line(plan(WARNED, WARNED))
    assert "look at the machine" not in summary.line(plan(WARNED, RENEWED))


def test_a_reboot_that_is_pending_is_in_every_form() -> None:
    night = plan(skipped=(FRESH,), reboot_pending="amdgpu: 6.14 runs, 6.16 is installed")
    for text in (summary.line(night), summary.markdown(night)):
        assert "REBOOT PENDING, nothing was run: amdgpu: 6.14 runs, 6.16 is installed" in text
    assert ET.fromstring(summary.junit(night)).get("errors") == "1"


def test_junit_has_a_case_for_every_image_also_for_those_that_were_not_run() -> None:
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


def test_what_an_image_writes_cannot_break_out_of_a_line_or_colour_a_terminal() -> None:
    nasty = Ended(action="nothing", because="first\nsecond \x1b[31mred\x00", exit_code=9)
    for text in (
        summary.line(plan(nasty)),
        *summary.warnings(plan(nasty)),
        *summary.markdown(plan(nasty)).split("\n"),
    ):
        assert text.isprintable(), text


def test_markdown_lists_every_image_and_no_check_breaks_its_table() -> None:
    night = plan(RENEWED, WARNED, skipped=(SKIP,))
    text = summary.markdown(night)
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(rows) == 1 + 3
    assert all(row.replace("\\|", "").count("|") == 5 for row in rows), rows
    assert r"test\_gemm\[bf16\|8192\]" in text


def test_a_night_is_delivered_to_files_and_to_the_summary_of_a_github_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "step.md"))
    (tmp_path / "step.md").write_text("# before\n")
    night = plan(WARNED, skipped=(SKIP,))
    summary.deliver(night, tmp_path / "nightly")
    document = json.loads((tmp_path / "nightly/night.json").read_text())
    assert (document["exit_code"], document["skipped"][0]["why"]) == (6, SKIP.why)
    assert (tmp_path / "nightly/junit.xml").read_bytes() == summary.junit(night)
    assert (tmp_path / "step.md").read_text() == "# before\n" + summary.markdown(night)
