"""Every library that a ROCm stack's wheels expect comes from somewhere, and the list of them has sources."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stackcheck.files import yamlfile
from stackcheck.matrix import resolve
from stackcheck.matrix.stack import Stack
from stackcheck.recipe import rocm
from stackcheck.versions import matches

ROOT = Path(__file__).parents[3]
FOUND = yamlfile.load_yaml(ROOT / "images" / "rocm-libraries.yaml")
STACKS = resolve.load_stacks(ROOT, ("rocm*-torch*",))
# In every Debian and Ubuntu: dpkg and apt themselves need them.
ALWAYS = {"libstdc++6", "libgcc-s1", "zlib1g"}


def expected(stack: Stack) -> list[dict[str, Any]]:
    """The rows of the file that the wheels of a stack expect."""
    who = {"torch-amd" if stack.wheels == "amd" else "torch", "amdsmi"}
    version = stack.runtime_version or ""
    return [
        row
        for row in FOUND["expected"]
        if who & {*row["needed_by"]} and matches("rocm", row["rocm"], version)
    ]


def lacking(stack: Stack) -> Iterator[str]:
    """One line for each library that an image of the stack would not have."""
    smi = {rocm.SMI} if rocm.takes_smi(stack) else set()
    from_amd = smi | ({*rocm.RUNTIME} if rocm.takes_runtime(stack) else set())
    there = {"debian": ALWAYS | {*stack.base.packages}, "amd": from_amd}
    for row in expected(stack):
        ((kind, package),) = row["from"].items()
        if package not in there.get(kind, {package}):
            yield f"{row['library']} is in {package}, which {stack.id} does not have"


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.id)
def test_every_image_has_what_its_wheels_expect(stack):
    names = {row["library"] for row in expected(stack)}
    assert {"libamd_smi.so", "libdrm.so.2"} <= names
    assert list(lacking(stack)) == []


@pytest.mark.parametrize("package", ["libdrm2", "libnuma1"])
def test_a_package_that_a_base_leaves_out_is_named(package):
    (stack,) = resolve.select(STACKS, ["*-amd"])
    without = tuple(name for name in stack.base.packages if name != package)
    poorer = dataclasses.replace(stack, base=dataclasses.replace(stack.base, packages=without))
    (line,) = lacking(poorer)
    assert package in line


def test_only_amds_wheels_leave_rocm_to_the_system():
    by_source = {
        stack.wheels: {row["library"] for row in expected(stack)}
        for stack in STACKS
        if stack.layout == "classic"
    }
    assert "libamdhip64.so" in by_source["amd"] - by_source["upstream"]


def test_every_row_names_a_source_of_the_file():
    named = [row["source"] for row in (*FOUND["expected"], FOUND["brought"])]
    used = {name for one in named for name in ([one] if isinstance(one, str) else one)}
    assert used == set(FOUND["sources"])
