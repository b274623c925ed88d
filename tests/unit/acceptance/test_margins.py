"""Every numeric check records its worst margin and number of cases, and every check has a planted fault."""

import ast
import math
import re
from pathlib import Path

import pytest

from workloads import margins

ACCEPTANCE = Path(__file__).resolve().parents[2] / "acceptance"
SUITES = (
    *("test_kernels.py", "test_attention.py", "test_collectives.py"),
    *("test_compiled.py", "test_packages.py", "test_training_variants.py"),
)
# `values` judges one operation of a launch, `follows` one job.
RECORDING = ("passes(", "cases.require(", "_report.require(", "margins.record(", "values(", "follows(")
# Checks beside the numeric ones: what they compare are names, rates or the course of a job.
OTHERS = {
    "test_attention_default_is_fused": "names of kernels",
    "test_absent_rank_is_named": "which rank an error names",
    "test_fp8_is_worth_it": "rates and memory",
    "test_groups_set_up_and_torn_down": "times, and what a process holds",
    "test_peak_of_one_rank_of_eight": "memory",
}
ELSEWHERE = {
    "test_devices_links.py": "test_peer_copies_arrive",
    "test_devices_memory.py": "test_memory_holds_patterns",
    "test_kernel_speed.py": "test_convolution_halves",
    "test_training.py": "test_loss_lies_in_the_reference_band",
}


def functions(file: str) -> dict[str, str]:
    """Every function of a suite with its source."""
    text = (ACCEPTANCE / file).read_text(encoding="utf-8")
    defined = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(text, node) or "" for node in defined}


def records(source: str) -> bool:
    return any(call in source for call in RECORDING)


@pytest.mark.parametrize("file", SUITES)
def test_every_numeric_check_records_its_margin_and_cases(file):
    checks = {name: source for name, source in functions(file).items() if name.startswith("test_")}
    silent = [name for name, source in checks.items() if not records(source) and name not in OTHERS]
    assert checks
    assert not silent, (
        f"call passes, or cases.require with record_metric, in {silent}, or say in OTHERS what they compare"
    )


def test_checks_of_other_suites_record_too():
    assert all(records(functions(file)[check]) for file, check in ELSEWHERE.items())
    assert "cases.require(" in functions("test_collectives.py")["values"]


def test_no_check_is_listed_that_is_gone():
    assert set(OTHERS) <= {name for file in SUITES for name in functions(file)}


@pytest.mark.parametrize(
    ("got", "bound", "margin"),
    [
        (0.5, 2.0, 0.25),
        (2.0, 2.0, 1.0),
        (0.0, 0.0, 0.0),
        (-1.0, 0.05, 0.0),
        (3.0, 0.0, math.inf),
        (math.inf, 1.0, math.inf),
        (math.nan, 1.0, math.nan),
        (1.0, math.nan, math.nan),
    ],
)
def test_margin_is_error_over_gate(got, bound, margin):
    assert margins.of(got, bound) == pytest.approx(margin, nan_ok=True)


def test_one_margin_that_is_no_number_hides_behind_no_other():
    assert math.isnan(margins.worst([0.1, math.nan, 0.9]))
    assert math.isnan(margins.worst([math.nan, 0.1]))
    assert margins.worst([0.1, math.inf]) == math.inf
    assert margins.worst([]) == 0.0


TESTS = Path(__file__).resolve().parents[2]
CHECK = re.compile(r"^def (test_\w+)\(", re.MULTILINE)
# The mutants of collectives name a check by its operation: cases.all_gather is test_all_gather_values.
OF_AN_OPERATION = re.compile(r"^test_(?P<operation>\w+)_(values|busbw)$")


def checks() -> dict[str, str]:
    """Every check by its function, with its file."""
    files = sorted((TESTS / "acceptance").glob("test_*.py"))
    return {name: path.name for path in files for name in CHECK.findall(path.read_text(encoding="utf-8"))}


def is_named(check: str, faults: str) -> bool:
    if re.search(rf"\b{check}\b", faults):
        return True
    found = OF_AN_OPERATION.match(check)
    return bool(found and re.search(rf"\w\.{found['operation']}\b", faults))


def test_every_check_has_a_planted_fault():
    faults = "\n".join(path.read_text(encoding="utf-8") for path in (TESTS / "faults").glob("*.py"))
    assert len(checks()) > 50
    without = [f"{file}::{name}" for name, file in checks().items() if not is_named(name, faults)]
    assert not without, f"plant a fault in tests/faults for {without}"
