"""`test -k` and `--last-failed`: what is chosen, by pytest's own reading of the expression."""

import json
import os
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from stackcheck.errors import NothingSelectedError
from stackcheck.suite import some

ROOT = Path(__file__).resolve().parents[3]
RESULT = ROOT / "docs/results/suites-h200-x2-standard.json"
IDS = sorted(json.loads((ROOT / "tests/acceptance/checks.json").read_text())["1"])


def chosen(text: str, check: str) -> bool:
    """Whether pytest would run a check: a word is looked for in the names of its file and of itself."""
    file, _, name = check.partition("::")
    return Expression.compile(text).evaluate(lambda word, **_: word.lower() in f"{file}\n{name}".lower())


@pytest.mark.parametrize("check", [*IDS[::7], "test_a.py::test_b[x=1, y]", "test_a.py::test_b[not or and]"])
def test_each_check_is_chosen_by_its_own_expression(check: str) -> None:
    assert chosen(some.expression([check]), check)


def test_checks_of_other_names_are_not_chosen() -> None:
    text = some.expression(["test_a.py::test_b[bf16]", "test_c.py::test_d"])
    others = ("test_a.py::test_b[fp16]", "test_a.py::test_d", "test_c.py::test_b[bf16]")
    assert not any(chosen(text, other) for other in others)


def kept(folder: Path, failing: str | None, age_s: int) -> None:
    """A result in which one check failed."""
    result = json.loads(RESULT.read_text())
    for check in result["checks"]:
        if check["id"] == failing:
            check |= {"outcome": "failed", "reason": "planted"}
    path = folder / "run" / "result.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(result))
    os.utime(path, (path.stat().st_mtime - age_s,) * 2)


def test_the_newest_run_says_what_failed_last(tmp_path: Path) -> None:
    with pytest.raises(NothingSelectedError, match="nothing ran yet"):
        some.last_failed(tmp_path)
    passing = [each["id"] for each in json.loads(RESULT.read_text())["checks"] if each["outcome"] == "passed"]
    bad = {each["id"] for each in json.loads(RESULT.read_text())["checks"]} - set(passing)
    kept(tmp_path, passing[0], age_s=100)
    assert passing[0] in some.last_failed(tmp_path)
    kept(tmp_path / some.FOLDER, passing[1], age_s=0)
    assert passing[1] in some.last_failed(tmp_path)
    assert passing[0] not in set(some.last_failed(tmp_path)) - bad
