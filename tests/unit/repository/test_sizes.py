"""What ships is short: modules up to 400 lines, functions up to 60, without exceptions."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = ("stackcheck", "trainers", "tests/acceptance")
MODULE_LINES, FUNCTION_LINES = 400, 60


def too_long(path: Path) -> Iterator[str]:
    """The module if it is too long, and each function that is; decorators do not count."""
    text = path.read_text(encoding="utf-8")
    lines = len(text.splitlines())
    if lines > MODULE_LINES:
        yield f"{path}: {lines} lines, at most {MODULE_LINES}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES}"


@pytest.mark.parametrize("folder", SHIPPED)
def test_modules_and_functions_are_short(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    assert [found for path in paths for found in too_long(path)] == []


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("x = 1\n" * MODULE_LINES, 0),
        ("x = 1\n" * (MODULE_LINES + 1), 1),
        ("def one():\n" + "    x = 1\n" * (FUNCTION_LINES - 1), 0),
        ("def one():\n" + "    x = 1\n" * FUNCTION_LINES, 1),
        ("class A:\n  async def one(self):\n" + "    x = 1\n" * FUNCTION_LINES, 1),
    ],
)
def test_what_is_too_long_is_found(tmp_path: Path, text: str, problems: int) -> None:
    path = tmp_path / "module.py"
    path.write_text(text)
    assert len([*too_long(path)]) == problems
