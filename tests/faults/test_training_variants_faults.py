"""Faults of compiled training and of training in 8 bits: a wrong job is found, a slow or large one too."""

import json
from collections.abc import Callable
from typing import Any

import pytest

import planting
from planting import Fault

SUITE = "test_training_variants.py::"
FAULTS = (
    Fault(
        "compiled code that is two per cent off",
        SUITE + "test_compiled_job_follows_the_reference",
        patches={"torch:compile": "lambda f, **k: lambda *x, **y: f(*x, **y) * 1.02"},
        says="outside the band",
    ),
    Fault(
        "an 8-bit product that is a half too small",
        SUITE + "test_fp8_job_follows_the_reference[2-own]",
        patches={"fused.products:_fp8_product": "lambda *a, **k: original(*a, **k).mul_(0.5)"},
        says="outside the band",
    ),
)
# More ways to fail a check that one of FAULTS fails already: `make test-slow` plants them.
MORE = (
    Fault(
        "a job of 8 bits that does not compile",
        SUITE + "test_fp8_job_follows_the_reference",
        patches={"layouts.prepare:use_fp8_linears": "lambda *a: 1 / 0"},
        says="ZeroDivisionError",
    ),
)
# What a launch of the wide jobs would say on an H200, when all is well.
RECORD = {
    "problems": [],
    "performance": {"tokens_per_s_per_gpu": 20_000.0},
    "memory": {"allocated_gib": 40.0},
}


def wide(**changes: float) -> dict[str, str]:
    """A launch of jobs of real width, and a device that is no CPU."""
    fast = {"tokens_per_s_per_gpu": changes.get("rate", 25_000.0)}
    fp8 = {**RECORD, "performance": fast, "memory": {"allocated_gib": changes.get("gib", 40.0)}}
    ran = json.dumps({"records": {"fp8": fp8, "bf16": RECORD}, "curves": {}})
    return {
        "harness.launch:launch": f"lambda *a, **k: json.loads({ran!r})",
        "harness.skips:without_feature": "lambda *a: None",
        "harness.skips:if_lacking": "lambda *a: None",
        "harness.skips:without_memory": "lambda *a: None",
    }


WIDE = (
    Fault("8 bits slower than 16", SUITE + "test_fp8_is_worth_it[own]", says="19000 tokens/s in 8 bits",
          patches=wide(rate=19_000.0)),
    Fault("8 bits larger than 16", SUITE + "test_fp8_is_worth_it[own]", says="48.0 GiB in 8 bits",
          patches=wide(gib=48.0)),
    Fault("nothing", SUITE + "test_fp8_is_worth_it[own]", outcome="passed", patches=wide()),
)  # fmt: skip


@pytest.mark.parametrize(
    "fault", [*FAULTS, *WIDE, *(pytest.param(fault, marks=pytest.mark.slow) for fault in MORE)], ids=str
)
def test_planted_fault_is_caught(fault: Fault, plant: Callable[[planting.Fault], dict[str, Any]]) -> None:
    plant(fault)


@pytest.mark.slow
def test_healthy_jobs_pass(plant: Callable[[planting.Fault], dict[str, Any]]) -> None:
    arguments = ("-k", "reference")
    plant(Fault("nothing", "test_training_variants.py", outcome="passed", arguments=arguments))
