"""Edits of matrix.yaml: exceptions name checks that there are, and a bad block stops no other stack."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stackcheck.errors import ConfigurationError
from stackcheck.files import yamlfile
from stackcheck.matrix import matrix, resolve
from stackcheck.policy import Waiver, names

ROOT = Path(__file__).parents[3]
LISTING = json.loads((ROOT / "tests" / "acceptance" / "checks.json").read_text(encoding="utf-8"))
IDS = sorted({name for ids in LISTING.values() for name in ids})
FUNCTIONS = sorted({name.partition("[")[0] for name in IDS})
WITH_CASES = [name for name in FUNCTIONS if name not in IDS]
WAIVED = "test_compiled.py::test_compiled_sums_in_place"
POLICY = matrix.load_matrix(ROOT / "matrix.yaml").policy


def waiver(check: str) -> Waiver:
    return POLICY.waivers[0].model_copy(update={"check": check})


def checkout(folder: Path, check: str) -> Path:
    """A matrix with one waiver changed, beside the list of checks."""
    (folder / "tests" / "acceptance").mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "acceptance" / "checks.json", folder / "tests" / "acceptance")
    text = (ROOT / "matrix.yaml").read_text(encoding="utf-8")
    assert f"check: {WAIVED}\n" in text
    (folder / "matrix.yaml").write_text(text.replace(f"check: {WAIVED}\n", f"check: {check}\n"))
    return folder / "matrix.yaml"


@pytest.mark.parametrize(
    ("check", "problem"),
    [
        (
            "test_attention.py::test_attention_dropout",
            r"policy.waivers\[4\].check: \S+ has parameters: name those .* CASE one of bf16, fp16",
        ),
        ("test_attention.py::test_attention_dropout[fp8]", r"no test_attention.*\[fp8\]: name .* bf16, fp16"),
        ("test_attention.py::test_gone", "the suites have no check test_attention.py::test_gone"),
        (
            "test_kernels.py::test_adamw[bf16]",
            r"test_kernels.py::test_adamw has no parameters: leave out \[bf16\]",
        ),
        ("test_attention.py::test_attention_of_models[*-*]", "wildcards alone"),
    ],
)
def test_a_waiver_that_names_no_check_or_a_whole_one_is_refused(tmp_path, check, problem):
    with pytest.raises(ConfigurationError, match=problem):
        matrix.load_matrix(checkout(tmp_path, check))


def test_the_matrix_of_this_checkout_is_read_with_its_list_of_checks(tmp_path):
    assert matrix.load_matrix(checkout(tmp_path, WAIVED)).policy.waivers


@pytest.mark.parametrize("function", WITH_CASES)
def test_no_name_of_a_function_covers_its_cases(function):
    assert not any(names(function, name) for name in IDS)
    (problem,) = POLICY.model_copy(update={"waivers": (waiver(function),)}).problems(IDS)
    assert "has parameters" in problem


@given(st.sampled_from(IDS), st.sampled_from(IDS))
def test_an_id_names_itself_and_nothing_else(one, other):
    assert names(one, one)
    assert names(one, other) == (one == other)


@given(st.sampled_from([name for name in IDS if "-" in name]))
def test_a_wildcard_stays_inside_the_parameters_of_its_check(check):
    function, _, cases = check.partition("[")
    pattern = f"{function}[{cases.partition('-')[0]}-*]"
    assert names(pattern, check)
    assert {name.partition("[")[0] for name in IDS if names(pattern, name)} == {function}


def test_the_waivers_of_the_matrix_leave_what_was_right_to_decide():
    """Of seven ways to compute attention two failed on H100 and H200 with torch 2.11."""
    open_ways = [
        name
        for name in IDS
        if "test_attention_of_models" in name and not any(one.covers(name) for one in POLICY.waivers)
    ]
    assert {name.partition("[")[2].partition("-")[0] for name in open_ways} == {
        *("efficient", "flash", "flex", "math", "package")
    }


GOOD = {stack.id for stack in resolve.load_stacks(ROOT)}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "torch": ({"torch": "2.99.0"}, r"torch 2\.99\.0: .*`versions\.torch`"),
    "nccl": ({"torch": "2.13.0", "nccl": "2.99.1"}, r"nccl 2\.99\.1: .*`versions\.nccl`"),
    "runtime": ({"version": "13.9", "torch": "2.13.0"}, r"PyTorch builds torch 2\.13\.0 for CUDA"),
}


@pytest.fixture(params=BAD, ids=str)
def bad(request, tmp_path) -> tuple[Path, str]:
    """A checkout with one block that is refused, and what its refusal says."""
    block, says = BAD[request.param]
    shutil.copytree(ROOT / "images", tmp_path / "images")
    value = yamlfile.load_yaml(ROOT / "matrix.yaml")
    like = {
        "runtime": "cuda",
        "version": "13.0",
        "python": ["3.12"],
        "os": ["debian12"],
        "wheels": ["upstream"],
    }
    value["stacks"].append(like | block)
    (tmp_path / "matrix.yaml").write_text(yaml.safe_dump(value))
    return tmp_path, says


def test_the_other_stacks_are_there(bad):
    root, _ = bad
    assert {stack.id for stack in resolve.load_stacks(root, ["cpu*"])} == {
        name for name in GOOD if name.startswith("cpu")
    }
    told: list[str] = []
    assert {stack.id for stack in resolve.load_stacks(root, refused=told.append)} == GOOD
    assert {stack.id for stack in resolve.usable(root)} == GOOD
    assert told


def test_the_refused_one_cannot_be_selected_and_names_its_row(bad):
    root, says = bad
    for selectors in ([], ["cuda13*"]):
        with pytest.raises(ConfigurationError, match=says):
            resolve.load_stacks(root, selectors)
