"""Test runs that go on beside each other have no folder in common: what one removes, no other needs."""

import os
import subprocess
import sys
import time
from pathlib import Path

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


WAITING = "import sys, time; print(sys.argv[1], flush=True); time.sleep(60)"


@pytest.mark.parametrize(
    ("said", "code"),
    [("....s. [ 23%]", 0), ("", 0), ("..F.. [ 23%]", 1), ("E", 1), ("FAILED tests/test_one.py::test_it", 1)],
)
def test_what_the_clock_ends_failed_only_if_a_test_of_it_had(root, said, code):
    """One that has no time at all is ended as well."""
    for seconds in (2, -60):
        program = [sys.executable, root / ".ci" / "stage.py"]
        variables = {**os.environ, "STACKCHECK_TESTS_END": f"{time.time() + seconds}"}
        slow = [*program, "one", sys.executable, "-c", WAITING, said]
        done = subprocess.run(slow, env=variables, capture_output=True, text=True, check=False, timeout=50)
        if seconds > 0:
            assert done.returncode == code
            assert done.stdout.startswith("FAILED" if code else "left")
        else:
            assert done.stdout.startswith("left")
    told = subprocess.run(
        [*program, "--summary", "all", "0", "9"], capture_output=True, text=True, check=False
    )
    assert told.returncode == code
    assert "there was no time to end: one" in told.stdout
