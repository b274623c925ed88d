"""The checks of compiled code and of packages, as the suite runs them, at sizes of a CPU. Nothing runs here.

Triton's interpreter runs its kernels, so TRITON_INTERPRET=1 must be set before this module is imported.
"""

# ruff: noqa: E501 - a table of faults reads in rows
import functools
from typing import Any
from unittest import mock

import package_standins
from kernel_checks import Check
from workloads import compiled_gradients, compiled_models, package_layers, triton_kernels

SHAPES = ((136, 72, 96),)


class Tuner:
    """The tuner measures on a GPU only: here it takes the second tile."""

    @staticmethod
    def tuned(a: Any, b: Any, out: Any) -> None:
        triton_kernels.multiply(a, b, out, triton_kernels.TILES[1])


def _kernels(group: str) -> dict[str, Any]:
    small = mock.patch.object(triton_kernels, "SHAPES", SHAPES)  # the interpreter is slow
    with small, mock.patch.object(triton_kernels, "tuned", Tuner.tuned):
        return triton_kernels.check(group)


# name: (check of the suite, what it runs)
CHECKS: dict[str, tuple[str, Check]] = {
    **{f"compiled {family}": ("test_compiled.py::test_compiled_models", functools.partial(compiled_models.check, family)) for family in compiled_models.FAMILIES},
    "compiled norms": ("test_compiled.py::test_compiled_norms_sharing_a_table", compiled_gradients.norms),
    "compiled functions": ("test_compiled.py::test_compiled_sums_in_place", compiled_gradients.functions),
    **{f"triton {group}": ("test_compiled.py::test_triton_kernels", functools.partial(_kernels, group)) for group in triton_kernels.GROUPS},
    **{f"layers of {package}": ("test_packages.py::test_package_layers", functools.partial(package_standins.layers, package)) for package in package_layers.PACKAGES},
}  # fmt: skip
