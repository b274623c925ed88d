"""Faults of a run: what must never look like a pass, and what a hang leaves behind. The suite is a file
planted here.
"""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

import planting
from harness import order
from harness.listener import Listener

pytestmark = pytest.mark.catches("the harness")

SUITE = '''
import time
import pytest
from harness.check import invalid

def test_figure(record_metric):
    """A figure is kept."""
    conditions = {"dtype": "bf16", "m": 8192, "n": 8192, "k": 8192}
    record_metric("gemm_tflops", VALUE, unit="TFLOP/s", conditions=conditions, gate=True)

def test_crash(on_device):
    on_device("work:crash")

def test_hang(on_device):
    on_device("work:hang", timeout_s=4)

def test_after(on_device):
    assert on_device("work:add", a=1, b=2) == 3

def test_invalid():
    invalid("throttled: hardware thermal")

@pytest.mark.gpus(2)
def test_ranks(launch):
    assert launch("PROGRAM", "sum", nproc=2, timeout_s=90)["sum"] == 3

@pytest.mark.gpus(2)
def test_hung_rank(launch):
    launch("PROGRAM", "hang", nproc=2, timeout_s=20)

@pytest.mark.gpus(2)
def test_dead_rank(launch):
    launch("PROGRAM", "die", nproc=2, timeout_s=90)

@pytest.mark.gpus(2)
def test_silent_ranks(launch):
    launch("PROGRAM", "silent", nproc=2, timeout_s=90)

@pytest.mark.last
def test_judges_the_run(whole_run, acceptance):
    assert acceptance.ended._count() == acceptance.before_last
    assert (acceptance.result_dir / "slow").exists()

def test_slow(acceptance):
    time.sleep(3)
    (acceptance.result_dir / "slow").touch()

@pytest.mark.tier("soak")
def test_late():
    pass
'''
WORK = """
import os, time
def add(a, b): return a + b
def crash(): os.abort()
def hang(): time.sleep(600)
"""
PROGRAM = """
import json, os, sys, time
rank = int(os.environ["RANK"])
if sys.argv[1] == "hang" and rank == 1: time.sleep(600)
if sys.argv[1] == "die" and rank == 1: sys.exit("rank 1 gives up")
if sys.argv[1] == "sum" and rank == 0: print(json.dumps({"sum": 3}))
"""


def run_suite(
    folder: Path, check: str, *arguments: str, value: str = "1.0", vendor: str = "cpu", env=None
) -> dict:
    """Run the planted suite in a copy of tests/acceptance, so that it meets the real conftest and harness."""
    copy = folder / "tests"
    if not copy.exists():
        copy.mkdir()
        for name in ("conftest.py", "pytest.ini"):
            (copy / name).write_bytes((planting.TESTS / name).read_bytes())
        (copy / "acceptance").mkdir()
        for part in ("harness", "vendors", "workloads", "thresholds", "devices.json", "conftest.py"):
            (copy / "acceptance" / part).symlink_to(planting.TESTS / "acceptance" / part)
    program = folder / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    (folder / "work.py").write_text(WORK, encoding="utf-8")
    suite = SUITE.replace("VALUE", value).replace("PROGRAM", str(program))
    (copy / "acceptance" / "test_planted.py").write_text(suite, encoding="utf-8")
    path = os.pathsep.join((str(folder), str(planting.STUBS)))
    target = copy / "acceptance" / ("test_planted.py" + (f"::{check}" if check else ""))
    command = (
        *(
            planting.SUITE_PYTHON,
            "-m",
            "pytest",
            str(target),
            "--gpu-vendor",
            vendor,
            "-p",
            "no:cacheprovider",
        ),
        *("--result-dir", str(folder / "out"), "--lease-dir", str(folder / "leases"), *arguments),
    )
    ended = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    result = json.loads((folder / "out" / "result.json").read_text(encoding="utf-8"))
    return {**result, "output": ended.stdout + ended.stderr, "exit": ended.returncode}


def only(result: dict) -> dict:
    (check,) = result["checks"]
    return check


@pytest.fixture(autouse=True)
def _needs_torch(suite_python) -> None:
    assert suite_python


@pytest.mark.parametrize("value", ["float('nan')", "float('inf')", "-float('inf')"])
def test_figure_that_is_no_number_fails_the_check(tmp_path, value) -> None:
    check = only(run_suite(tmp_path, "test_figure", value=value))
    assert (check["outcome"], check["metrics"][0]["verdict"], check["metrics"][0]["value"]) == (
        "failed",
        "fail",
        None,
    )


@pytest.mark.healthy
def test_gated_figure_on_cpu_is_recorded_and_says_that_it_has_no_bound(tmp_path) -> None:
    check = only(run_suite(tmp_path, "test_figure"))
    assert check["outcome"] == "passed"
    assert check["metrics"][0]["verdict"] == "recorded"
    assert check["metrics"][0]["source"].startswith("none: the cpu vendor proves")


