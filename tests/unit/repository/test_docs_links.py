"""Pages and docstrings: what they point to exists, and the first sentences of what ships are plain."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = (
    ".",
    ".github",
    "docs",
    "docs/guides",
    "docs/reference",
    "docs/results",
    "images",
    "benchmarks",
    "stackcheck",
    "tests",
    "trainers",
)
PLACES = ("docs", "images", "stackcheck", "tests", "trainers", "benchmarks", ".ci", ".github")
README_LINES = 100
_CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_INLINE_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
_NO_PATH = re.compile(r"[<>{}…:\s]|(^|/)[A-Z]+(/|$)")  # images/<stack-id>/, build/STACK, an image's name


def anchor(heading: str) -> str:
    """A heading as the hosting site names it in a link."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")


def broken_links(page: Path) -> Iterator[str]:
    """Each relative link of a page that leads nowhere."""
    text = _CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))
    for link in _LINK.findall(_INLINE_CODE.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, fragment = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists():
            yield f"{page.name}: {link} does not exist"
        elif fragment and fragment not in map(anchor, _HEADING.findall(target.read_text(encoding="utf-8"))):
            yield f"{page.name}: {link} names no heading of {target.name}"


def missing_paths(page: Path, root: Path) -> Iterator[str]:
    """Each repository path in backticks that does not exist; `*` matches as in a shell."""
    text = _CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))
    for code in _INLINE_CODE.findall(text):
        path = code.partition("::")[0]
        if path.partition("/")[0] not in PLACES or "/" not in path or _NO_PATH.search(path):
            continue
        if not any(root.glob(path.rstrip("/"))):
            yield f"{page.name}: `{code}` does not exist"


def pages(root: Path) -> list[Path]:
    """The Markdown pages of the repository."""
    return sorted(page for place in PAGES for page in (root / place).glob("*.md"))


@pytest.mark.parametrize("page", pages(ROOT), ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_points_to_exists(page):
    assert [*broken_links(page), *missing_paths(page, ROOT)] == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < README_LINES


@pytest.mark.parametrize(
    "line",
    [
        "see [the matrix](matrix.md)",
        "see [the matrix](../nowhere/)",
        "see [below](#not-a-heading)",
        "see [the page](page.md#not-a-heading)",
        "see `docs/reference/matrix.md`",
        "see `tests/unit/*.py`",
        "see `tests/unit/test_matrix.py::test_one`",
    ],
)
def test_a_wrong_pointer_is_found(tmp_path, line):
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text(f"# A heading\n{line}\n")
    assert len([*broken_links(page), *missing_paths(page, tmp_path)]) == 1


@pytest.mark.parametrize(
    "line",
    [
        "see [below](#a-heading-of-two--words)",
        "see [elsewhere](https://example.org/nowhere.md)",
        "see `docs/page.md`, `docs/*.md`, `images/<stack-id>/Dockerfile` and `build/STACK/sbom.json`",
        "```\n[not a link](nowhere.md)\n```",
    ],
)
def test_a_right_pointer_is_accepted(tmp_path, line):
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text(f"## A heading: of two & words\n{line}\n")
    assert [*broken_links(page), *missing_paths(page, tmp_path)] == []


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
def test_docstrings_are_plain(folder):
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
def test_what_is_not_plain_is_found(tmp_path, place, text, problems):
    path = tmp_path / "module.py"
    path.write_text(place.format(repr(text)))
    assert len([*unplain(path)]) == problems


@pytest.mark.parametrize(("between", "problems"), [("\n        ", 0), (" ", 1)])
def test_two_parameters_on_a_line_are_found(tmp_path, between, problems):
    path = tmp_path / "module.py"
    entries = f"name: One.{between}unit: The bound's."
    path.write_text(f'def a(name, *, unit):\n    """Record.\n\n    Args:\n        {entries}\n    """')
    assert len([*unplain(path)]) == problems
