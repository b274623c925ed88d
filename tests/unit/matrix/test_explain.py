"""`explain` answers for a stack, for an id that is in no matrix, and for what was left out by choice."""

import copy
from pathlib import Path

import pytest

from stackcheck.files import yamlfile
from stackcheck.matrix import compat, expand, explain, matrix
from stackcheck.matrix.explain import parse_question

ROOT = Path(__file__).parents[3]
RULES = compat.load_rules(ROOT / "images" / "compat.yaml")
VALUE = yamlfile.load_yaml(ROOT / "matrix.yaml")
MATRIX = matrix.parse(VALUE)
BLACKWELL = "cuda12.6-torch2.7.1-fa2.8.3-py3.12-ubuntu24.04"


def _ask(question: str, found: matrix.Matrix = MATRIX) -> explain.Explanation:
    return explain.explain(parse_question(question.split(), RULES), RULES, found)


def _changed(**changes: object) -> matrix.Matrix:
    """The matrix with another block of the stack `BLACKWELL`."""
    value = copy.deepcopy(VALUE)
    next(block for block in value["stacks"] if block.get("version") == "12.6").update(changes)
    return matrix.parse(value)


def _rules(found: explain.Explanation, *, hold: bool) -> set[str]:
    return {finding.rule.id for finding in found.judgement.findings if finding.holds is hold}


@pytest.mark.parametrize("cell", expand.expand(MATRIX), ids=lambda cell: cell.id)
def test_every_stack_of_the_matrix_is_allowed_by_rules_that_it_satisfies(cell):
    found = explain.explain_stack(cell.id, MATRIX, RULES)
    assert found
    assert found.judgement.answer == ("unknown" if found.experimental else "allowed")
    assert found.stacks == (cell.id,)
    assert _rules(found, hold=True)


def test_a_stack_is_judged_with_its_architectures_and_the_drivers_of_its_tests():
    held = _rules(explain.explain_stack(BLACKWELL, MATRIX, RULES), hold=True)
    assert {"R4-vendor-nvidia", "R7-ampere"} <= held
    named = _changed(tested_on=[{"device": "B200", "count": "8", "driver": "580.95.05"}])
    assert "R10-nvidia[12]" in _rules(explain.explain_stack(BLACKWELL, named, RULES), hold=True)


def test_a_stack_that_an_architecture_breaks_is_refused_and_the_nearest_ones_are_allowed():
    found = explain.explain_stack(BLACKWELL, _changed(archs=["sm_90", "sm_100"]), RULES)
    assert found.judgement.answer == "refused"
    assert "R4-blackwell" in _rules(found, hold=False)
    assert found.nearest
    assert all(explain.explain(near, RULES).judgement.answer == "allowed" for near in found.nearest)


def test_what_the_matrix_leaves_out_is_named_with_its_reason():
    value = {**VALUE, "exclude": [{"when": {"torch": "2.12.1"}, "because": "nobody asked for it"}]}
    found = matrix.parse(value)
    left_out = "rocm7.2.1-torch2.12.1-fa2.8.3-py3.12-ubuntu24.04"
    assert explain.explain_stack(left_out, found, RULES).excluded == {left_out: "nobody asked for it"}
    asked = _ask("rocm=7.2.1 python=3.12 arch=gfx950", found)
    assert asked.excluded == {left_out: "nobody asked for it"}
    assert "rocm7.2.1-torch2.13.0-fa2.8.3-py3.12-ubuntu24.04" in asked.stacks


def test_an_id_that_is_in_no_matrix_is_explained_by_its_parts():
    name = "rocm7.2.4-torch2.6.0-fa2.8.3-py3.12-ubuntu24.04-amd"
    assert explain.explain_stack(name, MATRIX, RULES) is None
    assert parse_question([name], RULES) == {
        "rocm": "7.2.4",
        "torch": "2.6.0",
        "flash_attn": "2.8.3",
        "python": "3.12",
        "os": "ubuntu24.04",
        "wheels": "amd",
        "vendor": "amd",
    }


@pytest.mark.parametrize(
    "question",
    [
        "rocm=99.9",
        "rocm=10.2 torch=2.14.1",
        "cuda=12.8 arch=sm_103",
        "torch=2.17.0",
        "os=debian99",
        "python=3.19",
        "arch=gfx999",
        "cuda=12.8 flash_attn=2.8.4",
        "torchao=0.99.0",
        "rocm=10.0 amdsmi=9.9.9",
    ],
)
def test_what_no_source_names_is_unknown_even_where_no_other_rule_speaks(question):
    found = _ask(question)
    assert found.judgement.answer == "unknown"
    assert found.nearest


@pytest.mark.parametrize(
    "question", ["rocm=6.4.1", "cuda=12.8", "driver=570.133.20", "vendor=cpu", "os=debian12"]
)
def test_a_patch_of_a_known_version_or_a_newer_driver_is_not_unknown(question):
    assert _ask(question).judgement.answer == "allowed"
