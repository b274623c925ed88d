"""How long a collective takes, as nccl-tests means it: many in a row on the device, the slowest rank counts.

The host's launches are hidden behind a device-side spin that begins before them; one untimed collective
after the spin aligns the ranks on the device; then a start event, N collectives, an end event.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

REPEATS = 5
WINDOW_S = 0.2
MOST_CALLS = 200  # a stream holds about 1000 launches; beyond that the host waits and the spin hides nothing
FEWEST_CALLS = 5
WARM_UP = 3
SPIN_MARGIN = 1.5
SPIN_LEAST_S = 0.01


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


def in_stream(call: Callable[[], object], spin: Spin | None) -> list[float]:
    """Seconds per call on this rank, one figure per repeat."""
    if spin is None:
        return on_host(call)
    for _ in range(WARM_UP):
        call()
    launch_s, device_s = _estimate(call)
    calls = agreed(max(FEWEST_CALLS, min(MOST_CALLS, int(WINDOW_S / device_s))))
    hidden_s = SPIN_LEAST_S + SPIN_MARGIN * launch_s * calls
    return [_window(call, calls, lambda: spin(hidden_s)) for _ in range(REPEATS)]


def in_graph(call: Callable[[], object], spin: Spin, *, calls: int = 20) -> list[float]:
    """Seconds per call when `calls` of them are captured once and replayed: no launch cost at all."""
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
    windows = [_window(graph.replay, 1, lambda: spin(SPIN_LEAST_S)) for _ in range(REPEATS)]
    return [seconds / calls for seconds in windows]


def on_host(call: Callable[[], object], calls: int = 5) -> list[float]:
    """Wall-clock seconds per call, for devices without events."""
    call()
    figures = []
    for _ in range(REPEATS):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        figures.append((time.perf_counter() - start) / calls)
    return figures


def agreed(calls: int) -> int:
    """The same count on every rank, or they would wait for each other for ever."""
    count = torch.tensor([calls], device="cuda")
    dist.all_reduce(count, dist.ReduceOp.MIN)
    return int(count)


def _estimate(call: Callable[[], object]) -> tuple[float, float]:
    """(host seconds to launch one, seconds until it is done)."""
    launches = 10
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(launches):
        call()
    launched = time.perf_counter()
    torch.cuda.synchronize()
    return (launched - start) / launches, (time.perf_counter() - start) / launches


def _window(call: Callable[[], object], calls: int, spin: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    torch.cuda.synchronize()
    spin()
    call()
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def slowest(per_rank: list[list[float]]) -> list[float]:
    """For each repeat the slowest rank."""
    return [max(figures) for figures in zip(*per_rank, strict=True)]


def median(figures: list[float]) -> float:
    """The figure that stands for the repeats."""
    return statistics.median(figures)
