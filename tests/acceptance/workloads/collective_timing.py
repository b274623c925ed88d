"""How long a collective takes. In: a function that enqueues it. Out: seconds per call, one figure per repeat.

`eagerly` is BenchTime of nccl-tests' src/common.cu at its defaults (-n 20 -m 1 -z 0 -G 0): enqueue one call
and wait for it, barrier of the hosts, start the host's clock, enqueue 20 calls in a row, wait for the stream,
stop the clock. The time of one call is a twentieth of it, averaged over the ranks (-a 1). `in_graph` captures
the same calls in a graph, so its figure contains no launch from the host.
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
from workloads.time_limits import scaled

REPEATS = 5  # nccl-tests -N 5
ITERATIONS = 20
WARM_UP = 5
SPIN_S = 0.01
LIMIT_S = 60.0  # for all ranks to meet at the barrier

Call = Callable[[int], object]


class HostBarrier:
    """A barrier of microseconds between ranks of one host: each spins on counters in shared memory.

    A barrier on the devices would be one more collective, and with one over sockets the ranks start apart by
    the time of ten small collectives.
    """

    _made = itertools.count()  # numbers the barriers, which all ranks create in the same order

    def __init__(self, ranks: Ranks) -> None:
        key = f"barrier/{next(self._made)}"
        if ranks.rank == 0:
            file = os.memfd_create("stackcheck-barrier")  # without a file name that could be left behind
            os.ftruncate(file, 8 * ranks.size)
            ranks.store.set(key, f"/proc/{os.getpid()}/fd/{file}")
        else:
            file = os.open(ranks.store.get(key).decode(), os.O_RDWR)
        self._marks = memoryview(mmap.mmap(file, 8 * ranks.size)).cast("Q")
        self._rank, self._round = ranks.rank, 0

    def __call__(self) -> None:
        """Return when every rank has called. Raises `TimeoutError` with the ranks that did not."""
        self._round += 1
        self._marks[self._rank] = self._round
        limit_s = scaled(LIMIT_S)
        deadline = time.monotonic() + limit_s
        while min(self._marks) < self._round:
            if time.monotonic() > deadline:
                absent = [rank for rank, mark in enumerate(self._marks) if mark < self._round]
                raise TimeoutError(f"ranks {absent} did not reach the barrier within {limit_s:g} s")
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
    """A kernel that keeps the device busy for about a number of seconds.
    One cycle's length is measured first.
    """

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
        """Enqueue the kernel on the current stream."""
        torch.cuda._sleep(int(seconds * self.cycles_per_s))


def in_graph(call: Callable[[], object], spin: Spin, *, calls: int = ITERATIONS) -> list[float]:
    """Seconds per call for `calls` in a captured graph, replayed behind a spin that aligns the ranks."""
    call()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()  # RCCL cannot capture while an earlier collective is in flight (ROCm/rccl#2022)
    graph = torch.cuda.CUDAGraph()
    # The process group's watchdog thread queries events meanwhile, which would break a capture in global
    # mode.
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
    """For each repeat, the time of the slowest rank."""
    return [max(figures) for figures in zip(*per_rank, strict=True)]


def average(per_rank: list[list[float]]) -> list[float]:
    """For each repeat, the mean over the ranks, as nccl-tests reports it."""
    return [sum(figures) / len(figures) for figures in zip(*per_rank, strict=True)]
