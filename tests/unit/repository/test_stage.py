"""Stages of the test run: one line each, a failure with its log and its command, and one summary."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

STAGE = Path(__file__).resolve().parents[3] / ".ci" / "stage.py"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The program in a checkout of its own: its logs go there."""
    (tmp_path / ".ci").mkdir()
    copied = Path(shutil.copy(STAGE, tmp_path / ".ci"))
    call(copied, "--start")
    return copied


def call(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_a_stage_that_passes_is_one_line_with_pytests_closing_line(program: Path) -> None:
    done = call(program, "unit tests", "echo", "noise\n5 passed, 2 skipped in 1.25s")
    assert done.returncode == 0
    (line,) = done.stdout.splitlines()
    assert line.startswith("ok      unit tests ")
    assert line.endswith("5 passed, 2 skipped in 1.25s")
    assert "noise" in (program.parents[1] / "build" / "logs" / "unit-tests.log").read_text()


@pytest.mark.parametrize(
    ("output", "closing"),
    [
        ("[ 9.0 s] cpu: PASSED, 3  of 4 checks passed\n  next: verify", "PASSED, 3 of 4 checks passed"),
        ("error: the image cannot be built", "error: the image cannot be built"),
    ],
)
def test_a_stage_without_pytest_may_choose_its_closing_line(program: Path, output: str, closing: str) -> None:
    done = call(program, "--closing", r"[A-Z]+, \d+ .*", "suites", "echo", output)
    assert re.fullmatch(rf"ok +suites +\d+ s  cpu +\d+ s  {closing}\n", done.stdout), done.stdout


def test_a_stage_says_how_long_its_processes_computed_and_the_summary_how_long_all_did(program: Path) -> None:
    compute = "import time\nwhile time.process_time() < 1.5: pass"
    done = call(program, "computes", "sh", "-c", f"{sys.executable} -c '{compute}'; echo ended")
    assert re.fullmatch(r"ok +computes +\d+ s  cpu +[2-5] s  ended\n", done.stdout), done.stdout
    waits = call(program, "waits", "sleep", "2")
    assert re.fullmatch(r"ok +waits +[2-9] s  cpu +0 s\n", waits.stdout), waits.stdout
    summary = call(program, "--summary", "make test", "0").stdout
    machine = re.search(
        r"2 stages in .* \(the machine's processors: (?:(\d+) min )?(\d+) s\); tests", summary
    )
    assert machine, summary
    assert 60 * int(machine[1] or 0) + int(machine[2]) >= 2, summary


def test_a_stage_that_fails_names_what_failed_the_command_that_repeats_it_and_the_log(program: Path) -> None:
    script = "echo FAILED tests/x.py::test_y; echo noise; echo 1 failed, 4 passed in 2.00s; exit 3"
    done = call(program, "x", "sh", "-c", script)
    assert done.returncode == 3
    assert done.stdout.startswith("FAILED  x ")
    assert "FAILED tests/x.py::test_y" in done.stdout
    assert "noise" not in done.stdout.partition("repeat:")[0]
    assert f"repeat: sh -c '{script}'" in done.stdout
    assert "log: build/logs/x.log" in done.stdout


def test_the_summary_counts_the_tests_of_every_stage(program: Path) -> None:
    call(program, "one", "echo", "5 passed, 2 skipped in 1.25s")
    call(program, "two", "echo", "== 3 passed, 1 deselected in 61.00s (0:01:01) ==")
    done = call(program, "--summary", "make test", "0")
    assert done.returncode == 0
    assert done.stdout.startswith("make test: ok; 2 stages in ")
    assert done.stdout.endswith("tests: 8 passed, 0 failed, 2 skipped\n")


def test_the_summary_of_a_failed_stage_names_it_and_fails(program: Path) -> None:
    call(program, "one", "sh", "-c", "echo 1 failed, 1 error in 0.10s; exit 1")
    done = call(program, "--summary", "make test", "0")
    assert done.returncode == 1
    assert "FAILED: one" in done.stdout
    assert "0 passed, 2 failed, 0 skipped" in done.stdout


@pytest.mark.parametrize(("stages", "ended"), [((), "0"), (("true",), "1")])
def test_a_run_of_which_a_part_did_not_run_is_not_ok(
    program: Path, stages: tuple[str, ...], ended: str
) -> None:
    for stage in stages:
        call(program, stage, stage)
    done = call(program, "--summary", "make test", ended)
    assert done.returncode == 1
    assert "FAILED: not every stage ran" in done.stdout


def test_a_command_that_is_not_there_or_is_killed_fails(program: Path) -> None:
    assert call(program, "killed", "sh", "-c", "kill -9 $$").returncode == 128 + 9
    assert call(program, "absent", "/no/such/program").returncode == 127
    assert "FAILED: killed, absent" in call(program, "--summary", "make test", "0").stdout
