"""Faults of metrics and outcomes: none of them may look like a pass. In: planted_suite. Out: its
result.json.
"""

import json
import os
import re
import shutil
import subprocess
import threading
import time

import pytest

import planting
from planted_suite import only, run_suite

pytestmark = [pytest.mark.catches("the harness"), pytest.mark.usefixtures("suite_python")]


@pytest.mark.parametrize("value", ["float('nan')", "float('inf')", "-float('inf')"])
def test_figure_that_is_no_number_fails_the_check(tmp_path, value):
    check = only(run_suite(tmp_path, "test_figure", value=value))
    assert (check["outcome"], check["metrics"][0]["verdict"], check["metrics"][0]["value"]) == (
        "failed",
        "fail",
        None,
    )


@pytest.mark.healthy
def test_gated_figure_on_cpu_is_recorded_and_says_that_it_has_no_bound(tmp_path):
    check = only(run_suite(tmp_path, "test_figure"))
    assert check["outcome"] == "passed"
    assert check["metrics"][0]["verdict"] == "recorded"
    assert check["metrics"][0]["source"].startswith("none: a cpu run proves")


def test_half_of_the_bound_fails_and_says_all_five_things(tmp_path):
    result = run_suite(
        tmp_path, "test_figure", value="400.0", vendor="nvidia", env={"STACKCHECK_FAKE_NVML": "{}"}
    )
    reason = only(result)["reason"]
    assert (only(result)["outcome"], only(result)["cause"]) == ("failed", "bound")
    for part in (
        "gemm_tflops 400 TFLOP/s < 756.4 TFLOP/s",
        "H200 x1",
        "thresholds/nvidia/H200.json",
        "measured 2026",
    ):
        assert part in reason
    assert "look at: throttling" in result["output"]
    assert "next: pytest" in result["output"]


@pytest.mark.healthy
def test_reference_figure_passes_its_bound(tmp_path):
    result = run_suite(
        tmp_path, "test_figure", value="800.0", vendor="nvidia", env={"STACKCHECK_FAKE_NVML": "{}"}
    )
    assert only(result)["metrics"][0]["verdict"] == "pass"


def test_figure_without_a_threshold_fails_and_says_where_to_add_it(tmp_path):
    h200 = {"STACKCHECK_FAKE_NVML": "{}"}
    result = run_suite(tmp_path, "test_figure_of_another_shape", vendor="nvidia", env=h200)
    assert only(result)["metrics"][0]["verdict"] == "no_threshold"
    assert only(result)["cause"] == "no_threshold"
    assert "thresholds/nvidia/H200.json" in only(result)["reason"]
    summary = result["output"].rpartition("stackcheck ===")[2]
    assert "NO BOUND test_planted.py::test_figure_of_another_shape on H200 x4" in summary
    assert "H200 x4: 1 no bound; " in summary
    assert "next: stackcheck baseline" in summary
    assert "look at:" not in summary  # nothing is known to be slow


def test_a_bare_run_ends_with_the_command_that_judges_it(tmp_path):
    result = run_suite(tmp_path, "test_invalid")
    last = result["output"].rstrip().splitlines()[-1]
    assert last == f"verdict: stackcheck judge {tmp_path / 'out' / 'result.json'}", result["output"]


def test_a_run_leaves_a_page_that_shows_the_failure_beside_its_result(tmp_path):
    h200 = {"STACKCHECK_FAKE_NVML": "{}"}
    result = run_suite(tmp_path, "test_figure", value="400.0", vendor="nvidia", env=h200)
    page = tmp_path / "out" / "report.html"
    assert f"page: {page}" in result["output"].splitlines()
    text = page.read_text(encoding="utf-8")
    assert "1 of 1 checks did not pass." in text
    assert "✘ outside" in text


