"""Faults below torch: inside the MKL and the gloo of its CPU wheel. In: gcc, torch for processors.

`benchmarks/library_faults/shim.c` plants them, and counts the calls; docs/reference/trust.md has the smallest
fault that each check sees. Here a fault in each library has to fail a check that asks for exact numbers.
"""

import dataclasses
import importlib
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import planting

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks/library_faults"
sys.path.append(str(FOLDER))
planned = importlib.import_module("planned")
TIERS = {"collectives": "smoke"}
CHECKS = {
    "products": "test_kernels.py::test_gemm[fp32]",
    "halves": "test_attention.py::test_packed_members[mask]",
    "collectives": "test_collectives.py::test_all_reduce_values",
}
FAULTS = [
    planting.Fault(
        f"bit 1 of one element of each call ({library})", check, tier=TIERS.get(library, "standard")
    )
    for library, check in CHECKS.items()
]
HEALTHY = [
    dataclasses.replace(fault, name="a shim that changes nothing", outcome="passed") for fault in FAULTS
]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("gcc"):
        pytest.skip("no gcc")
    made = tmp_path_factory.mktemp("shim") / "shim.so"
    flags = ("-shared", "-fPIC", "-O2", "-pthread", "-Wall", "-Wextra", "-Werror")
    subprocess.run(["gcc", *flags, FOLDER / "shim.c", "-o", made, "-ldl"], check=True)
    return made


@pytest.fixture
def plant_below(
    plant: Callable[[planting.Fault], dict[str, Any]], shim: Path, tmp_path: Path
) -> Callable[[planting.Fault, Any], Counter[str]]:
    """Plant a fault inside a library, and count what was reached."""

    def planted(fault: planting.Fault, setting: Any) -> Counter[str]:
        table = tmp_path / "table"
        planned.written(table, setting)
        plant(dataclasses.replace(fault, env={"LD_PRELOAD": str(shim), "FAULT_TABLE": str(table)}))
        return planned.counted(table)

    return planted


@pytest.mark.parametrize(("library", "fault"), zip(CHECKS, FAULTS, strict=True), ids=str)
def test_a_fault_inside_a_library_fails_its_check(library: str, fault: planting.Fault, plant_below) -> None:
    counted = plant_below(fault, planned.Setting(library=library, kind="flip"))
    assert counted["changed"] == counted[library] > 0


@pytest.mark.parametrize(("library", "fault"), zip(CHECKS, HEALTHY, strict=True), ids=str)
def test_the_shim_alone_fails_nothing(library: str, fault: planting.Fault, plant_below) -> None:
    counted = plant_below(fault, planned.Setting(library=library))
    assert counted[library] > 0 == counted["changed"]
