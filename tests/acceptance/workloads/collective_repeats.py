"""The same reduction on the same data, many times. In: ranks. Out: how many results had other bits.

A sum of floating-point numbers depends on its order. A library that changes the order from call to call makes
runs that cannot be repeated (NVIDIA/nccl#1497). Where a switch adds (multicast), the order is the switch's.
"""

from typing import Any

import torch
import torch.distributed as dist

from workloads import operands
from workloads.collective_data import DTYPES
from workloads.gates import bits
from workloads.ranks import Ranks

REPEATS = 50
KINDS = ("fp16", "bf16")
BYTES = {"cuda": 8 << 20, "cpu": 64 << 10}
OPERATIONS = ("all_reduce", "reduce_scatter")


def run(ranks: Ranks) -> list[dict[str, Any]] | None:
    """For each operation and dtype `{"op", "dtype", "bytes", "repeats", "different"}`.
    Rank 0 has the worst rank's.
    """
    mine = [_figure(ranks, op, dtype) for op in OPERATIONS for dtype in KINDS]
    everyone = ranks.collect(mine, about="repeats")
    if everyone is None:
        return None
    return [max(same, key=lambda figure: figure["different"]) for same in zip(*everyone, strict=True)]


def _figure(ranks: Ranks, op: str, dtype: str) -> dict[str, Any]:
    size, kind = BYTES[ranks.device.type], DTYPES[dtype]
    sent = operands.normal(size // kind.itemsize // ranks.size * ranks.size, dtype=kind, seed=1 + ranks.rank)
    first = bits(_once(op, sent, ranks))
    different = torch.zeros((), dtype=torch.int64, device=ranks.device)
    for _ in range(REPEATS - 1):
        different += (bits(_once(op, sent, ranks)) != first).any()
    return {"op": op, "dtype": dtype, "bytes": size, "repeats": REPEATS, "different": int(different)}


def _once(op: str, sent: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    if op == "all_reduce":
        out = sent.clone()
        dist.all_reduce(out)
        return out
    share = torch.empty_like(sent[: sent.numel() // ranks.size])
    dist.reduce_scatter_tensor(share, sent)
    return share
