"""Every library that a ROCm stack's wheels expect comes from somewhere, and the list of them has sources."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stackcheck.matrix import resolve
from stackcheck.recipe import rocm_libraries

if TYPE_CHECKING:
    from stackcheck.matrix.stack import Stack

ROOT = Path(__file__).parents[3]
FOUND = rocm_libraries.load(ROOT / "images" / "rocm-libraries.yaml")
STACKS = resolve.load_stacks(ROOT, ("rocm*-torch*",))


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.id)
def test_every_image_has_what_its_wheels_expect(stack: Stack) -> None:
    names = {row.library for row in rocm_libraries.expected(stack, FOUND)}
    assert {"libamd_smi.so", "libdrm.so.2"} <= names
    assert list(rocm_libraries.lacking(stack, FOUND)) == []


@pytest.mark.parametrize("package", ["libdrm2", "libnuma1"])
def test_a_package_that_a_base_leaves_out_is_named(package: str) -> None:
    (stack,) = resolve.select(STACKS, ["*-amd"])
    without = tuple(name for name in stack.base.packages if name != package)
    poorer = dataclasses.replace(stack, base=dataclasses.replace(stack.base, packages=without))
    (line,) = rocm_libraries.lacking(poorer, FOUND)
    assert package in line


def test_only_amds_wheels_leave_rocm_to_the_system() -> None:
    by_source = {
        stack.wheels: {row.library for row in rocm_libraries.expected(stack, FOUND)}
        for stack in STACKS
        if stack.layout == "classic"
    }
    assert "libamdhip64.so" in by_source["amd"] - by_source["upstream"]


def test_every_row_names_a_source_of_the_file() -> None:
    used = {name for row in FOUND.expected for name in row.source} | {FOUND.brought.source}
    assert used == set(FOUND.sources)
