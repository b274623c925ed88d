"""The queue of the slow test files: none waits behind another while a process is free, and none is lost."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
QUEUE = ROOT / ".ci" / "queue_files.py"
# Each test of a pair waits for what the other one writes.
PAIRED = """
import time
from pathlib import Path

def test_the_other_one_runs_too():
    Path({own!r}).touch()
    deadline = time.monotonic() + 100
    while not Path({other!r}).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
"""

LONG = """
import time
from pathlib import Path

def test_it():
    Path("up").touch()
    try:
        time.sleep(600)
    finally:
        Path("clean").touch()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def start(folder: Path, processes: int, *names: str) -> subprocess.Popen[str]:
    words = [sys.executable, str(QUEUE), str(processes), *names, "--", "-q", "-p", "no:cacheprovider"]
    return subprocess.Popen(
        words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def ended(folder: Path, processes: int, *names: str) -> tuple[int, list[str]]:
    process = start(folder, processes, *names)
    out, _ = process.communicate(timeout=200)
    return process.returncode, out.splitlines()


def test_a_file_goes_to_whoever_is_free_and_not_behind_the_only_test_of_another(folder: Path) -> None:
    """Of four files two wait for each other: the last one, and the one that the first process took."""
    pair = folder / "test_a.py", folder / "test_d.py"
    for path, other in (pair, pair[::-1]):
        path.write_text(PAIRED.format(own=str(path.with_suffix(".up")), other=str(other.with_suffix(".up"))))
    for name in ("test_b.py", "test_c.py"):
        (folder / name).write_text("def test_short(): pass\n")
    code, lines = ended(folder, 2, "test_a.py", "test_b.py", "test_c.py", "test_d.py")
    assert code == 0, lines
    assert lines[-1].startswith("4 passed in ")


def test_one_failure_is_the_failure_of_all_and_each_test_is_counted_once(folder: Path) -> None:
    (folder / "test_a.py").write_text("def test_it(): assert False\ndef test_other(): pass\n")
    (folder / "test_b.py").write_text("import pytest\ndef test_it(): pytest.skip('why')\n")
    (folder / "test_c.py").write_text("def broken(:\n")
    code, lines = ended(folder, 2, "test_a.py", "test_b.py", "test_c.py")
    assert code == 1
    assert lines[-1].startswith("1 failed, 1 passed, 1 skipped, 1 error in ")
    assert [line for line in lines if " passed" in line and " in " in line] == [lines[-1]]
    assert [line.split(" - ")[0] for line in lines if line.startswith("FAILED")] == [
        "FAILED test_a.py::test_it"
    ]


def test_a_file_without_such_tests_is_a_failure(folder: Path) -> None:
    (folder / "test_a.py").write_text("")
    assert ended(folder, 1, "test_a.py")[0] == 1


def test_who_interrupts_it_lets_tests_clean_up_and_begins_no_other_file(folder: Path) -> None:
    (folder / "test_a.py").write_text(LONG)
    (folder / "test_b.py").write_text("from pathlib import Path\ndef test_it(): Path('begun').touch()\n")
    process = start(folder, 1, "test_a.py", "test_b.py")
    deadline = time.monotonic() + 120
    while not (folder / "up").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT
    assert (folder / "clean").exists()
    assert not (folder / "begun").exists()


def test_the_order_names_files_that_there_are() -> None:
    spec = importlib.util.spec_from_file_location("queue_files", QUEUE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    there = {path.stem for path in (ROOT / "tests" / "integration").glob("test_*.py")}
    assert set(module.LONGEST) <= there
    order = module.Queue(1, ["unit/test_x.py", "a/test_nightly.py", "a/test_fleet_slurm.py"], []).waiting
    assert order == ["a/test_fleet_slurm.py", "a/test_nightly.py", "unit/test_x.py"]
