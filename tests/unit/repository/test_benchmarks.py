"""Each benchmark says what it takes and touches nothing, and its command on a page ends without an error."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAMS = [
    path
    for path in sorted((ROOT / "benchmarks").glob("*.py"))
    if 'if __name__ == "__main__"' in path.read_text()
]


def run(folder: Path, *arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_help_says_what_a_benchmark_takes_and_makes_nothing(program: Path, tmp_path: Path) -> None:
    assert "usage:" in run(tmp_path, program, "--help")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command_of_the_matrix_page_makes_each_of_its_figures(tmp_path: Path) -> None:
    assert "figures can be made" in run(tmp_path, ROOT / "benchmarks/matrix.py", "--dry-run")
