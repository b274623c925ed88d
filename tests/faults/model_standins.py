"""What the mutants of model shapes run where a CPU lacks something. In: a check's function. Out: its report."""

from typing import Any
from unittest import mock

import torch

from workloads import convolution_halves


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
