"""Pages that claim: the AMD pages, the table of attacks and trust.md name what holds each claim."""

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from stackcheck.matrix import compat, known_issues

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
def test_every_claim_has_a_test_or_a_source(page):
    text = page.read_text(encoding="utf-8")
    assert len(list(claims(text))) > 20
    assert unheld(text) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_exists(page):
    named = _TEST.findall(page.read_text(encoding="utf-8"))
    gone = [(file, name) for file, name in named if not is_held(f"{file}::{name}" if name else file)]
    assert gone == []


@pytest.mark.parametrize(
    "claim",
    [
        "It works.",
        "- It works (`test_no_such_file.py`).",
        "| a | works |",
        "`test_layers.py::test_gone`",
        "The other page says so ([amd.md](../reference/amd.md)).",
        "It works ([above](#page)).",
    ],
)
def test_a_claim_without_either_is_found(claim):
    assert unheld(f"# Page\n\nHeld by `test_layers.py`.\n\n## Part\n{claim}\n") == [claim]


def test_a_list_is_held_by_the_paragraph_before_it_and_a_row_of_a_table_by_itself():
    assert unheld("# Page\n`test_layers.py` reads:\n\n- a\n- b\n") == []
    table = "# Page\n`test_layers.py` reads:\n\n| a | b |\n|---|---|\n| c | d |\n| e | `test_layers.py` |\n"
    assert unheld(table) == ["| c | d |"]


def test_every_step_of_the_first_hour_says_what_tests_it():
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


HEAD = "| attack | outcome |"
STOPPED = ("stopped", "refused", "FAILED")


def attacks() -> list[tuple[str, str, str]]:
    """Attack, outcome, test or reason."""
    (page,) = [path for path in (ROOT / "docs").rglob("*.md") if HEAD in path.read_text(encoding="utf-8")]
    table = page.read_text(encoding="utf-8").partition(HEAD)[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()[2:]]
    assert all(len(row) == 3 for row in cells)
    return [(row[0], row[1], row[2]) for row in cells]


@pytest.mark.parametrize(("attack", "outcome", "shown"), attacks())
def test_each_row_has_what_its_outcome_asks_for(attack, outcome, shown):
    named = re.findall(r"`([a-z_/0-9]+\.py)::(test_[a-z_0-9]+)`", shown)
    if outcome.startswith(("visible", "not stopped")):
        assert len(shown) > 10, attack
    else:
        assert outcome.startswith(STOPPED), outcome
        assert named, f"{attack}: no test"
    for file, function in named:
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_kind_of_outcome_is_there():
    outcomes = {outcome.partition(":")[0].partition(",")[0] for _, outcome, _ in attacks()}
    assert {"stopped", "refused", "visible", "not stopped"} <= outcomes


PAGE = (ROOT / "docs" / "reference" / "trust.md").read_text(encoding="utf-8")
RULES = {rule.id for rule in compat.load_rules(ROOT / "images" / "compat.yaml")}
ISSUES = {issue.id: issue for issue in known_issues.load_known_issues(ROOT / "images" / "known-issues.yaml")}
INCIDENTS, LEAST_REFUSED = 40, 33
_CODE = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"^\[([^]]+)\]\((https://github\.com/[^)]+)\)$")


