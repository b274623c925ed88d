"""Programs and functions that run on the devices: torch in, figures out, no pytest.

A function here is called in a worker that owns its device, or its module is a program for torchrun.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what reads an image runs in images without torch too
    import torch


def device() -> torch.device:
    """The one device this process may use: the first visible GPU, or the CPU."""
    import torch

    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def backend() -> str:
    """The collective backend of that device: `nccl` (RCCL answers to the same name) or `gloo`."""
    import torch

    return "nccl" if torch.cuda.is_available() else "gloo"
