"""docs/reference/trust.md: each incident once; the checks, rules, issues and faults that it names exist."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from stackcheck.matrix import compat, known_issues

ROOT = Path(__file__).resolve().parents[3]
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
def test_what_is_refused_is_refused_by_more_than_a_warning_and_shown(row: list[str]):
    refusing = {name for name in judges(row[2]) if name not in ISSUES or ISSUES[name].severity == "refuse"}
    assert refusing, row[0]
    assert named(row[3]), row[0]
    warned = set(re.findall(r"`(K-[^`]+)` warns", row[2]))
    assert all(ISSUES[name].severity == "warn" for name in warned)
    assert {name for name in judges(row[2]) if name.startswith("K-")} - warned <= refusing


def test_what_only_warns_says_so():
    for row in OTHERS:
        assert all(ISSUES[name].severity == "warn" for name in judges(row[2]) if name in ISSUES)
