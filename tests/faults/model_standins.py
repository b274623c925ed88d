"""What mutants of model shapes run where a CPU lacks something. In: a check's function. Out: a report."""

from typing import Any
from unittest import mock

import torch

from workloads import arch, convolution_halves, fp8_recipes, large_models

SMALL = 1 << 16


class Cost:
    """What a healthy convolution costs: halves take half of the time and of the memory."""

    @staticmethod
    def seconds(dtype: torch.dtype) -> float:
        return dtype.itemsize * 1e-3

    @staticmethod
    def peak_bytes(dtype: torch.dtype) -> float:
        return dtype.itemsize * 1e6


def halves() -> dict[str, Any]:
    """As test_convolution_halves judges them."""

    def cost(_problem: object, _layout: object, dtype: torch.dtype) -> tuple[float, float]:
        return Cost.seconds(dtype), Cost.peak_bytes(dtype)

    with mock.patch.object(convolution_halves, "_cost", cost):
        return convolution_halves.check("bf16")


def beyond(operation: str) -> dict[str, Any]:
    """As test_sizes_of_models judges it, with a limit and pieces of a CPU."""
    with mock.patch.object(large_models, "PIECE", SMALL // 4):
        return large_models.check(operation, SMALL)


def fp8_of_recipes() -> dict[str, Any]:
    """As test_fp8_recipes judges them on an architecture with 8-bit matrix units."""
    with mock.patch.object(arch, "fp8", return_value=torch.float8_e4m3fn):
        return fp8_recipes.check()
