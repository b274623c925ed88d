"""Faults below torch: inside the MKL and the gloo of its CPU wheel. In: gcc or build/library_faults.

`benchmarks/library_faults/shim.c` plants them, and counts the calls; docs/reference/trust.md has the smallest
fault that each check sees. Here a fault in each library has to fail a check that asks for exact numbers, and
one that compares two computations which both take their products from there.
"""

# ruff: noqa: E501 - a table of faults reads in rows

import dataclasses
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import planting

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks/library_faults"
sys.path.append(str(FOLDER))
planned = importlib.import_module("planned")
BIT = "bit 1 of one element of each"
FAULTS = {
    "products": planting.Fault(f"{BIT} float32 product", "test_kernels.py::test_gemm[fp32]"),
    "products of both sides": planting.Fault(f"{BIT} float32 product", "test_kernels.py::test_compiled_block[fp32]", says="elementwise", another=True),
    "collectives": planting.Fault(f"{BIT} sum of ranks", "test_collectives.py::test_all_reduce_values", tier="smoke"),
}  # fmt: skip
HEALTHY = {
    library: dataclasses.replace(fault, name="a shim that changes nothing", outcome="passed", says="")
    for library, fault in FAULTS.items()
}


@pytest.fixture(scope="module")
def below(tmp_path_factory) -> Iterator[dict[str, str]]:
    """The variables of a Python that loads the shim; the runs of these tests fork from one."""
    folder = tmp_path_factory.mktemp("shim")
    shim = planned.found(folder)
    if shim is None:
        pytest.skip("no gcc, and no build/library_faults: benchmarks/library_faults/planned.py makes it")
    planned.written(folder / "table", planned.Setting())
    variables = {"LD_PRELOAD": str(shim), "FAULT_TABLE": str(folder / "table")}
    python = planting.Python(planting.SUITE_PYTHON, **variables)
    with mock.patch.object(planting, "PYTHON", python):
        yield variables
    python.end()


@pytest.fixture
def plant_below(
    plant: Callable[[planting.Fault], dict[str, Any]], below: dict[str, str]
) -> Callable[[planting.Fault, Any], Counter[str]]:
    def planted(fault: planting.Fault, setting: Any) -> Counter[str]:
        table = Path(below["FAULT_TABLE"])
        planned.written(table, setting)
        plant(dataclasses.replace(fault, env=below))
        return planned.counted(table)

    return planted


@pytest.mark.parametrize(("library", "fault"), FAULTS.items(), ids=str)
def test_a_fault_inside_a_library_fails_its_check(library, fault, plant_below):
    library = library.partition(" ")[0]
    counted = plant_below(fault, planned.Setting(library=library, kind="flip"))
    assert counted["changed"] == counted[library] > 0


# The shim that changes nothing is one program: the slow half has it with the other checks.
@pytest.mark.parametrize(
    ("library", "fault"),
    [
        pytest.param(library, fault, marks=() if library == "products" else pytest.mark.slow)
        for library, fault in HEALTHY.items()
    ],
    ids=str,
)
def test_the_shim_alone_fails_nothing(library, fault, plant_below):
    library = library.partition(" ")[0]
    counted = plant_below(fault, planned.Setting(library=library))
    assert counted[library] > 0 == counted["changed"]