def rows(heading: str) -> list[list[str]]:
    """The rows of the table whose header begins with these columns."""
    lines = PAGE.partition(heading)[2].splitlines()[2:]
    table = lines[: next((at for at, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


REFUSED = rows("| incident | what happened | refused by | shown by |")
OTHERS = rows("| incident | what happened | why not |")


def nodes(folder: str, names: set[str]) -> Iterator[ast.AST]:
    """What the Python files below a folder hold; files that mention none of the names are not parsed."""
    for path in (ROOT / folder).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if any(name in text for name in names):
            yield from ast.walk(ast.parse(text))


def planted(names: set[str]) -> set[str]:
    """Those of the names that tests/faults has as a text or a function, or tests/unit as a function."""
    faults, tests = [*nodes("tests/faults", names)], nodes("tests/unit", names)
    texts = {node.value for node in faults if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    functions = {node.name for node in (*faults, *tests) if isinstance(node, ast.FunctionDef)}
    return names & (texts | functions)


def checks() -> set[str]:
    """The functions that the suites collect."""
    listed = json.loads((ROOT / "tests/acceptance/checks.json").read_text(encoding="utf-8"))
    return {name.partition("::")[2].partition("[")[0] for ids in listed.values() for name in ids}


def named(cell: str) -> set[str]:
    return set(_CODE.findall(cell))


def judges(cell: str) -> set[str]:
    """The ids in a cell, without the commands that it mentions."""
    return {name for name in named(cell) if re.match(r"(test_|R[0-9]|K-)", name)}


def test_every_incident_is_there_once_with_its_link():
    links = [_LINK.match(row[0]) for row in (*REFUSED, *OTHERS)]
    assert all(links)
    names = [link[1] for link in links if link]
    assert len(names) == len(set(names)) == INCIDENTS
    for link in links:
        owner, _, number = link[1].partition("#") if link else ("", "", "")
        assert link
        assert re.fullmatch(rf"https://github\.com/{re.escape(owner)}/(issues|pull)/{number}", link[2])


def test_the_page_counts_its_rows():
    assert len(REFUSED) >= LEAST_REFUSED
    assert f"**{len(REFUSED)} of {INCIDENTS} are refused.**" in PAGE


def test_every_check_rule_and_known_issue_exists():
    found = {name for row in (*REFUSED, *OTHERS) for name in judges(row[2])}
    assert found <= checks() | RULES | ISSUES.keys(), found - checks() - RULES - ISSUES.keys()


def test_every_fault_exists():
    shown = {name for row in REFUSED for name in named(row[3])}
    found = planted(shown)
    assert shown <= found, shown - found
    assert planted({"a fault that nobody planted"}) == set()


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row[0].partition("]")[0][1:])
def test_what_is_refused_is_refused_by_more_than_a_warning_and_shown(row):
    refusing = {name for name in judges(row[2]) if name not in ISSUES or ISSUES[name].severity == "refuse"}
    assert refusing, row[0]
    assert named(row[3]), row[0]
    warned = set(re.findall(r"`(K-[^`]+)` warns", row[2]))
    assert all(ISSUES[name].severity == "warn" for name in warned)
    assert {name for name in judges(row[2]) if name.startswith("K-")} - warned <= refusing


def test_what_only_warns_says_so():
    for row in OTHERS:
        assert all(ISSUES[name].severity == "warn" for name in judges(row[2]) if name in ISSUES)


COLLECTED = (ROOT / "docs" / "reference" / "incidents.md").read_text(encoding="utf-8")
UNREAD = (ROOT / "docs" / "reference" / "incidents-unread.md").read_text(encoding="utf-8")


def collected(half: str) -> list[list[str]]:
    """The rows of half A or B: incident, query, what happened, symptom, verdict, by what."""
    section = (UNREAD if half == "B" else COLLECTED).partition(f"\n## Half {half}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| [")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def listed() -> set[str]:
    """The checks with their parameters, without the number of ranks or devices before them."""
    suites = json.loads((ROOT / "tests/acceptance/checks.json").read_text(encoding="utf-8"))
    return {identity.partition("::")[2] for identities in suites.values() for identity in identities}


@pytest.mark.parametrize("half", ["A", "B"])
def test_a_half_of_the_incidents_is_one_by_its_rule_and_its_figures_are_its_rows(half):
    links = [_LINK.match(row[0]) for row in collected(half)]
    names = [link[1] for link in links if link]
    assert len(set(names)) == len(links) == 50
    even = [int(hashlib.sha256(name.encode()).hexdigest(), 16) % 2 == 0 for name in names]
    assert set(even) == {half == "A"}
    verdicts = [row[4] for row in collected(half)]
    place = "AB".index(half) + 1
    figures = [line for line in COLLECTED.splitlines() if "of 50 (" in line]
    for verdict, words in {"caught": "certifies", "soak": "soak", "rule": "rule", "missed": "missed"}.items():
        counted = sum(one.strip("*").startswith(verdict) for one in verdicts)
        (line,) = [line for line in figures if words in line.split("|")[1]]
        assert line.split("|")[place + 1].split()[0] == str(counted), line


@pytest.mark.parametrize(
    "row", [*collected("A"), *collected("B")], ids=lambda row: row[0].partition("]")[0][1:]
)
def test_what_a_collected_incident_is_caught_by_exists(row):
    ids = [name for name in named(row[5]) if re.match(r"(test_|R[0-9])", name)]
    assert bool(ids) == (row[4] != "missed")
    assert set(ids) <= listed() | checks() | RULES
