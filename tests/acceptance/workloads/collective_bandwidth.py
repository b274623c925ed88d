"""A torchrun program: time collectives by size on bf16 data, and check the data. In: operation names.
Out: a JSON line.

The line is `{"figures": [{"op", "bytes", "moved", "mode", "seconds": [], "failures": []}]}`. `moved` is the
size of the whole array as nccl-tests counts it: `bytes`, except that each rank's share is rounded down.
`seconds` has one time per repeat. The modes: `eager` calls the library directly, as nccl-tests does (on a
CPU, torch); `torch` is the same protocol through torch.distributed; `fp32` is that with the same bytes as
float32; `graph` is a captured graph; `values` checks the data.
"""

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from workloads import collective_cases as collectives
from workloads import collective_data as data
from workloads import collective_library as library
from workloads import collective_timing as timing
from workloads import speed_conditions
from workloads.collective_data import Payload
from workloads.gates import exact
from workloads.ranks import Ranks, joined

SIZES = {"cuda": speed_conditions.COLLECTIVE_BYTES, "cpu": (64 << 10, 1 << 20)}
PLATEAU, GRAPHED = speed_conditions.PLATEAU_BYTES, speed_conditions.GRAPHED_BYTES
LATE_S = 0.3
# Only reductions compute, so only they depend on the type; these sizes are bound by the links.
WIDE = ("all_reduce", "reduce_scatter")
WIDE_BYTES = {"cuda": (64 << 20, 256 << 20), "cpu": (1 << 20,)}
PROVEN = 64 << 20  # up to this size, the result of the library's own call is checked too
CHECKED = {
    "all_reduce": collectives.all_reduce,
    "all_gather": collectives.all_gather,
    "reduce_scatter": collectives.reduce_scatter,
    "all_to_all": collectives.all_to_all,
}


@dataclass(frozen=True)
class Bench:
    """What all measurements of this rank share."""

    ranks: Ranks
    sent: torch.Tensor
    received: torch.Tensor
    barrier: timing.HostBarrier
    direct: library.Communicator | None  # None on a CPU

    def wait(self) -> None:
        """Wait until the device has finished what was enqueued; gloo calls return finished."""
        if self.ranks.device.type == "cuda":
            torch.cuda.current_stream().synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("operations", nargs="+", choices=sorted(CHECKED))
    parser.add_argument("--largest", type=int, default=1 << 30, help="bytes")
    options = parser.parse_args()
    with joined() as ranks:
        figures = every_figure(ranks, options.operations, options.largest)
        if figures is not None:
            print(json.dumps({"figures": figures}), flush=True)


def every_figure(ranks: Ranks, operations: list[str], largest: int) -> list[dict[str, Any]] | None:
    """Measure everything; returns the figures of all ranks on rank 0, None elsewhere."""
    sizes = sizes_of(ranks.device.type, largest)
    made = bench(ranks, max(sizes), direct=True)
    mine = [f for op in operations for size in sizes for f in _figures(made, op, size)]
    wide = [size for size in WIDE_BYTES[ranks.device.type] if size in sizes]
    mine += [_in_fp32(made, op, size) for op, size in itertools.product(WIDE, wide) if op in operations]
    barrier = {"op": "barrier", "bytes": 0, "moved": 0}
    mine.append({**barrier, "mode": "values", "failures": barrier_holds(ranks)})
    mine.append({**barrier, "mode": "torch", "seconds": _eagerly(made, lambda _: dist.barrier())})
    if made.direct is not None:
        made.direct.close()
    everyone = ranks.collect(mine, about="figures")
    return None if everyone is None else [_over_ranks(list(f)) for f in zip(*everyone, strict=True)]


def sizes_of(kind: str, largest: int) -> list[int]:
    """The named sizes up to the largest."""
    return [size for size in (*SIZES[kind], *([PLATEAU] if kind == "cuda" else [])) if size <= largest]


