"""Docstrings of what ships are plain: the first sentence ends on its line, and no word is hard to read."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = ("stackcheck", "trainers", "tests/acceptance")
ENDED = re.compile(r"""[.:?][)\]}`"'*]*$""")
UNPLAIN = re.compile(
    r"\b(ours|theirs|told|whoever|another \w+ than|of (today|then)|so (many|much)|is none|as many)\b",
    re.IGNORECASE,
)
# A reader of one docstring cannot know which noun stands for it, or has to look at another place.
NO_NOUN = re.compile(r"^(Its|They|It|Those (that|with)|As a reader|As [\w.]+\.)(\s|$)")


def unplain(path: Path) -> Iterator[str]:
    """What is wrong with the docstrings of a module. Words of one phrase may stand on two lines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if not text:
            continue
        where = f"{path}:{node.body[0].lineno}"
        if not ENDED.search(first := text.splitlines()[0]):
            yield f"{where}: {first!r} does not end a sentence: shorten it, or go on in a second one"
        if opening := NO_NOUN.match(first):
            yield f"{where}: begin with a noun or a verb in place of {opening[1]!r}"
        for found in UNPLAIN.finditer(" ".join(text.split())):
            yield f"{where}: say {found[0]!r} in plain words, and write the value as `None`"
        for name in _joined(node, text):
            yield f"{where}: begin a line with the entry {name!r}"


def _joined(node: ast.AST, text: str) -> Iterator[str]:
    """The parameters whose entry in `Args:` follows another entry on its line."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        entries = text.partition("\nArgs:\n")[2]
        for given in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            if re.search(rf"\. +{given.arg}: ", entries):
                yield given.arg


@pytest.mark.parametrize("folder", SHIPPED)
def test_docstrings_are_plain(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    assert [found for path in paths for found in unplain(path)] == []


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("The digest.", 0),
        ("The digest (`sha256`, see `of`.)", 0),
        ('Whether it is "new?"', 0),
        ("The keys:\none a line.", 0),
        ("The digest of a file\nthat exists.", 1),
        ("The digest", 1),
        ("`None` if the result is `None`.", 0),
        ("A path of a file of ours.", 1),
        ("Its tensors, in order.", 1),
        ("Those that the options name.", 1),
        ("Those two layers of a block.", 0),
        ("As Job.", 1),
        ("As many as fit: no more.", 1),
        ("The bytes; Is None at the end.", 1),
        ("Read.\n\nAt most so\nmany bytes of another file than this.", 2),
    ],
)
@pytest.mark.parametrize("place", ["{}", "class A:\n    {}", "async def a():\n    {}"])
def test_what_is_not_plain_is_found(tmp_path: Path, place: str, text: str, problems: int) -> None:
    path = tmp_path / "module.py"
    path.write_text(place.format(repr(text)))
    assert len([*unplain(path)]) == problems


@pytest.mark.parametrize(("between", "problems"), [("\n        ", 0), (" ", 1)])
def test_two_parameters_on_a_line_are_found(tmp_path: Path, between: str, problems: int) -> None:
    path = tmp_path / "module.py"
    entries = f"name: One.{between}unit: The bound's."
    path.write_text(f'def a(name, *, unit):\n    """Record.\n\n    Args:\n        {entries}\n    """')
    assert len([*unplain(path)]) == problems