def python(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """What the Python of the suites prints, with variables beside those of this process."""
    command, env = [planting.SUITE_PYTHON, *words], {**os.environ, **env}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


ACCEPTANCE = str(planting.TESTS / "acceptance")
SUITES = ("-m", "pytest", ACCEPTANCE, "--gpu-vendor=cpu")


def test_there_is_no_budget_for_skips(tmp_path):
    ended = python(*SUITES, "--skip-budget=1", f"--result-dir={tmp_path}")
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert "unrecognized arguments: --skip-budget" in ended.stderr


def test_wrong_unit_is_an_error():
    script = "from harness.check import Check; Check(vendor='nvidia', model='H200').record("
    script += "'copy_gb_per_s', 4.2, unit='TB/s', gate=True)"
    ended = python("-c", script, PYTHONPATH=ACCEPTANCE)
    assert "is recorded in 'TB/s' and its threshold is in 'GB/s'" in ended.stderr


def test_throttling_during_a_check_makes_it_invalid(tmp_path):
    state = json.dumps({"reasons": 0x40})
    result = run_suite(tmp_path, "test_after", vendor="nvidia", env={"STACKCHECK_FAKE_NVML": state})
    assert only(result)["outcome"] == "invalid"
    assert "hardware thermal" in only(result)["reason"]


def test_vendor_that_is_not_there_fails_every_check_at_once(tmp_path):
    state = json.dumps({"init": "driver_not_loaded"})
    started = time.monotonic()
    result = run_suite(tmp_path, "", vendor="nvidia", env={"STACKCHECK_FAKE_NVML": state})
    assert time.monotonic() - started < 60  # the checks that hang would take longer alone
    assert {check["outcome"] for check in result["checks"]} == {"failed"}
    reason = result["checks"][0]["reason"]
    assert reason.startswith("vendor nvidia was named and no NVIDIA device is visible")
    assert (result["exit"], result["state"]) == (1, "finished")


def test_invalid_is_its_own_outcome(tmp_path):
    assert only(run_suite(tmp_path, "test_invalid"))["outcome"] == "invalid"


def test_tier_leaves_out_later_checks_and_counts_them(tmp_path):
    result = run_suite(tmp_path, "test_late")
    assert result["checks"] == []
    assert result["selection"]["deselected"] == 1


@pytest.mark.healthy
def test_workers_of_xdist_report_into_one_file(tmp_path):
    pytest.importorskip("xdist")
    result = run_suite(tmp_path, "", "-n", "2", "-k", "figure or after or invalid or ranks and not silent")
    outcomes = {check["id"].rpartition("::")[2]: check["outcome"] for check in result["checks"]}
    expected = {
        "test_figure": "passed",
        "test_figure_of_another_shape": "passed",
        "test_after": "passed",
        "test_invalid": "invalid",
        "test_ranks": "passed",
    }
    assert outcomes == expected, result["output"]
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert all(name in page for name in expected)
    assert result["selection"]["collected"] == 5


def test_naming_the_suites_without_a_vendor_is_a_usage_error():
    ended = python("-m", "pytest", ACCEPTANCE, "-p", "no:cacheprovider")
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert "needs --gpu-vendor" in ended.stderr


def test_a_path_that_children_cannot_be_told_is_a_usage_error(tmp_path):
    suites = tmp_path / "a:b" / "tests" / "acceptance"
    suites.mkdir(parents=True)
    shutil.copy(planting.TESTS / "conftest.py", suites.parent)
    ended = python("-m", "pytest", str(suites.parent), "--gpu-vendor=cpu", "-p", "no:cacheprovider")
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert "a:b/tests/acceptance: no path of the suites may have a colon" in ended.stderr


def test_an_optimised_python_is_refused_as_it_strips_asserts(tmp_path):
    ended = python(*SUITES, "-p", "no:cacheprovider", f"--result-dir={tmp_path}", PYTHONOPTIMIZE="1")
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert "unset PYTHONOPTIMIZE" in ended.stderr


def test_a_failed_gate_fails_the_check_in_an_optimised_python_too():
    failed = {"cases": [{"name": "zeroed", "failures": ["out frobenius 1 > 0.1"], "margin": 10.0}]}
    judge = f"""
from workloads import cases
for report in ({failed!r}, {{"cases": []}}):
    try:
        cases.require(report, lambda *a, **k: None)
    except AssertionError as error:
        print(error)
"""
    ended = python("-O", "-c", judge, PYTHONPATH=ACCEPTANCE)
    told = re.findall("^1 of 1 cases failed|^no case ran", ended.stdout, re.MULTILINE)
    assert told == ["1 of 1 cases failed", "no case ran"], ended.stdout + ended.stderr


def test_instances_taken_out_by_the_environment_are_counted_apart_from_later_tiers(tmp_path):
    result = run_suite(tmp_path, "", env={"PYTEST_ADDOPTS": "-k 'after or invalid or late'"})
    selection = result["selection"]
    assert (selection["collected"], selection["deselected"]) == (2, 1)
    assert selection["dropped"] > 1


@pytest.mark.healthy
def test_reading_beside_a_sampler_whose_library_stumbles_is_a_reading():
    """The child is stopped only while no other thread talks to it."""
    from harness.monitor import Monitor, MonitorError

    monitor, over, stumbled = Monitor("cpu"), threading.Event(), []

    def stumble() -> None:
        while not over.is_set():
            with pytest.raises(MonitorError):
                monitor._call("a call that the library does not have")
            stumbled.append(1)

    thread = threading.Thread(target=stumble)
    thread.start()
    try:
        hosts = [monitor.read_devices() for _ in range(10)]
    finally:
        over.set()
        thread.join()
        monitor.stop()
    assert stumbled
    assert all(host.devices for host in hosts)
