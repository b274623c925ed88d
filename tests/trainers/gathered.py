"""train.py that also says how many bytes its all-gathers made. In: train.py's flags. Out: its record, with
`gathered_bytes`.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "trainers"))

import torch
import torch.distributed as dist

import record
import train

counted: list[int] = []
make = record.make


def count(gather: Any) -> Any:
    """The collective, whose output is counted."""

    def gather_and_count(output: torch.Tensor, *rest: Any, **more: Any) -> Any:
        counted.append(output.nbytes)
        return gather(output, *rest, **more)

    return gather_and_count


def with_bytes(run: Any) -> dict[str, Any]:
    """The record, with what was counted before it."""
    found = sum(counted)
    return {**make(run), "gathered_bytes": found}


for name in ("all_gather_into_tensor", "all_gather_single"):  # FSDP2 calls the second from torch 2.13 on
    if hasattr(dist, name):
        setattr(dist, name, count(getattr(dist, name)))
record.make = with_bytes
sys.exit(train.main(sys.argv[1:]))
