"""Faults of processes: what a crash, a hang or a killed run leaves behind and reports."""

# ruff: noqa: E501 - a table of faults reads in rows
import json
import os
import subprocess
import time
from pathlib import Path

import pytest

import planting
from harness import launch
from planted_suite import only, run_suite
from test_training_faults import SHORT

pytestmark = [pytest.mark.catches("the harness"), pytest.mark.usefixtures("suite_python")]


def test_crashed_worker_fails_its_check_and_the_next_one_gets_another(tmp_path):
    result = run_suite(tmp_path, "", "-k", "crash or after")
    assert {check["id"]: check["outcome"] for check in result["checks"]} == {
        "test_planted.py::test_crash": "failed",
        "test_planted.py::test_after": "passed",
    }
    assert "SIGABRT" in result["checks"][0]["reason"]


@pytest.mark.waits
def test_hung_worker_leaves_its_stack(tmp_path):
    check = only(run_suite(tmp_path, "test_hang"))
    assert check["outcome"] == "failed"
    assert "in hang" in check["reason"]
    assert list((tmp_path / "out" / "children").glob("worker-*/worker.stack.txt"))


@pytest.mark.waits
def test_hung_rank_leaves_every_stack_and_no_process(tmp_path):
    started = time.monotonic()
    check = only(run_suite(tmp_path, "test_hung_rank"))
    assert check["outcome"] == "failed"
    assert "rank-001" in check["reason"]
    assert "program.py" in check["reason"]
    assert time.monotonic() - started < 240  # it would sleep for 600 s
    assert not _running(tmp_path / "program.py")


def test_dead_rank_fails_the_launch_with_its_words(tmp_path):
    assert "rank 1 gives up" in only(run_suite(tmp_path, "test_dead_rank"))["reason"]


def test_words_of_a_dead_rank_are_not_lost_behind_what_torchrun_says(tmp_path):
    own = "E1121 12:06:08.562000 11831 torch/distributed/elastic/multiprocessing/api.py:1002] failed"
    stderr = tmp_path / "stderr.txt"
    stderr.write_text("\n".join(["rank 1 gives up", own, *["a line of torchrun's"] * 60, "rank : 1"]))
    said = launch.last_output(stderr)
    assert said.startswith("rank 1 gives up\n")
    assert said.endswith("rank : 1")


def test_launch_without_its_json_line_fails(tmp_path):
    assert "ended without its JSON line" in only(run_suite(tmp_path, "test_silent_ranks"))["reason"]


def test_killed_run_says_that_it_is_running_or_crashed(tmp_path):
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


def test_run_that_is_told_to_end_ends_its_children_and_says_so(tmp_path):
    run_suite(tmp_path, "", "-k", "no_such_check")  # plants the suite
    suite = tmp_path / "tests" / "acceptance" / "test_planted.py"
    run = subprocess.Popen(
        [planting.SUITE_PYTHON, "-m", "pytest", f"{suite}::test_hung_rank", "--gpu-vendor", "cpu",
         "--result-dir", str(tmp_path / "told"), "--lease-dir", str(tmp_path / "leases"),
         "-p", "no:cacheprovider"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    told = tmp_path / "told"
    deadline = time.monotonic() + 120
    while not list(told.glob("children/launch-*/rank-*.pid")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(_running(told)) > 1, "expected torchrun and its rank beside the server"
    run.terminate()
    run.wait(120)
    assert not _running(told)
    assert json.loads((told / "result.json").read_text(encoding="utf-8"))["state"] == "crashed"


def _running(results: Path) -> list[int]:
    """The children of a run: their environment names its folder."""
    return [
        int(folder.name)
        for folder in Path("/proc").iterdir()
        if folder.name.isdigit() and str(results).encode() in _environ(folder)
    ]


def _environ(folder: Path) -> bytes:
    try:
        return (folder / "environ").read_bytes()
    except OSError:
        return b""


LATER = {
    "harness.server_main:_asked_device": "(lambda seen: lambda: "
    "seen.append(1) or ('asked' if len(seen) > 1 else None))([])",
    # On a busy machine every launch may come before the next module: one is loaded after each.
    "harness.server_main:_Server._forked": "lambda self, fds: "
    "(become := original(self, fds), self._load('no_module') if become is None else 0)[0]",
}


@pytest.mark.parametrize(
    ("check", "patch", "said"),
    [
        # /dev/null, which every child has open, stands for a device.
        pytest.param("test_collectives.py::test_all_reduce_values", {"harness.server_main:MEMORY": "-1"}, "loading torch opened /dev/null", id="opened"),
        pytest.param(
            "test_collectives.py::test_all_reduce_values",
            {"harness.server_main:_asked_device": "lambda: 'asked'"},
            "loading torch asked",
            marks=pytest.mark.slow,  # the way from there on is that of "opened"
            id="asked",
        ),
        pytest.param("test_training.py::test_resume_is_bit_equal", {**LATER, **SHORT}, "loading torch asked", marks=pytest.mark.slow, id="later"),
    ],
)  # fmt: skip
def test_children_are_started_anew_and_the_run_says_so_if_loading_torch_touched_a_device(
    check, patch, said, plant
):
    result = plant(planting.Fault("nothing", check, outcome="passed", tier="smoke", patches=patch))
    assert f"RuntimeWarning: children are not forked, because {said}" in result["output"]
