"""docs/reference/matrix.md lets a newcomer add ROCm's next release by editing two files."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from stackcheck.errors import ConfigurationError
from stackcheck.files import yamlfile
from stackcheck.matrix import compat, explain, matrix, resolve
from stackcheck.matrix.compat import contradictions
from stackcheck.matrix.explain import parse_question
from stackcheck.matrix.rules import RuleSet
from stackcheck.recipe import render

ROOT = Path(__file__).parents[3]
# What the page says to add, table by table: ROCm 7.15 with PyTorch 2.16.
ROWS: dict[str, tuple[str, Any]] = {
    "R1-upstream-rocm": ("2.16.0", ["7.14", "7.15"]),
    "R2-triton": ("2.16.0", "3.10.0"),
    "R12-python": ("2.16", ["3.11", "3.12", "3.13", "3.14"]),
    "R6-targets": ("7.15", ["gfx90a", "gfx942", "gfx950"]),
    "R9-rccl": ("7.15", "2.31.0"),
    "R10-amdgpu": ("31.60", ["7.14", "7.15"]),
}
NEW = "rocm7.15.0-torch2.16.0-fa2.8.3-py3.12-ubuntu24.04"


def _rules(rows: dict[str, tuple[str, Any]]) -> RuleSet:
    value = copy.deepcopy(yamlfile.load_yaml(ROOT / "images" / "compat.yaml"))
    tables = {table["id"]: table for table in value["tables"]}
    for table, (key, row) in rows.items():
        tables[table]["rows"][key] = row
    value["versions"]["rocm"].append("7.15.0")
    value["versions"]["torch"].append("2.16.0")
    return compat.parse(value)


def _matrix() -> matrix.Matrix:
    value = copy.deepcopy(yamlfile.load_yaml(ROOT / "matrix.yaml"))
    (newest,) = (block for block in value["stacks"] if block.get("version") == "7.14.1")
    target = {"device": "MI300X", "count": "8", "driver": "31.60.0"}
    value["stacks"].append({**newest, "version": "7.15.0", "torch": "2.16.0", "tested_on": [target]})
    return matrix.parse(value)


def test_the_two_edits_make_a_stack_that_renders():
    rules = _rules(ROWS)
    stack = resolve.select(resolve.resolve(_matrix(), rules), [NEW])[0]
    assert (stack.triton.version, stack.collective.version, stack.layout) == ("3.10.0", "2.31.0", "amdrocm")
    assert "rocm7.15" in render.render(stack, ROOT / "images")["Dockerfile"]
    assert contradictions(rules) == ()
    asked = parse_question(["rocm=7.15", "torch=2.16.0"], rules)
    assert explain.explain(asked, rules).judgement.answer == "allowed"


@pytest.mark.parametrize("table", ROWS)
def test_a_row_that_was_forgotten_refuses_the_stack_and_names_its_table(table):
    rows = {name: row for name, row in ROWS.items() if name != table}
    axis = {"R2-triton": "R0-decided[triton]", "R9-rccl": "R0-decided[rccl]"}
    with pytest.raises(ConfigurationError, match=re.escape(f"{NEW} breaks {axis.get(table, table)}")):
        resolve.resolve(_matrix(), _rules(rows))
