"""train.py that also says every FP8 scale of its run. In: train.py's flags. Out: its record, with a list of
scales for each rank.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "trainers"))

import torch
import torch.distributed as dist
from torchao.float8 import float8_scaling_utils, fsdp_utils

import record
import train

scales: list[float] = []
make = record.make


def heard(cast: Any) -> Any:
    """The cast to FP8, whose scale is kept."""

    def hear(tensor: torch.Tensor, scale: torch.Tensor, *rest: Any, **more: Any) -> Any:
        scales.append(float(scale.to_local() if hasattr(scale, "to_local") else scale))
        return cast(tensor, scale, *rest, **more)

    return hear


def shared(run: Any) -> dict[str, Any]:
    """The record, while all ranks are still there."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, scales)
    return {**make(run), "scales": ranks}


for module in (float8_scaling_utils, fsdp_utils):
    module.hp_tensor_and_scale_to_float8 = heard(module.hp_tensor_and_scale_to_float8)
record.make = shared
sys.exit(train.main(sys.argv[1:]))
