"""Each benchmark says what it takes and touches nothing, and its command on a page ends without an error."""

import re
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


BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(python3? benchmarks/[^`]+)`")
SHELL = """
said() { printf '%s\\0' "$@" END; }
python() { said "$@"; }
python3() { said "$@"; }
PATH=
"""
TAKEN = 77
DRY = f"""
import argparse, pathlib, runpy, sys
parse = argparse.ArgumentParser.parse_args
def taken(self, *arguments):
    parse(self, *arguments)
    sys.exit({TAKEN})
argparse.ArgumentParser.parse_args = taken
sys.argv = sys.argv[1:]
sys.path[0] = str(pathlib.Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def commands() -> list[list[str]]:
    """The words of each `python benchmarks/NAME.py …` of a page, as a shell makes them."""
    texts = [page.read_text() for page in sorted((ROOT / "docs").rglob("*.md"))]
    blocks = [
        block for text in texts for block in (*BLOCK.findall(text), *INLINE.findall(BLOCK.sub("", text)))
    ]
    # \u2026: the page leaves out words. A block of its own process each, as one may end its shell.
    named = [f"(\n{block}\n)" for block in blocks if "benchmarks/" in block and "\u2026" not in block]
    script = SHELL + "\n".join(named)
    made = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    said = [words.split("\0")[:-1] for words in made.stdout.split("END\0")]
    found = [words for words in said if words and words[0].startswith("benchmarks/")]
    # Those need torch: tests/trainers/test_commands.py has them.
    found = [words for words in found if not words[0].startswith("benchmarks/training/")]
    return [words for at, words in enumerate(found) if words not in found[:at]]


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
@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_command_of_a_page_is_taken(words: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-B", "-c", DRY, ROOT / words[0], *words[1:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == TAKEN, done.stderr
    assert not list(tmp_path.iterdir())


def test_pages_name_commands_of_benchmarks() -> None:
    assert len({words[0] for words in commands()}) >= 5
