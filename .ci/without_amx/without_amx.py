"""FP8 products as on a processor without AMX. In: nothing. Out: torch's emulation is in place of oneDNN.

torch asks the processor itself for AMX, and then oneDNN, whose limit (.ci/processors.py) leaves it no FP8
product: it refuses. A processor without AMX never asks oneDNN, so torch converts to float32 and multiplies.
torch calls `enter` at the end of its import, in each process that has this folder in PYTHONPATH.
"""

import warnings
from typing import Any

import torch

KEPT: list[torch.library.Library] = []


def enter() -> None:
    """Replace the product and its form with `out`."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells of a kernel that is replaced
        library.impl("_scaled_mm", _product, "CPU")
        library.impl("_scaled_mm.out", _into, "CPU")
    KEPT.append(library)


def _product(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, *rest: Any
) -> torch.Tensor:
    bias, _, dtype, _ = (*rest, None, None, None, None)[:4]  # torch leaves out what nobody gave
    found = (a.float() * scale_a) @ (b.float() * scale_b)
    return (found if bias is None else found + bias).to(dtype or a.dtype)


def _into(*given: Any, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(_product(*given))