def test_half_of_the_bound_fails_and_says_all_five_things(tmp_path) -> None:
    result = run_suite(
        tmp_path, "test_figure", value="400.0", vendor="nvidia", env={"STACKCHECK_FAKE_NVML": "{}"}
    )
    reason = only(result)["reason"]
    assert only(result)["outcome"] == "failed"
    for part in (
        "gemm_tflops 400 TFLOP/s < 760 TFLOP/s",
        "H200 x1",
        "thresholds/nvidia/H200.json",
        "measured 2026",
    ):
        assert part in reason
    assert "look at: throttling" in result["output"]
    assert "next: pytest" in result["output"]


@pytest.mark.healthy
def test_reference_figure_passes_its_bound(tmp_path) -> None:
    result = run_suite(
        tmp_path, "test_figure", value="800.0", vendor="nvidia", env={"STACKCHECK_FAKE_NVML": "{}"}
    )
    assert only(result)["metrics"][0]["verdict"] == "pass"


def test_figure_without_a_threshold_fails_and_says_where_to_add_it(tmp_path) -> None:
    b200 = json.dumps(
        {"pci_device_id": 0x290110DE, "memory": 183359 << 20, "capability": [10, 0], "cores": 18944}
    )
    result = run_suite(tmp_path, "test_figure", vendor="nvidia", env={"STACKCHECK_FAKE_NVML": b200})
    assert only(result)["metrics"][0]["verdict"] == "no_threshold"
    assert "thresholds/nvidia/B200.json" in only(result)["reason"]


