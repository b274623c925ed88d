"""Which of AMD's variables an image sets, and that each has a source; no other vendor has any."""

from __future__ import annotations

from pathlib import Path

import pytest

from stackcheck.matrix import resolve
from stackcheck.vendors import environment

STACKS = resolve.load_stacks(Path(__file__).resolve().parents[3])


@pytest.mark.parametrize(
    ("torch", "archs", "expected"),
    [
        ("2.13.0", ["gfx942"], {"HIP_FORCE_DEV_KERNARG", "ROCBLAS_USE_HIPBLASLT"}),
        ("2.13.0", ["gfx90a", "gfx942"], {"HIP_FORCE_DEV_KERNARG"}),
        (
            "2.9.1",
            ["gfx942", "gfx950"],
            {"HIP_FORCE_DEV_KERNARG", "ROCBLAS_USE_HIPBLASLT", "DISABLE_ADDMM_CUDA_LT"},
        ),
        ("2.12.1", ["gfx90a"], {"HIP_FORCE_DEV_KERNARG"}),
    ],
)
def test_an_image_sets_what_belongs_to_its_torch_and_architectures(
    torch: str, archs: list[str], expected: set[str]
) -> None:
    assert set(environment.of_image("amd", torch, archs)) == expected


def test_what_amds_recipes_set_differently_is_left_to_the_job() -> None:
    left = {one.name for one in environment.variables("amd") if len(one.values) > 1}
    assert left
    assert all(not left & set(stack.env) for stack in STACKS)


def test_every_row_has_a_source_and_the_matrix_may_overrule_it() -> None:
    assert all(one.source and one.because for one in environment.variables("amd"))
    assert all(one.source and one.note for one in environment.names("amd"))
    assert all(
        "HIP_FORCE_DEV_KERNARG" in stack.env for stack in STACKS if stack.vendor == "amd" and stack.torch
    )


def test_no_other_vendor_and_no_stack_without_torch_gets_any() -> None:
    assert environment.variables("nvidia") == environment.variables("cpu") == ()
    names = {one.name for one in environment.variables("amd")}
    others = [stack for stack in STACKS if stack.vendor != "amd" or stack.torch is None]
    assert all(not names & set(stack.env) for stack in others)
