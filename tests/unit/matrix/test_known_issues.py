"""Known issues: read strictly, shown for the stacks that have them, and refusing what they say."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from stackcheck import policy
from stackcheck.errors import ConfigurationError
from stackcheck.files import yamlfile
from stackcheck.matrix import compat, known_issues, matrix, resolve
from stackcheck.matrix.rules import RuleSet

ROOT = Path(__file__).parents[3]
RULES = compat.load_rules(ROOT / "images" / "compat.yaml")
ISSUES = known_issues.load_known_issues(ROOT / "images" / "known-issues.yaml")
VALUE = yamlfile.load_yaml(ROOT / "matrix.yaml")
STACKS = resolve.load_stacks(ROOT)
CHECKS = json.loads((ROOT / "tests" / "acceptance" / "checks.json").read_text(encoding="utf-8"))
NAN = "K-cudnn-sdpa-nan-dq"
ROW: dict[str, Any] = {
    "id": "K-planted",
    "when": {"torch": "2.13", "arch": "sm_90"},
    "symptom": "A planted fault makes every product zero.",
    "issue": "OWNER/REPO#1",
    "source": "planted by a test",
    "severity": "warn",
}


def _issues(**changes: Any) -> known_issues.KnownIssues:
    return known_issues.parse({"schema": "1", "issues": [{**ROW, **changes}]})


def _hit(stack: str) -> set[str]:
    return {issue.id for one in STACKS if one.id == stack for issue in one.known_issues}


def test_there_are_many_and_each_names_a_check_that_exists():
    assert len(ISSUES) >= 30
    ids = {check for listed in CHECKS.values() for check in listed}
    named = {check for issue in ISSUES for check in issue.checks}
    assert {one for one in named if not any(policy.names(one, check) for check in ids)} == set()
    assert len(named) >= 10


def test_no_stack_of_the_matrix_is_dropped_in_silence():
    refused = {issue.id for stack in STACKS for issue in stack.known_issues if issue.severity == "refuse"}
    assert refused == set()
    assert {issue.id for issue in ISSUES if issue.severity == "refuse"}


@pytest.mark.parametrize(
    ("stack", "hit", "clean"),
    [
        ("cuda13.0-torch2.13.0-py3.11-debian12", NAN, "K-triton-hopper-dqkwg"),
        ("cuda12.8-torch2.8.0-fa2.8.3-py3.12-ubuntu24.04", "K-triton-hopper-dqkwg", NAN),
        ("cuda12.8-torch2.8.0-fa2.8.3-py3.12-ubuntu24.04", "K-conv3d-bf16-cudnn-9.10", NAN),
        ("rocm6.2.4-torch2.6.0-fa2.7.4.post1-py3.10-ubuntu22.04", "K-aotriton-float-mask", NAN),
        (
            "rocm7.2.0-torch2.11.0-fa2.8.3-py3.12-ubuntu24.04",
            "K-compile-in-place-autograd-function",
            "K-hip-graph-corruption",
        ),
        (
            "rocm7.14.1-torch2.14.1-fa2.8.3-py3.12-ubuntu24.04",
            "K-compile-mix-order-reduction",
            "K-hip-graph-stale-read",
        ),
    ],
)
def test_a_stack_has_the_issues_of_its_versions_and_architectures(stack, hit, clean):
    assert hit in _hit(stack)
    assert clean not in _hit(stack)


def test_an_issue_of_a_driver_is_that_of_a_machine_that_the_stack_names():
    issues = _issues(when={"driver": "580.95", "arch": "sm_90"})
    named = {"device": "H200", "count": "8", "driver": "580.95.05"}
    value = copy.deepcopy(VALUE)
    value["runtimes"]["cuda"]["tested_on"] = [named]
    found = resolve.resolve(matrix.parse(value), RULES, issues)
    hit = {stack.id for stack in found if stack.known_issues}
    assert hit == {stack.id for stack in STACKS if "sm_90" in stack.archs}


def test_refuse_refuses_as_a_rule_and_names_the_issue():
    issues = _issues(severity="refuse", fixed_in={"torch": "2.14.0"})
    with pytest.raises(ConfigurationError) as caught:
        resolve.resolve(matrix.parse(VALUE), RULES, issues)
    assert "cuda13.0-torch2.13.0-py3.11-debian12 breaks K-planted: A planted fault" in str(caught.value)
    assert "OWNER/REPO#1; fixed in torch 2.14.0" in str(caught.value)
    assert "cuda13.0-torch2.14.1" not in str(caught.value)


def test_experimental_does_not_lift_a_refusal():
    value = copy.deepcopy(VALUE)
    for block in value["stacks"]:
        block["experimental"] = "true"
    with pytest.raises(ConfigurationError, match="breaks K-planted"):
        resolve.resolve(matrix.parse(value), RULES, _issues(severity="refuse"))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"when": {"torch": "two"}}, r"K-planted: when.torch: 'two' is not"),
        ({"when": {"cudnn": "9.19"}}, r"issues\[0\].when"),
        ({"when": {}}, r"issues\[0\].when"),
        ({"severity": "ignore"}, r"issues\[0\].severity"),
        ({"issue": "see the forum"}, r"issues\[0\].issue"),
        ({"check": "attention"}, r"issues\[0\].check"),
        ({"source": ""}, r"issues\[0\].source"),
        ({"id": "planted"}, r"issues\[0\].id"),
        ({"fixed_in": {"torch": "2.13.1"}}, "`when` still includes 2.13.1"),
        ({"fixed_in": {"rocm": "7.2"}}, "`when` names no versions of rocm"),
        ({"fixed_in": {"arch": "9"}}, "`when` names no versions of arch"),
        ({"workaround": "none"}, r"issues\[0\].workaround"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_row_is_read_strictly(changes, problem):
    with pytest.raises(ConfigurationError, match=problem):
        _issues(**changes)


def test_an_id_is_there_once():
    with pytest.raises(ConfigurationError, match="K-planted: duplicate id"):
        known_issues.parse({"schema": "1", "issues": [ROW, ROW]})


AXES = ("vendor", "rocm", "cuda", "torch", "triton", "arch", "driver", "wheels", "python", "flash_attn")
POOL = {axis: sorted({one.values[axis] for one in STACKS if axis in one.values}) for axis in AXES}
POOL |= {"arch": sorted({arch for one in STACKS for arch in one.archs}), "driver": ["570.26", "31.60"]}


@pytest.mark.parametrize("seed", range(20))
def test_no_answer_depends_on_what_was_asked_before(seed):
    draw = random.Random(seed)
    kept, rules = known_issues.KnownIssues(ISSUES), compat.load_rules(ROOT / "images" / "compat.yaml")
    values = dict(draw.choice(STACKS).values)
    for _ in range(30):
        axis = draw.choice(AXES)
        values = {**values, axis: draw.choice(POOL[axis])}
        more = ([draw.choice(POOL["arch"])] if draw.random() < 0.3 else [],)
        assert kept.of(values, *more) == known_issues.KnownIssues(ISSUES).of(values, *more)
        fresh = RuleSet(rules, rules.versions)
        assert rules.judge(values).findings == fresh.judge(values).findings
