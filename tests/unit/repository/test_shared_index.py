"""tests/unit/shared/README.md says in one line what each module there gives; `make lists` writes it."""

import ast
import os
from pathlib import Path

SHARED = Path(__file__).resolve().parents[1] / "shared"
PAGE = SHARED / "README.md"
HEAD = """# What tests share

Each test imports these modules by their bare names. `make lists` writes this page from their first lines.

| module | what it gives |
|---|---|
"""


def index() -> str:
    """The page: a row for each module, with the first sentences of its docstring."""
    rows = []
    for path in sorted(SHARED.glob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        first = " ".join(docstring.split("\n\n")[0].split())
        rows.append(f"| `{path.stem}` | {first.replace('|', '&#124;')} |\n")
    return HEAD + "".join(rows)


def test_the_index_has_every_shared_module() -> None:
    if os.environ.get("STACKCHECK_WRITE_CHECKS"):
        PAGE.write_text(index(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == index(), "write it again: make lists"


def test_every_shared_module_says_what_it_gives() -> None:
    assert [line for line in index().splitlines() if line.endswith("|  |")] == []
