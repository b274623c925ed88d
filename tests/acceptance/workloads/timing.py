"""Timing on a device: cold caches, events around each call, the median of each repeat.

In: a function that enqueues work. Out: seconds per call, one figure per repeat.
"""

import functools
import statistics
import time
from collections.abc import Callable

import torch

from workloads import device

# Twice the largest last-level cache there is (MI300X has 256 MiB, and its size is not reported).
WIPE_BYTES = 512 << 20
REST_S = 0.2
WINDOW_S = 0.03  # the power cap of an H200 was seen to act after about 50 ms
FEWEST_CALLS = 5
WARM_WIPES, WARM_CALLS = 60, 3
SOAK_S = 1.0


def repeats(
    function: Callable[[], object],
    *,
    count: int = 5,
    calls: int = 20,
    meet: Callable[[], object] = lambda: None,
) -> list[float]:
    """Median seconds of up to `calls` cold calls, `count` times over, each after a rest.

    Each repeat begins with `meet`: a barrier puts those of several devices at the same time.

    A full-power kernel on a full-power part meets the power cap within a fraction of a second, and then the
    figure is the regulator's: seen on an H200 at 700 W, bf16 products fell from 800 to 620 TFLOP/s and
    wavered by 14 %. Published figures, and thus the bounds, are of short runs; `sustained` tells the other.
    """
    if device().type == "cpu":
        function()
        once = functools.partial(_on_host, function)
    else:
        wipe = torch.empty(WIPE_BYTES, dtype=torch.uint8, device=device())
        once = functools.partial(_rested, function, calls, wipe)
    found = []
    for _ in range(count):
        meet()
        found.append(once())
    return found


def _rested(function: Callable[[], object], calls: int, wipe: torch.Tensor) -> float:
    torch.cuda.synchronize()
    time.sleep(REST_S)
    for _ in range(WARM_WIPES):  # clocks come up under a load that leaves the power budget alone
        wipe.zero_()
    warm_s = _on_device(function, WARM_CALLS, wipe)
    return _on_device(function, max(FEWEST_CALLS, min(calls, int(WINDOW_S / warm_s))), wipe)


def sustained(function: Callable[[], object], *, count: int = 5, calls: int = 20) -> list[float]:
    """The same without rests, after a second of the same load: what the power cap leaves of it."""
    if device().type == "cpu":
        return [_on_host(function) for _ in range(count)]
    wipe = torch.empty(WIPE_BYTES, dtype=torch.uint8, device=device())
    soak(function)
    return [_on_device(function, calls, wipe) for _ in range(count)]


def soak(function: Callable[[], object], seconds: float = SOAK_S) -> None:
    """Bring clocks and temperature to where a long job has them."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(10):
            function()
        torch.cuda.synchronize()


def _on_device(function: Callable[[], object], calls: int, wipe: torch.Tensor) -> float:
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(calls)]
    for start, end in events:
        wipe.zero_()  # also covers the host's time to launch what follows
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(float(start.elapsed_time(end)) for start, end in events) / 1e3


def _on_host(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
