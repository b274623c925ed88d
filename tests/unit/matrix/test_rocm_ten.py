"""ROCm 10.0 and 10.1: what AMD's pages list is allowed, the rest is not, and no stack rests on a guess."""

import itertools
from pathlib import Path

import pytest

from stackcheck.matrix import compat, explain, known_issues
from stackcheck.matrix.explain import parse_question

ROOT = Path(__file__).parents[3]
RULES = compat.load_rules(ROOT / "images" / "compat.yaml")
ISSUES = known_issues.load_known_issues(ROOT / "images" / "known-issues.yaml")
LISTED = {"10.0": {"2.11.0", "2.12.0", "2.13.0"}, "10.1": {"2.12.0", "2.13.0", "2.14.0"}}
TORCHES = ("2.10.0", "2.11.0", "2.12.0", "2.12.1", "2.13.0", "2.14.0", "2.14.1", "2.15.0")
ARCHS = ("gfx908", "gfx90a", "gfx942")  # gfx950 has a known issue with 10.0


def answer(question: str) -> str:
    return explain.explain(parse_question(question.split(), RULES), RULES).judgement.answer


@pytest.mark.parametrize(("rocm", "torch", "arch"), list(itertools.product(LISTED, TORCHES, ARCHS)))
def test_amds_wheels_are_allowed_where_its_page_lists_them(rocm: str, torch: str, arch: str) -> None:
    listed = torch in LISTED[rocm] and arch != "gfx908"
    question = f"rocm={rocm} torch={torch} arch={arch} wheels=amd"
    assert answer(question) == ("allowed" if listed else "refused")


@pytest.mark.parametrize("rocm", LISTED)
def test_gfx950_is_refused_until_a_release_without_the_slow_backward_is_known(rocm: str) -> None:
    question = f"rocm={rocm} torch=2.13.0 arch=gfx950 wheels=amd"
    found = explain.explain(parse_question(question.split(), RULES), RULES, None, ISSUES)
    assert [rule.id for rule in found.judgement.broken] == ["K-aotriton-slow-backward"]


@pytest.mark.parametrize(("rocm", "torch"), list(itertools.product(LISTED, TORCHES)))
def test_pytorchs_own_wheels_do_not_exist(rocm: str, torch: str) -> None:
    assert answer(f"rocm={rocm} torch={torch} arch=gfx942 wheels=upstream") != "allowed"
