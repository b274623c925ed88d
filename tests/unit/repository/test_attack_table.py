"""The table of attacks in the documentation: what it calls stopped has a test that exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HEAD = "| attack | outcome |"
STOPPED = ("stopped", "refused", "FAILED")


def rows() -> list[tuple[str, str, str]]:
    """Attack, outcome, test or reason."""
    (page,) = [path for path in (ROOT / "docs").rglob("*.md") if HEAD in path.read_text(encoding="utf-8")]
    table = page.read_text(encoding="utf-8").partition(HEAD)[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()[2:]]
    assert all(len(row) == 3 for row in cells)
    return [(row[0], row[1], row[2]) for row in cells]


@pytest.mark.parametrize(("attack", "outcome", "shown"), rows())
def test_each_row_has_what_its_outcome_asks_for(attack: str, outcome: str, shown: str) -> None:
    named = re.findall(r"`([a-z_/0-9]+\.py)::(test_[a-z_0-9]+)`", shown)
    if outcome.startswith(("visible", "not stopped")):
        assert len(shown) > 10, attack
    else:
        assert outcome.startswith(STOPPED), outcome
        assert named, f"{attack}: no test"
    for file, function in named:
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_kind_of_outcome_is_there() -> None:
    outcomes = {outcome.partition(":")[0].partition(",")[0] for _, outcome, _ in rows()}
    assert {"stopped", "refused", "visible", "not stopped"} <= outcomes
