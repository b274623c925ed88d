"""Every command of train.py and its tools that a page names is one that they take."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import options
from by_path import module_at

ROOT = Path(__file__).parents[2]
PAGES = [path for path in sorted((ROOT / "docs").rglob("*.md")) if "trainers/" in path.read_text()]
BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHIM = """
said() { printf '%s\\0' "$@" END; }
python() { said "$@"; }
torchrun() { said "$@"; }
PATH=
"""


def commands(page: Path) -> list[list[str]]:
    """The words of each command of the page's blocks, as a shell makes them; no program is run."""
    found: list[list[str]] = []
    for block in BLOCK.findall(page.read_text()):
        if ("trainers/" not in block and "benchmarks/train" not in block) or "\u2026" in block:
            continue  # \u2026: the page leaves out words
        done = subprocess.run(["bash", "-c", SHIM + block], capture_output=True, text=True, check=False)
        words = done.stdout.split("\0")
        while "END" in words:
            at = words.index("END")
            found.append(words[:at])
            words = words[at + 1 :]
    return found


COMMANDS = [(page.relative_to(ROOT), words) for page in PAGES for words in commands(page)]


def parser_of(program: str) -> Any:
    """The argument parser of a program of this repository; None if it has none of its own."""
    make = getattr(module_at(ROOT / program, Path(program).stem + "_of_a_page"), "_parser", None)
    return make() if make else None


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda value: str(value)[:60])
def test_a_command_of_a_page_is_taken(
    page,  # noqa: ARG001 - it is in the name
    words,
    monkeypatch,
):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    program = next((word for word in words if word.startswith(("trainers/", "benchmarks/"))), None)
    if program is None:
        return  # a peer's
    given = words[words.index(program) + 1 :]
    if program == "trainers/train.py":
        options.parse(given)
        return
    parser = parser_of(program)
    if parser is None:
        return
    if program.endswith("table.py") and "--" in given:  # what follows is for train.py, beside a row's flags
        given = given[: given.index("--")]
    parsed = parser.parse_args(given)
    for setting in getattr(parsed, "settings", []):
        if not setting.isdigit():
            options.parse(setting.partition(":")[2].split())


def test_the_pages_name_commands_of_every_kind():
    said = json.dumps([words for _, words in COMMANDS])
    assert all(name in said for name in ("benchmarks/train.py", "training/table.py", "tools/handoff.py"))
    assert len(COMMANDS) > 10


PROGRAMS = [
    path.relative_to(ROOT)
    for path in sorted([*(ROOT / "trainers").rglob("*.py"), *(ROOT / "benchmarks/training").glob("*.py")])
    if 'if __name__ == "__main__"' in path.read_text()
]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_help_of_a_program_makes_nothing(program, tmp_path):
    done = subprocess.run(
        [sys.executable, "-B", ROOT / program, "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
    assert not list(tmp_path.iterdir())
