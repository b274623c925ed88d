"""`stackcheck judge` gives this checkout's verdict on any result, and says what it did not compare."""

import json
from pathlib import Path
from typing import Any

import pytest

from small_checkout import CPU_STACK, ROOT, FakeEngine, answer, call
from stackcheck.suite.judgement import judge_file

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")

GEMM = "test_kernels.py::test_gemm"
RESULT = f"build/{CPU_STACK}/run/result.json"
Capsys = pytest.CaptureFixture[str]
WAIVER = f"""
  waivers:
    - check: {GEMM}
      stacks: [{CPU_STACK}]
      reason: a fault that is known and tracked
      issue: pytorch/pytorch#196678
      by: the owner of this checkout
      until: 2999-12-31
"""


@pytest.fixture
def ran(small_checkout: Path, fake_engine: FakeEngine, capsys: Capsys) -> Path:
    """A checkout in which the suites have run, with one failed check."""
    fake_engine.answer = answer((GEMM, "failed"))
    assert call(capsys, "test", CPU_STACK).code == 6
    return small_checkout


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def judged(capsys: Capsys, *options: str) -> tuple[int, dict[str, Any]]:
    done = call(capsys, "judge", RESULT, "--json", *options)
    return done.code, json.loads(done.out)


def test_a_waiver_applies_only_to_a_named_stack(ran: Path, capsys: Capsys) -> None:
    matrix = ran / "matrix.yaml"
    matrix.write_text(matrix.read_text().replace("\npolicy:\n", f"\npolicy:{WAIVER}", 1))
    code, found = judged(capsys, "--stack", CPU_STACK)
    assert (code, found["status"], found["warned"]) == (0, "PASSED", [GEMM])
    code, found = judged(capsys)
    assert (code, found["status"], found["warned"]) == (6, "FAILED", [])
    assert any(line.startswith("waivers, tested_on and what the stack") for line in found["not_compared"])


def test_the_machine_is_compared_with_tested_on_of_a_named_stack(
    ran: Path, fake_engine: FakeEngine, capsys: Capsys
) -> None:
    fake_engine.answer = answer()
    assert call(capsys, "test", CPU_STACK).code == 0
    matrix = ran / "matrix.yaml"
    assert "{device: CPU, count: 1}" in matrix.read_text()
    matrix.write_text(matrix.read_text().replace("{device: CPU, count: 1}", "{device: H200, count: 8}"))
    code, found = judged(capsys, "--stack", CPU_STACK)
    assert (code, found["status"]) == (9, "UNFIT")
    assert "the stack names H200 x8" in found["reasons"][0]
    assert judged(capsys)[0] == 0


def test_suites_that_are_not_those_of_this_checkout_are_named(ran: Path, capsys: Capsys) -> None:
    assert not any(line.startswith("the suites") for line in judged(capsys)[1]["not_compared"])
    (ran / "tests" / "acceptance" / "test_some.py").write_text("# other checks\n")
    assert any(line.startswith("the suites") for line in judged(capsys)[1]["not_compared"])


def test_a_run_with_other_thresholds_is_held_to_the_bounds_of_this_checkout(tmp_path: Path) -> None:
    """Its own bounds differ by right, so they say nothing; its figures do."""
    document = json.loads((ROOT / "docs" / "results" / "suites-h100-x1-standard.json").read_text())
    path = tmp_path / "result.json"
    for check in document["checks"]:
        for metric in check["metrics"]:
            if metric["name"] == "copy_gb_per_s" and metric["verdict"] == "pass":
                metric |= {"value": 2600.0, "bound": 2402.0}  # over the run's bound, under the one here
    path.write_text(json.dumps(document))
    found = judge_file(path, ROOT, None)
    (reason,) = [reason for reason in found.verdict.reasons if "copy_gb_per_s" in reason]
    assert "copy_gb_per_s 2600.0 GB/s violates" in reason
    assert any(line.startswith("the thresholds: the run used others") for line in found.not_compared)


@pytest.mark.usefixtures("fake_engine")
def test_missing_bounds_alone_lead_to_baseline(small_checkout: Path, capsys: Capsys) -> None:
    assert call(capsys, "test", CPU_STACK).code == 0
    path = small_checkout / RESULT
    document = json.loads(path.read_text())
    figure = {"name": "copy_gb_per_s", "value": 1.0, "unit": "GB/s", "verdict": "no_threshold"}
    document["checks"][0] |= {"outcome": "failed", "cause": "no_threshold", "metrics": [figure]}
    edit(path, checks=document["checks"])
    done = call(capsys, "judge", RESULT)
    assert done.code == 6
    assert "1 no bound" in done.out
    assert f"next     stackcheck baseline {RESULT}" in done.out
    assert "failed" not in done.out.partition("reasons")[0]


@pytest.mark.usefixtures("fake_engine")
def test_list_calls_a_stack_tested_after_a_run_of_a_lower_tier(small_checkout: Path, capsys: Capsys) -> None:
    def listed() -> dict[str, Any]:
        return dict(json.loads(call(capsys, "list", CPU_STACK, "--json").out)["stacks"][0])

    assert (listed()["state"], listed()["run"]) == ("locked", None)
    assert call(capsys, "test", CPU_STACK).code == 0
    assert (listed()["state"], listed()["run"]) == ("locked", {"tier": "smoke", "verdict": "PASSED"})
    matrix = small_checkout / "matrix.yaml"
    matrix.write_text(matrix.read_text().replace("cpu: smoke", "cpu: standard"))
    assert (listed()["state"], listed()["run"]) == ("tested", {"tier": "smoke", "verdict": "PASSED"})
    (small_checkout / "build" / CPU_STACK / "key.json").write_text("{")
    assert (listed()["state"], listed()["run"]) == ("locked", None)


def test_list_and_test_name_the_waivers_of_a_stack(ran: Path, capsys: Capsys) -> None:
    matrix = ran / "matrix.yaml"
    matrix.write_text(matrix.read_text().replace("\npolicy:\n", f"\npolicy:{WAIVER}", 1))
    words = f"{CPU_STACK}: {GEMM} is waived by the owner of this checkout until 2999-12-31: a fault that is"
    assert words in call(capsys, "list", "cpu-*").out
    assert words in call(capsys, "test", CPU_STACK).err
    document = json.loads(call(capsys, "list", "cpu-*", "--json").out)
    assert document["stacks"][0]["waivers"][0]["issue"] == "pytorch/pytorch#196678"
