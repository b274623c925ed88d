"""A torchrun program: the speed of every pair of ranks, and the library's choices. In: operation names. Out:
a JSON line.

The line is `{"pairs": [{"from", "to", "seconds": [], "failures": []}], "bytes", "environment", "files",
"choices", "nvls", "warnings", "library"}`, with --timed BYTES also the figures of
`collective_bandwidth.py` up to that size. On a GPU the suites time them in another launch, because here the
library writes its choices to a log at every call, which costs as much as a small collective; a gate, which
wants one launch, asks for no such lines.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from workloads import collective_bandwidth as bandwidth
from workloads import collective_data as data
from workloads import collective_library as library
from workloads import nccl_log, synchronize
from workloads.collective_data import Guarded, Payload
from workloads.collective_timing import HostBarrier
from workloads.ranks import Ranks, joined

PAIR_BYTES = {"cuda": 64 << 20, "cpu": 256 << 10}
REPEATS, ITERATIONS = 3, 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("operations", nargs="+", choices=sorted(bandwidth.CHECKED))
    parser.add_argument("--timed", type=int, default=0, metavar="BYTES", help="the largest size")
    options = parser.parse_args()
    with joined() as ranks:
        # The communicator of all ranks must exist before any pair uses it.
        dist.all_reduce(torch.zeros(1, device=ranks.device))
        barrier = HostBarrier(ranks)
        pairs = itertools.permutations(range(ranks.size), 2)
        mine = [figure for sender, receiver in pairs for figure in _pair(ranks, barrier, sender, receiver)]
        if ranks.device.type == "cuda" and not options.timed:
            _every_choice(ranks, options.operations)
        figures = bandwidth.every_figure(ranks, options.operations, options.timed) if options.timed else None
        everyone = ranks.collect(mine)
        if everyone is not None:
            found = {"pairs": [one for pairs in everyone for one in pairs], "bytes": _bytes(ranks)}
            print(json.dumps({**found, "figures": figures, **nccl_log.facts()}), flush=True)


def _bytes(ranks: Ranks) -> int:
    return PAIR_BYTES[ranks.device.type]


def _pair(ranks: Ranks, barrier: HostBarrier, sender: int, receiver: int) -> Iterator[dict[str, Any]]:
    """Time one pair while all other ranks wait at the barrier, so that the links are idle.
    The receiver reports.
    """
    payload = Payload(count=_bytes(ranks) // 2, dtype="bf16", trial=sender)
    taking_part = ranks.rank in (sender, receiver)
    if taking_part:
        out, values = Guarded(payload.count, payload, ranks), data.values(payload, ranks, sender)
        buffer = values.bfloat16() if ranks.rank == sender else out.view
        kind, peer = (dist.isend, receiver) if ranks.rank == sender else (dist.irecv, sender)
        _exchange(kind, buffer, peer)
    seconds = []
    for _ in range(REPEATS):
        barrier()
        start = time.perf_counter()
        if taking_part:
            for _ in range(ITERATIONS):
                _exchange(kind, buffer, peer)
            synchronize()
        seconds.append((time.perf_counter() - start) / ITERATIONS)
    barrier()
    if ranks.rank == receiver:
        failures = [str(reading) for reading in out.readings(values) if not reading.passed]
        yield {"from": sender, "to": receiver, "seconds": seconds, "failures": failures}


def _exchange(kind: Callable[..., object], buffer: torch.Tensor, peer: int) -> None:
    """Send or receive in a batch of one: otherwise NCCL creates a communicator for each pair."""
    for work in dist.batch_isend_irecv([dist.P2POp(kind, buffer, peer)]):
        work.wait()


def _every_choice(ranks: Ranks, operations: list[str]) -> None:
    """Run each operation once at each size, so that the log has the library's choices."""
    sizes = bandwidth.sizes_of("cuda", max(bandwidth.SIZES["cuda"]))
    bench = bandwidth.bench(ranks, max(sizes), direct=False)
    for op, size in itertools.product(operations, sizes):
        bandwidth.torch_call(bench, op, library.plan(op, size, ranks.size))(0)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
