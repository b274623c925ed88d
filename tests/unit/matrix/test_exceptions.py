"""What matrix.yaml excepts names checks that the suites have, each with the parameters that are meant."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackcheck.errors import ConfigurationError
from stackcheck.matrix import matrix
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
def test_a_waiver_that_names_no_check_or_a_whole_one_is_refused(tmp_path: Path, check: str, problem: str):
    with pytest.raises(ConfigurationError, match=problem):
        matrix.load_matrix(checkout(tmp_path, check))


def test_the_matrix_of_this_checkout_is_read_with_its_list_of_checks(tmp_path: Path):
    assert matrix.load_matrix(checkout(tmp_path, WAIVED)).policy.waivers


@pytest.mark.parametrize("function", WITH_CASES)
def test_no_name_of_a_function_covers_its_cases(function: str):
    assert not any(names(function, name) for name in IDS)
    (problem,) = POLICY.model_copy(update={"waivers": (waiver(function),)}).problems(IDS)
    assert "has parameters" in problem


@given(st.sampled_from(IDS), st.sampled_from(IDS))
def test_an_id_names_itself_and_nothing_else(one: str, other: str):
    assert names(one, one)
    assert names(one, other) == (one == other)


@given(st.sampled_from([name for name in IDS if "-" in name]))
def test_a_wildcard_stays_inside_the_parameters_of_its_check(check: str):
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
