"""Each claim of the two AMD pages names what holds it: a test that exists, a page, or a public source.

A claim is a paragraph, an item of a list or a row of a table. A list may be held by the paragraph before
it, and a table only if `make lists` writes it, or if its rows are steps that a list goes through. "What
never ran" is exempt: an absence has neither.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = (ROOT / "docs/reference/amd.md", ROOT / "docs/guides/first-amd-host.md")
TESTS = {path.name: path for path in (ROOT / "tests").rglob("*.py")}
EXEMPT = "What never ran"

_TEST = re.compile(r"(test_\w*\.py)(?:::(\w+))?")
# A link to another page than these two, an issue, a file of data whose rows have sources, AMD's data sheets,
# a source of the kernel.
_SOURCE = re.compile(
    r"\]\((?!#|[^)]*(?:/|\b)(?:amd|first-amd-host)\.md)[^)]+\)|\b[\w-]+/[\w.-]+#\d+|https://"
    r"|`(?:devices|drivers|known-issues)\.\w+`|[Dd]ata sheets?"
    r"|\b(?:amdgpu|mce|amd)_\w+\.[ch]\b"
)
_GENERATED = re.compile(
    r"<!-- (?!end).*?<!-- end.*?-->", re.DOTALL
)  # another test compares it with its sources
_STEP = re.compile(r"\| \d+\. ")
_ITEM = re.compile(r"\||- |\d+\. ")


def claims(text: str) -> Iterator[tuple[str, str]]:
    """Each claim, and the paragraph that introduces it; code and the heads of tables are none."""
    for section in re.split(r"^(?=#+ )", _GENERATED.sub("", text), flags=re.MULTILINE):
        heading, _, body = section.partition("\n")
        if heading.strip("# ") == EXEMPT:
            continue
        lead = ""
        for block in re.split(r"\n\s*\n", body):
            if block.startswith("    ") or not block.strip():
                continue
            lines = block.strip("\n").splitlines()
            parts = [line for line in lines if _ITEM.match(line)]
            if not parts:
                lead = block
            before = "\n".join(lines[: lines.index(parts[0])]) if parts else ""
            lead = before or lead
            yield from ((part, lead) for part in _parts(lines))


def _parts(lines: list[str]) -> Iterator[str]:
    part: list[str] = []
    for number, line in enumerate(lines):
        if _ITEM.match(line) and part:
            yield "\n".join(part)
            part = []
        head = any(set(near) <= set("|- ") for near in (line, *lines[number + 1 : number + 2]))
        if not (line.startswith("|") and head):
            part.append(line)
    if part:
        yield "\n".join(part)


def is_held(text: str) -> bool:
    """Whether a text names a test that exists, or a source."""
    return bool(_SOURCE.search(text)) or any(
        (path := TESTS.get(file)) and (not name or f"def {name}(" in path.read_text(encoding="utf-8"))
        for file, name in _TEST.findall(text)
    )


def unheld(text: str) -> list[str]:
    """The claims without a test or a source."""
    return [
        claim
        for claim, lead in claims(text)
        if not is_held(claim) and not _STEP.match(claim) and (claim.startswith("|") or not is_held(lead))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_claim_has_a_test_or_a_source(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(list(claims(text))) > 20
    assert unheld(text) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    named = _TEST.findall(page.read_text(encoding="utf-8"))
    gone = [(file, name) for file, name in named if not is_held(f"{file}::{name}" if name else file)]
    assert gone == []


@pytest.mark.parametrize(
    "claim",
    [
        "It works.",
        "- It works (`test_no_such_file.py`).",
        "| a | works |",
        "`test_sizes.py::test_gone`",
        "The other page says so ([amd.md](../reference/amd.md)).",
        "It works ([above](#page)).",
    ],
)
def test_a_claim_without_either_is_found(claim: str) -> None:
    assert unheld(f"# Page\n\nHeld by `test_sizes.py`.\n\n## Part\n{claim}\n") == [claim]


def test_a_list_is_held_by_the_paragraph_before_it_and_a_row_of_a_table_by_itself() -> None:
    assert unheld("# Page\n`test_sizes.py` reads:\n\n- a\n- b\n") == []
    table = "# Page\n`test_sizes.py` reads:\n\n| a | b |\n|---|---|\n| c | d |\n| e | `test_sizes.py` |\n"
    assert unheld(table) == ["| c | d |"]


def test_every_step_of_the_first_hour_says_what_tests_it() -> None:
    text = PAGES[1].read_text(encoding="utf-8")
    steps = {int(number) for number in re.findall(r"^\| (\d+)\. ", text, re.MULTILINE)}
    _, _, said = text.partition("What tests these steps without a device:")
    told: set[int] = set()
    for item in said.partition("\n## ")[0].split("\n- ")[1:]:
        assert is_held(item), item
        words = re.sub(r" %|`[^`]*`|\bto (\d+)", lambda one: f"-{one[1]}" if one[1] else "", item)
        told |= numbers(words)
    assert told == steps == set(range(1, 13))


def numbers(words: str) -> set[int]:
    """The steps that a sentence names: "steps 1 and 2, 3", "Steps 4-6"."""
    found: set[int] = set()
    for listed in re.findall(r"[Ss]teps? ((?:\d+(?: ?-\d+)?(?:, with[^,]*)?(?:, | and )?)+)", words):
        for first, last in re.findall(r"(\d+)(?: ?-(\d+))?", listed):
            found |= set(range(int(first), int(last or first) + 1))
    return found
