"""A torchrun program: time collectives by size on bf16 data, then check the data once. One JSON line.

Arguments: operation names. The line is `{"figures": [{"op", "bytes", "mode", "seconds": [], "failures": []}],
"environment", "choices", "nvls", ...}`; `bytes` is the total array as nccl-tests counts it (per-rank count
times n for all_gather, reduce_scatter and all_to_all), `seconds` one figure a repeat, the slowest rank's.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from workloads import collective_cases as collectives
from workloads import collective_timing as timing
from workloads import nccl_log
from workloads.collective_data import Payload
from workloads.ranks import Ranks, joined

ELEMENT_BYTES = 2
SIZES = {
    "cuda": (64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30),
    "cpu": (64 << 10, 1 << 20),
}
PLATEAU = 4 << 30  # standard and soak tiers
GRAPHED = 1 << 20  # up to here the launch is a share of the time, and a graph shows the wire alone
CHECKED = {
    "all_reduce": collectives.all_reduce,
    "all_gather": collectives.all_gather,
    "reduce_scatter": collectives.reduce_scatter,
    "all_to_all": collectives.all_to_all,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("operations", nargs="+", choices=sorted(CHECKED))
    parser.add_argument("--largest", type=int, default=1 << 30, help="bytes")
    options = parser.parse_args()
    with joined() as ranks:
        spin = timing.Spin() if ranks.device.type == "cuda" else None
        mine = [f for op in options.operations for f in _curve(ranks, op, spin, options.largest)]
        everyone = ranks.collect(mine)
        if everyone is not None:
            print(json.dumps({"figures": _merged(everyone), **nccl_log.facts()}), flush=True)


def _curve(ranks: Ranks, op: str, spin: timing.Spin | None, largest: int) -> Iterator[dict[str, Any]]:
    sizes = [size for size in (*SIZES[ranks.device.type], PLATEAU) if size <= largest]
    if spin is None:
        sizes = [size for size in sizes if size in SIZES["cpu"]]
    for size in sizes:
        call = collective(ranks, op, size)
        yield {"op": op, "bytes": size, "mode": "stream", "seconds": timing.in_stream(call, spin)}
        if spin is not None and size <= GRAPHED and op == "all_reduce":
            yield {"op": op, "bytes": size, "mode": "graph", "seconds": timing.in_graph(call, spin)}
        if size < PLATEAU:  # the exact reference of 2^31 elements is in collective_values.py
            yield {"op": op, "bytes": size, "mode": "values", "failures": _values(ranks, op, size)}


def collective(ranks: Ranks, op: str, size: int) -> Callable[[], object]:
    """The timed call, on buffers of its own.

    An in-place sum repeated on the same buffer soon overflows to infinity; it moves the same bytes, and
    what the operation computes is checked apart by `_values`.
    """
    count = size // ELEMENT_BYTES
    whole = torch.zeros(count, dtype=torch.bfloat16, device=ranks.device)
    share = torch.zeros(count // ranks.size, dtype=torch.bfloat16, device=ranks.device)
    if op == "all_reduce":
        whole.normal_()
        return lambda: dist.all_reduce(whole)
    if op == "all_gather":
        share.normal_()
        return lambda: dist.all_gather_into_tensor(whole[: share.numel() * ranks.size], share)
    sent = torch.empty_like(whole).normal_()[: share.numel() * ranks.size]
    if op == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(share, sent)
    return lambda: dist.all_to_all_single(whole[: sent.numel()], sent)


def _values(ranks: Ranks, op: str, size: int) -> list[str]:
    """The same operation at the same size on exact data: speed without the right sum is worth nothing."""
    count = size // ELEMENT_BYTES // (1 if op == "all_reduce" else ranks.size)
    readings = CHECKED[op](ranks, Payload(count=count, dtype="bf16", trial=size.bit_length()))
    return [f"rank {ranks.rank}: {reading}" for reading in readings if not reading.passed]


def _merged(everyone: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [_over_ranks(list(figures)) for figures in zip(*everyone, strict=True)]


def _over_ranks(figures: list[dict[str, Any]]) -> dict[str, Any]:
    if figures[0]["mode"] == "values":
        return {**figures[0], "failures": [text for figure in figures for text in figure["failures"]]}
    return {**figures[0], "seconds": timing.slowest([figure["seconds"] for figure in figures])}


if __name__ == "__main__":
    main()
