"""Each benchmark says what it takes and touches nothing; the table of nccl-tests is read right."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from by_path import module_at
from waits import run_program

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
    done = run_program([sys.executable, *arguments], cwd=folder, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_help_says_what_a_benchmark_takes_and_makes_nothing(program, tmp_path):
    assert "usage:" in run(tmp_path, program, "--help")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_command_of_a_page_is_taken(words, tmp_path):
    done = run_program(
        [sys.executable, "-B", "-c", DRY, ROOT / words[0], *words[1:]], cwd=tmp_path, timeout=300
    )
    assert done.returncode == TAKEN, done.stderr
    assert not list(tmp_path.iterdir())


def test_pages_name_commands_of_benchmarks():
    assert len({words[0] for words in commands()}) >= 5


PROGRAM = Path(__file__).resolve().parents[3] / "benchmarks" / "collectives.py"
ASSETS = Path(__file__).parents[1] / "assets"


@pytest.fixture
def collectives():
    return module_at(PROGRAM, "benchmark_collectives")


def test_the_median_cycle_out_of_place_is_read(collectives):
    table = (ASSETS / "nccl-tests.txt").read_text(encoding="utf-8")
    assert collectives.parsed(table) == {65_536: 4.57, 16_777_216: 251.91}


def test_output_without_a_table_is_refused(collectives):
    with pytest.raises(SystemExit, match="no row"):
        collectives.parsed("Test NCCL failure common.cu:1279 'unhandled cuda error'")


def test_bandwidth_is_nccl_tests_definition(collectives):
    figure = {"op": "all_reduce", "moved": 65_536, "seconds": [21.51e-6]}
    assert collectives.busbw(figure, 4) == pytest.approx(4.57, rel=1e-3)
    assert collectives.busbw(figure | {"op": "all_gather"}, 4) == pytest.approx(2.285, rel=1e-3)


@pytest.mark.parametrize(
    ("size", "suite", "within"),
    [(65_536, 4.9, True), (65_536, 8.69, False), (16 << 20, 255.0, True), (16 << 20, 270.7, False)],
)
def test_goal_is_two_per_cent_of_large_and_ten_of_small_sizes(collectives, size, suite, within):
    theirs = 4.57 if size == 65_536 else 251.9
    line = collectives.Line("all_reduce", size, (suite,), (theirs,), (theirs,), (suite,))
    assert line.within is within
    assert ("met" if within else "missed") in collectives.table([line])


def test_launches_take_turns_and_their_medians_are_compared(collectives, monkeypatch):
    asked = []

    def run(command: list[str], **_: str) -> str:
        asked.append(Path(command[0]).name if "_perf" in command[0] else "suite")
        seconds = 16_777_216 * 0.75 / 1e9 / (200.0 if len(asked) == 1 else 100.0)
        modes = [
            {"op": "all_to_all", "bytes": 16_777_216, "moved": 16_777_216, "mode": m}
            for m in ("eager", "torch")
        ]
        figures = [mode | {"seconds": [seconds]} for mode in modes]
        row = "16777216 2097152 bfloat16 none -1 125.8 133.4 100.0 0 0 0 0 0 0"
        return row if "_perf" in command[0] else json.dumps({"figures": figures})

    monkeypatch.setattr(collectives, "run", run)
    rounds = [collectives.one_round(Path(), 4, "/torch/libnccl.so.2", ["all_to_all"]) for _ in range(3)]
    assert asked == ["suite", "alltoall_perf", "alltoall_perf"] * 3
    (line,) = collectives.compared(rounds)
    assert line.suite == pytest.approx((200.0, 100.0, 100.0))
    assert line.within
    assert "100 (100 to 200)" in collectives.table([line])
