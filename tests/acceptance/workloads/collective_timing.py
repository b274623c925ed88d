"""How long a collective takes: eagerly by nccl-tests' protocol, and inside a captured graph.

`eagerly` is BenchTime of nccl-tests' src/common.cu at its defaults (-n 20 -m 1 -z 0 -G 0): one call is
enqueued and waited for, the hosts meet, the host's clock starts, 20 calls are enqueued in a row, one wait for
the stream, the clock stops; the time of one call is the twentieth part, averaged over the ranks (-a 1).
`in_graph` captures the same calls once: no launch at all is in its figure.
"""

import gc
import itertools
import mmap
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from workloads.ranks import Ranks

REPEATS = 5  # nccl-tests -N 5
ITERATIONS = 20
WARM_UP = 5
SPIN_S = 0.01
PATIENCE_S = 60.0

Call = Callable[[int], object]


class HostBarrier:
    """Ranks of one host meet within microseconds: counters in shared memory, and everyone spins on all.

    A barrier on the devices would be one more collective, and one over sockets skews the start by the time
    of ten small collectives.
    """

    _made = itertools.count()  # ranks make them in the same order, and every one has its own counters

    def __init__(self, ranks: Ranks) -> None:
        key = f"barrier/{next(self._made)}"
        if ranks.rank == 0:
            file = os.memfd_create("stackcheck-barrier")  # has no name that could be left behind
            os.ftruncate(file, 8 * ranks.size)
            ranks.store.set(key, f"/proc/{os.getpid()}/fd/{file}")
        else:
            file = os.open(ranks.store.get(key).decode(), os.O_RDWR)
        self._marks = memoryview(mmap.mmap(file, 8 * ranks.size)).cast("Q")
        self._rank, self._round = ranks.rank, 0

    def __call__(self) -> None:
        """Return when every rank has called as often. Raises `TimeoutError`, naming who stayed away."""
        self._round += 1
        self._marks[self._rank] = self._round
        deadline = time.monotonic() + PATIENCE_S
        while min(self._marks) < self._round:
            if time.monotonic() > deadline:
                absent = [rank for rank, mark in enumerate(self._marks) if mark < self._round]
                raise TimeoutError(f"ranks {absent} did not come within {PATIENCE_S:g} s")
            os.sched_yield()


def eagerly(call: Call, wait: Callable[[], object], barrier: Callable[[], object]) -> list[float]:
    """Seconds per call on this rank, one figure per repeat."""
    for iteration in range(WARM_UP):
        call(iteration)
    wait()
    gc.collect()
    gc.disable()
    try:
        return [_cycle(call, wait, barrier) for _ in range(REPEATS)]
    finally:
        gc.enable()


def _cycle(call: Call, wait: Callable[[], object], barrier: Callable[[], object]) -> float:
    call(0)
    wait()
    barrier()
    start = time.perf_counter()
    for iteration in range(ITERATIONS):
        call(iteration)
    wait()
    seconds = (time.perf_counter() - start) / ITERATIONS
    barrier()
    return seconds


class Spin:
    """A kernel that does nothing for about so many seconds, whatever one cycle of the device's counter is."""

    TRIAL_CYCLES = 10_000_000

    def __init__(self) -> None:
        torch.cuda._sleep(self.TRIAL_CYCLES)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(self.TRIAL_CYCLES)
        end.record()
        torch.cuda.synchronize()
        self.cycles_per_s = self.TRIAL_CYCLES / (start.elapsed_time(end) / 1e3)

    def __call__(self, seconds: float) -> None:
        """Enqueue it on the current stream."""
        torch.cuda._sleep(int(seconds * self.cycles_per_s))


def in_graph(call: Callable[[], object], spin: Spin, *, calls: int = ITERATIONS) -> list[float]:
    """Seconds per call when `calls` of them are captured and replayed behind a spin that aligns ranks."""
    call()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()  # RCCL cannot capture while an earlier collective is in flight (ROCm/rccl#2022)
    graph = torch.cuda.CUDAGraph()
    # The process group's watchdog thread asks for events meanwhile, which a global capture would not survive.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    graph.replay()
    return [_replayed(graph, spin) / calls for _ in range(REPEATS)]


def _replayed(graph: torch.cuda.CUDAGraph, spin: Spin) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    torch.cuda.synchronize()
    spin(SPIN_S)
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def slowest(per_rank: list[list[float]]) -> list[float]:
    """For each repeat the slowest rank."""
    return [max(figures) for figures in zip(*per_rank, strict=True)]


def average(per_rank: list[list[float]]) -> list[float]:
    """For each repeat the mean over the ranks, as nccl-tests reports it."""
    return [sum(figures) / len(figures) for figures in zip(*per_rank, strict=True)]