def bench(ranks: Ranks, largest: int, *, direct: bool) -> Bench:
    """Buffers of normal data, a barrier, and with `direct` the library itself, if the device has one."""
    sent, received = (
        torch.empty(largest // library.ELEMENT_BYTES, dtype=torch.bfloat16, device=ranks.device).normal_()
        for _ in range(2)
    )
    made = None
    if ranks.device.type == "cuda" and direct:
        torch.cuda.synchronize()
        torch.cuda.set_stream(torch.cuda.Stream())  # the default stream waits for every other one
        made = library.Communicator(ranks, torch.cuda.current_stream().cuda_stream)
    return Bench(ranks, sent, received, timing.HostBarrier(ranks), made)


def _figures(bench: Bench, op: str, size: int) -> Iterator[dict[str, Any]]:
    planned = library.plan(op, size, bench.ranks.size)
    figure = {"op": op, "bytes": size, "moved": planned.total_bytes}
    through_torch = torch_call(bench, op, planned)
    if bench.direct is None:
        yield {**figure, "mode": "eager", "seconds": _eagerly(bench, through_torch)}
    else:
        call = bench.direct.caller(op, planned, bench.sent, bench.received)
        yield {**figure, "mode": "eager", "seconds": _eagerly(bench, call)}
        yield {**figure, "mode": "torch", "seconds": _eagerly(bench, through_torch)}
        if size <= PROVEN:
            yield {**figure, "mode": "values", "failures": proven(bench, op, planned)}
        if size <= GRAPHED:
            seconds = timing.in_graph(lambda: through_torch(0), timing.Spin())
            yield {**figure, "mode": "graph", "seconds": seconds}
    if size < PLATEAU:  # the exact reference of 2^31 elements is in collective_values.py
        yield {**figure, "mode": "values", "failures": _values(bench.ranks, op, size)}


def _in_fp32(bench: Bench, op: str, size: int) -> dict[str, Any]:
    """The same bytes through torch, as half the number of elements of twice the width."""
    planned = library.plan(op, size // 2, bench.ranks.size)
    sent, received = (buffer.view(torch.float32) for buffer in (bench.sent, bench.received))
    call = torch_call(dataclasses.replace(bench, sent=sent, received=received), op, planned)
    moved = 2 * planned.total_bytes
    return {"op": op, "bytes": size, "moved": moved, "mode": "fp32", "seconds": _eagerly(bench, call)}


def _eagerly(bench: Bench, call: timing.Call) -> list[float]:
    return timing.eagerly(call, bench.wait, bench.barrier)


def barrier_holds(ranks: Ranks) -> list[str]:
    """Whether no rank leaves the barrier before the last rank has reached it."""
    late = ranks.rank == ranks.size - 1
    if late:
        time.sleep(LATE_S)
        ranks.store.set("came late", "1")
    dist.barrier()
    left = late or ranks.store.check(["came late"])
    return [] if left else [f"rank {ranks.rank} left the barrier before rank {ranks.size - 1} came"]


def torch_call(bench: Bench, op: str, planned: library.Plan) -> Callable[[int], object]:
    """The same collective through torch, which has no out-of-place all-reduce.

    A sum that is repeated on one buffer soon overflows to infinity. It moves the same bytes, and the results
    of the operation are checked separately.
    """
    total = max(planned.sent, planned.received)
    steps = max(1, bench.sent.numel() // total)

    def views(iteration: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = total * (iteration % steps)
        return bench.received[start : start + planned.received], bench.sent[start : start + planned.sent]

    return {
        "all_reduce": lambda i: dist.all_reduce(views(i)[0]),
        "all_gather": lambda i: dist.all_gather_into_tensor(*views(i)),
        "reduce_scatter": lambda i: dist.reduce_scatter_tensor(*views(i)),
        "all_to_all": lambda i: dist.all_to_all_single(*views(i)),
    }[op]


def proven(bench: Bench, op: str, planned: library.Plan) -> list[str]:
    """Run the timed call once on exact data; it is out of place, so it must not change its input."""
    ranks, payload = bench.ranks, Payload(count=planned.count, dtype="bf16", trial=planned.sent.bit_length())
    sent = data.values(payload, ranks, ranks.rank, planned.sent).bfloat16()
    received = torch.full((planned.received,), float("nan"), dtype=torch.bfloat16, device=ranks.device)
    if bench.direct is None:
        raise AssertionError("there is no library to call on this device")
    before = sent.clone()
    bench.direct.caller(op, planned, sent, received)(0)
    bench.wait()
    found = (
        exact(received, expected(op, ranks, payload), name=f"library's {op}"),
        exact(sent, before, name="its input"),
    )
    return [f"rank {ranks.rank}: {reading}" for reading in found if not reading.passed]


def expected(op: str, ranks: Ranks, payload: Payload) -> torch.Tensor:
    """What this rank must hold after the operation."""
    mine, everyone = ranks.rank * payload.count, range(ranks.size)
    if op == "all_reduce":
        return collectives.reduced(payload, ranks, "sum")
    if op == "reduce_scatter":
        return collectives.reduced(payload, ranks, "sum", count=payload.count, start=mine)
    start = mine if op == "all_to_all" else 0
    return torch.cat([data.values(payload, ranks, rank, payload.count, start) for rank in everyone])


def _values(ranks: Ranks, op: str, size: int) -> list[str]:
    """Run the same operation at the same size on exact data, and check the result."""
    count = library.plan(op, size, ranks.size).count
    readings = CHECKED[op](ranks, Payload(count=count, dtype="bf16", trial=size.bit_length()))
    return [f"rank {ranks.rank}: {reading}" for reading in readings if not reading.passed]


def _over_ranks(figures: list[dict[str, Any]]) -> dict[str, Any]:
    if figures[0]["mode"] == "values":
        return {**figures[0], "failures": [text for figure in figures for text in figure["failures"]]}
    over = timing.slowest if figures[0]["mode"] == "graph" else timing.average
    return {**figures[0], "seconds": over([figure["seconds"] for figure in figures])}


if __name__ == "__main__":
    main()
