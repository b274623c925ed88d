"""Code that runs on the devices, without pytest. In: JSON arguments. Out: JSON results.

A worker process that owns its device calls the functions; some modules are programs for torchrun.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # image.py also runs in images without torch
    import torch


def device() -> torch.device:
    """The device of this process: its current GPU, or the CPU."""
    import torch

    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def synchronize() -> None:
    """Wait until the device has finished; calls on a CPU return finished."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def backend() -> str:
    """The collective backend of that device: `nccl` (also the name of RCCL) or `gloo`."""
    import torch

    return "nccl" if torch.cuda.is_available() else "gloo"
