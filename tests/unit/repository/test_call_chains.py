"""Every function that a call chain of docs/architecture.md names exists, so a renamed one is found."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = (ROOT / "stackcheck", ROOT / "tests" / "acceptance")
SECTION = re.compile(r"^## Two paths.*?(?=^## )", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)
# `suite/results.read_result_file, .parse` names two functions of one module.
ENTRY = re.compile(
    r"(?:^ *|, )(?P<module>\w[\w/]*)\.(?P<first>\w+(\.\w+)?)(?P<others>(, \.\w+)*)", re.MULTILINE
)


def named(page: str) -> Iterator[tuple[str, str]]:
    """Module and function of each entry of the call chains."""
    for block in BLOCK.findall("".join(SECTION.findall(page))):
        for line in block.splitlines():
            for entry in ENTRY.finditer(re.split(r"(?<=\S)  ", line)[0]):
                owner = entry["first"].rpartition(".")[0]
                yield entry["module"], entry["first"]
                for other in entry["others"].split(", .")[1:]:
                    yield entry["module"], f"{owner}.{other}" if owner else other


def defined(module: str) -> set[str]:
    """The functions, classes and methods of a module: `load`, `Engine.connect`."""
    ends = (f"{module}.py", f"{module}/__init__.py")
    path = next((folder / end for folder in FOLDERS for end in ends if (folder / end).is_file()), None)
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body if path else ():
        names.add(getattr(node, "name", ""))
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


def missing(page: str) -> list[str]:
    """The entries that name nothing."""
    return sorted({f"{module}.{name}" for module, name in named(page) if name not in defined(module)})


def test_every_function_of_the_call_chains_exists() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert missing(page) == []
    assert len(set(named(page))) > 50


def test_a_renamed_function_is_found() -> None:
    lines = (
        "suite/results.read_result_file, .parsed   -> RunResult",
        "  engine/client.Engine.start",
        "gone/module.run",
    )
    page = "## Two paths\n```\n" + "\n".join(lines) + "\n```\n## Next\n"
    assert missing(page) == ["engine/client.Engine.start", "gone/module.run", "suite/results.parsed"]