def test_wrong_unit_is_an_error() -> None:
    script = "from harness.check import Check; Check(vendor='nvidia', model='H200').record("
    script += "'copy_gb_per_s', 4.2, unit='TB/s', gate=True)"
    ended = subprocess.run(
        [planting.SUITE_PYTHON, "-c", script],
        env={**os.environ, "PYTHONPATH": str(planting.TESTS / "acceptance")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "is recorded in 'TB/s' and its threshold is in 'GB/s'" in ended.stderr


def test_throttling_during_a_check_makes_it_invalid(tmp_path) -> None:
    state = json.dumps({"reasons": 0x40})
    result = run_suite(tmp_path, "test_after", vendor="nvidia", env={"STACKCHECK_FAKE_NVML": state})
    assert only(result)["outcome"] == "invalid"
    assert "hardware thermal" in only(result)["reason"]


def test_crashed_worker_fails_its_check_and_the_next_one_gets_another(tmp_path) -> None:
    result = run_suite(tmp_path, "", "-k", "crash or after")
    assert {check["id"]: check["outcome"] for check in result["checks"]} == {
        "test_planted.py::test_crash": "failed",
        "test_planted.py::test_after": "passed",
    }
    assert "SIGABRT" in result["checks"][0]["reason"]


def test_hung_worker_leaves_its_stack(tmp_path) -> None:
    check = only(run_suite(tmp_path, "test_hang"))
    assert check["outcome"] == "failed"
    assert "in hang" in check["reason"]
    assert list((tmp_path / "out" / "children").glob("worker-*/worker.stack.txt"))


def test_hung_rank_leaves_every_stack_and_no_process(tmp_path) -> None:
    started = time.monotonic()
    check = only(run_suite(tmp_path, "test_hung_rank"))
    assert check["outcome"] == "failed"
    assert "rank-001" in check["reason"]
    assert "program.py" in check["reason"]
    assert time.monotonic() - started < 90
    assert not _running(tmp_path / "program.py")


def test_dead_rank_fails_the_launch_with_its_words(tmp_path) -> None:
    assert "rank 1 gives up" in only(run_suite(tmp_path, "test_dead_rank"))["reason"]


def test_launch_without_its_json_line_fails(tmp_path) -> None:
    assert "ended without its JSON line" in only(run_suite(tmp_path, "test_silent_ranks"))["reason"]


def test_vendor_that_is_not_there_fails_every_check_at_once(tmp_path) -> None:
    state = json.dumps({"init": "driver_not_loaded"})
    started = time.monotonic()
    result = run_suite(tmp_path, "", vendor="nvidia", env={"STACKCHECK_FAKE_NVML": state})
    assert time.monotonic() - started < 30
    assert {check["outcome"] for check in result["checks"]} == {"failed"}
    reason = result["checks"][0]["reason"]
    assert reason.startswith("vendor nvidia was named and no NVIDIA device is visible")
    assert (result["exit"], result["state"]) == (1, "finished")


def test_invalid_is_its_own_outcome(tmp_path) -> None:
    assert only(run_suite(tmp_path, "test_invalid"))["outcome"] == "invalid"


def test_tier_leaves_out_later_checks_and_counts_them(tmp_path) -> None:
    result = run_suite(tmp_path, "test_late")
    assert result["checks"] == []
    assert result["selection"]["deselected"] == 1


@pytest.mark.healthy
def test_workers_of_xdist_report_into_one_file(tmp_path) -> None:
    pytest.importorskip("xdist")
    result = run_suite(tmp_path, "", "-n", "2", "-k", "figure or after or invalid or ranks and not silent")
    outcomes = {check["id"].rpartition("::")[2]: check["outcome"] for check in result["checks"]}
    expected = {
        "test_figure": "passed",
        "test_after": "passed",
        "test_invalid": "invalid",
        "test_ranks": "passed",
    }
    assert outcomes == expected, result["output"]
    assert result["selection"]["collected"] == 4


@pytest.mark.healthy
@pytest.mark.parametrize("workers", ["0", "2"])
def test_check_of_the_whole_run_comes_after_every_other_one(tmp_path, workers) -> None:
    result = run_suite(tmp_path, "", "-n", workers, "-k", "judges or slow or after or invalid")
    outcomes = {check["id"].rpartition("::")[2]: check["outcome"] for check in result["checks"]}
    assert outcomes.pop("test_judges_the_run") == "passed", result["output"]
    assert len(outcomes) == 3
    judged = next(check for check in result["checks"] if check["id"].endswith("judges_the_run"))
    assert judged["evidence"]["before"]
    assert judged["evidence"]["after"]


def test_check_that_never_ends_is_not_waited_for_without_end(tmp_path) -> None:
    ended = order.Ended(tmp_path / "ended")
    ended.add(0)
    assert ended.wait_for(1, stall_s=0.1)
    assert not ended.wait_for(2, stall_s=0.3)


def test_listener_that_cannot_start_is_known_as_gone(tmp_path) -> None:
    listener = Listener(tmp_path / "faults.jsonl")
    listener.start("no-such-vendor")
    heard = listener.heard()
    listener.stop()
    assert not heard.listening
    assert "no vendor" in heard.error


def test_listener_ends_with_the_run_that_started_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(planting.STUBS))
    listener = Listener(tmp_path / "faults.jsonl")
    listener.start("nvidia")
    assert listener.heard().listening
    listener.stop()
    assert not listener.heard().listening


def test_killed_run_says_that_it_is_running_or_crashed(tmp_path) -> None:
    result = run_suite(tmp_path, "", "-k", "no_such_check")
    assert result["checks"] == []
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    (tmp_path / "killer.py").write_text(f"def kill():\n    {code}\n", encoding="utf-8")
    suite = tmp_path / "tests" / "acceptance" / "test_killed.py"
    suite.write_text("import killer\n\ndef test_kill():\n    killer.kill()\n", encoding="utf-8")
    subprocess.run(
        [planting.SUITE_PYTHON, "-m", "pytest", str(suite),
         "--gpu-vendor", "cpu", "--result-dir", str(tmp_path / "killed"), "-p", "no:cacheprovider"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        check=False,
    )  # fmt: skip
    left = json.loads((tmp_path / "killed" / "result.json").read_text(encoding="utf-8"))
    assert left["state"] == "running"


def test_run_that_is_told_to_end_ends_its_children_and_says_so(tmp_path) -> None:
    run_suite(tmp_path, "", "-k", "no_such_check")  # plants the suite
    suite = tmp_path / "tests" / "acceptance" / "test_planted.py"
    run = subprocess.Popen(
        [planting.SUITE_PYTHON, "-m", "pytest", f"{suite}::test_hung_rank", "--gpu-vendor", "cpu",
         "--result-dir", str(tmp_path / "told"), "--lease-dir", str(tmp_path / "leases"),
         "-p", "no:cacheprovider"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not _running(tmp_path / "program.py") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _running(tmp_path / "program.py")
    run.terminate()
    run.wait(30)
    assert not _running(tmp_path / "program.py")
    assert json.loads((tmp_path / "told" / "result.json").read_text(encoding="utf-8"))["state"] == "crashed"


def test_naming_the_suites_without_a_vendor_is_a_usage_error(suite_python) -> None:
    command = [suite_python, "-m", "pytest", str(planting.TESTS / "acceptance"), "-p", "no:cacheprovider"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert "needs --gpu-vendor" in ended.stderr


def _running(program: Path) -> list[int]:
    return [
        int(folder.name)
        for folder in Path("/proc").iterdir()
        if folder.name.isdigit() and str(program).encode() in _cmdline(folder)
    ]


def _cmdline(folder: Path) -> bytes:
    try:
        return (folder / "cmdline").read_bytes()
    except OSError:
        return b""
