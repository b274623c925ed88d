"""The checks in the shapes of models beside those of `kernel_checks`. Nothing runs here."""

# ruff: noqa: E501 - a table of faults reads in rows
import functools
from typing import Any

import kernel_standins as standins
import model_standins
from kernel_checks import Check
from workloads import attention_models, attention_packed, graph_processes, large_models


def _or_refusal(check: Check) -> dict[str, Any]:
    """A check's report; what it raises because of a refusal is a failure."""
    try:
        return check()
    except AssertionError as error:
        return {"cases": [{"failures": [str(error)]}]}


def _models_by_package() -> dict[str, Any]:
    with standins.package():
        return attention_models.check("package", "fp16", "smoke")


def _packed_by_package() -> dict[str, Any]:
    with standins.package():
        return attention_packed.check("package")


_FLASH = functools.partial(attention_models.check, "flash", "bf16", "smoke")

# name: (check of the suite, what it runs)
CHECKS: dict[str, tuple[str, Check]] = {
    "attention of models": ("test_attention.py::test_attention_of_models", functools.partial(attention_models.check, "default", "bf16", "smoke")),
    "attention of models by flash": ("test_attention.py::test_attention_of_models", functools.partial(_or_refusal, _FLASH)),
    "attention of models by package": ("test_attention.py::test_attention_of_models", _models_by_package),
    "packed members": ("test_attention.py::test_packed_members", functools.partial(attention_packed.check, "mask")),
    "convolution halves": ("test_kernel_speed.py::test_convolution_halves", model_standins.halves),
    **{f"large {name}": ("test_kernels.py::test_sizes_of_models", functools.partial(model_standins.beyond, name)) for name in large_models.OPERATIONS},
    "fp8 recipes": ("test_kernels.py::test_fp8_recipes", model_standins.fp8_of_recipes),
    "graph in new processes": ("test_kernels.py::test_graph_in_new_processes", functools.partial(graph_processes.check, "fp32", 24)),
    "packed members by package": ("test_attention.py::test_packed_members", _packed_by_package),
}  # fmt: skip
