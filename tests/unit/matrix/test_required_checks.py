"""The checks without which nothing is certified: changing them changes what a certificate means."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from stackcheck.errors import ConfigurationError
from stackcheck.files import yamlfile
from stackcheck.matrix import matrix, resolve

ROOT = Path(__file__).resolve().parents[3]
AGREED = json.loads((Path(__file__).parents[1] / "assets" / "required_checks.json").read_text())
STACKS = resolve.load_stacks(ROOT)
VALUE = yamlfile.load(ROOT / "matrix.yaml")


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.id)
def test_every_stack_requires_the_agreed_checks_of_its_vendor_in_their_order(stack: resolve.Stack) -> None:
    assert list(stack.required_checks) == AGREED[stack.vendor]


def test_every_vendor_is_agreed_upon_and_no_check_is_named_twice() -> None:
    assert {stack.vendor for stack in STACKS} == {*AGREED}
    for checks in AGREED.values():
        assert len(checks) == len(set(checks)) > 20


@pytest.mark.parametrize(
    "entry",
    [
        {"only": ["amd"]},
        {"only": [], "checks": ["test_a.py::test_b"]},
        {"only": ["intel"], "checks": ["test_a.py::test_b"]},
        {"only": ["amd"], "checks": []},
        {"only": ["amd"], "checks": ["test_a.py"]},
        {"only": ["amd"], "checks": ["test_a.py::test_b"], "because": "a typo"},
        "test_a.py",
    ],
)
def test_a_malformed_entry_is_refused_and_its_place_is_named(entry: object) -> None:
    value = copy.deepcopy(VALUE)
    value["required"] = [*value["required"], entry]
    with pytest.raises(ConfigurationError, match=rf"required\[{len(value['required']) - 1}\]"):
        matrix.parse(value)


def test_a_vendor_without_any_required_check_is_refused() -> None:
    value = copy.deepcopy(VALUE)
    value["required"] = [{"only": ["amd", "nvidia"], "checks": ["test_a.py::test_b"]}]
    with pytest.raises(ConfigurationError, match="no required checks for cpu"):
        matrix.parse(value)
