"""docs/guides/write-a-check.md, followed word by word: its check passes, and can fail."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from waits import run_program

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "guides" / "write-a-check.md"
BLOCK = re.compile(r"^```(python|sh)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PYTHON = os.environ.get("STACKCHECK_SUITE_PYTHON", sys.executable)

needs_torch = pytest.mark.skipif(
    subprocess.run([PYTHON, "-c", "import torch, pytest"], capture_output=True, check=False).returncode != 0,
    reason="the suites need torch: name a Python that has it with STACKCHECK_SUITE_PYTHON",
)


def blocks() -> list[tuple[str, str, str]]:
    return BLOCK.findall(PAGE.read_text(encoding="utf-8"))


@pytest.fixture
def followed(tmp_path) -> Path:
    """The suites with the files of the page; the other faults are left out, as the page's command does."""
    ignored = shutil.ignore_patterns("unit", "integration", "__pycache__")
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=ignored)
    shutil.copytree(ROOT / "trainers", tmp_path / "trainers")
    for kind, name, text in blocks():
        if kind == "python":
            (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def ran(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    stackcheck = f"{sys.executable} -m stackcheck"
    environment = {**os.environ, "STACKCHECK_SUITE_PYTHON": PYTHON, "PYTHONPATH": str(ROOT)}
    return run_program(
        ["sh", "-c", re.sub(r"^stackcheck", stackcheck, line)], cwd=folder, env=environment, timeout=600
    )


def test_the_page_has_its_files_and_commands():
    assert [(kind, name) for kind, name, _ in blocks()] == [
        ("python", "tests/acceptance/workloads/sorting.py"),
        ("python", "tests/acceptance/test_sort.py"),
        ("sh", "run"),
        ("python", "tests/faults/test_sort_faults.py"),
        ("sh", "run"),
    ]


@needs_torch
def test_the_check_of_the_page_passes(followed):
    (line, _) = [text.strip() for kind, _, text in blocks() if kind == "sh"]
    done = ran(line, followed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@needs_torch
@pytest.mark.slow
def test_the_fault_of_the_page_is_caught_by_its_check(followed):
    (_, line) = [text.strip() for kind, _, text in blocks() if kind == "sh"]
    done = ran(f"{line} --root {followed}", followed)
    assert "1 fault planted, 1 caught; 1 healthy run, 0 false alarms; 1 of 1 check shown to fail" in (
        done.stdout
    ), done.stdout + done.stderr
    assert done.returncode == 0
