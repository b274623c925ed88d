"""What the Markdown pages point to exists: relative links, their headings, and paths in backticks."""

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
def test_what_a_page_points_to_exists(page: Path) -> None:
    assert [*broken_links(page), *missing_paths(page, ROOT)] == []


def test_the_readme_is_short() -> None:
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
def test_a_wrong_pointer_is_found(tmp_path: Path, line: str) -> None:
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
def test_a_right_pointer_is_accepted(tmp_path: Path, line: str) -> None:
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text(f"## A heading: of two & words\n{line}\n")
    assert [*broken_links(page), *missing_paths(page, tmp_path)] == []
