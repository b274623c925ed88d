"""Test runs that go on beside each other have no folder in common: what one removes, no other needs."""

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import scripted
from waits import run_program

CI = scripted.ROOT / ".ci"
# Writes where its folder is, then ends as it is told.
SAY = "import sys; print(sys.argv[1]); sys.exit(int(sys.argv[2]))"


def stage(root: Path, word: str, code: int) -> Path:
    """The folder of one stage that ends with this code."""
    program = [sys.executable, root / ".ci" / "stage.py", "one", sys.executable, "-c", SAY]
    done = subprocess.run([*program, word, f"{code}"], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return Path((root / "build" / "logs" / "one.log").read_text().strip())


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    for folder in (".ci", "build/logs", "tmp"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / ".ci" / "stage.py").write_text((CI / "stage.py").read_text())
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    return tmp_path


@pytest.mark.parametrize("word", ["{folder}", "{memory}"])
def test_a_stage_has_a_folder_of_its_own_that_stays_only_if_it_failed(root, word):
    first, second = stage(root, word, 3), stage(root, word, 3)
    assert first != second
    first.rmdir()
    second.rmdir()
    assert not stage(root, word, 0).exists()


def test_a_pytest_that_removes_what_passed_shares_its_folder_with_no_other():
    made = run_program(["make", "-n", "-f", CI / "stages.mk", "usual", "slow"], cwd=scripted.ROOT, check=True)
    scripts = [path.read_text() for path in CI.iterdir() if path.is_file() and path.name != "stages.mk"]
    lines = "\n".join([made.stdout, *scripts]).replace("\\\n", " ").splitlines()
    removing = [line for line in lines if "retention_policy=failed" in line]
    assert len(removing) > 5  # the stages outside of the image
    assert [line for line in removing if "--basetemp" not in line] == []


@pytest.mark.parametrize(
    ("said", "of_part", "failed"),
    [
        ("....s. [ 23%]", "..", False),
        ("", "", False),
        ("..F.. [ 23%]", "", True),
        ("E", "", True),
        ("FAILED tests/test_one.py::test_it", "", True),
        ("...", "..F [ 99%]", True),
    ],
)
def test_a_stage_that_did_not_end_has_failed_if_a_test_of_it_or_of_a_part_had(
    tmp_path, said, of_part, failed
):
    spec = importlib.util.spec_from_file_location("stage", CI / "stage.py")
    assert spec
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    (tmp_path / "one.log").write_text(said)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "part.log").write_text(of_part)
    (tmp_path / "one" / "earlier.log").write_text("F")
    os.utime(tmp_path / "one" / "earlier.log", (1, 1))
    assert module.has_failed(tmp_path / "one.log", time.time() - 60) is failed


@pytest.mark.parametrize(("said", "seconds", "code", "word"), [("F", 10, 1, "FAILED"), ("..", 3, 0, "left")])
def test_the_clock_ends_a_stage(root, said, seconds, code, word):
    waiting = "import sys, time; print(sys.argv[1], flush=True); time.sleep(60)"
    program = [sys.executable, root / ".ci" / "stage.py", "one", sys.executable, "-c", waiting, said]
    assert ended_by_the_clock(program, seconds) == (code, word)
    told = summary(root)
    assert told.returncode == code
    assert ("there was no time to end: one" in told.stdout) is (code == 0)


def test_what_has_no_time_does_not_begin(root):
    made = root / "made"
    program = [sys.executable, root / ".ci" / "stage.py", "one", "touch", made]
    assert ended_by_the_clock(program, -1) == (0, "left")
    assert not made.exists()
    assert "there was no time to end: one" in summary(root).stdout


@pytest.mark.parametrize("given", ["soon", "", "nan", "-5", "1e9"])
def test_a_time_that_is_none_is_an_error_and_nothing_begins(root, given):
    made = root / "made"
    program = [sys.executable, root / ".ci" / "stage.py", "one", "touch", made]
    variables = {**os.environ, "STACKCHECK_TESTS_END": given}
    done = subprocess.run(program, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: STACKCHECK_TESTS_END is {given!r}, expected seconds since 1970")
    assert not made.exists()


def ended_by_the_clock(program: list[object], seconds: float) -> tuple[int, str]:
    """The exit code and the first word of a stage that has so much time."""
    variables = {**os.environ, "STACKCHECK_TESTS_END": f"{time.time() + seconds:.0f}"}
    words = [str(word) for word in program]
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=False, timeout=300)
    return done.returncode, done.stdout.split()[0]


def summary(root: Path) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, root / ".ci" / "stage.py", "--summary", "all", "0", "9"]
    return subprocess.run(program, capture_output=True, text=True, check=False)
