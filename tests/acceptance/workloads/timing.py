"""Time a function on a device, with cold caches and events around each call.
In: a function that enqueues work.

Out: the median seconds per call, one figure per repeat.
"""

import functools
import statistics
import time
from collections.abc import Callable

import torch

from workloads import device

# Twice the largest last-level cache (MI300X has 256 MiB, which no library reports).
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
    rest_s: float = REST_S,
    meet: Callable[[], object] = lambda: None,
) -> list[float]:
    """Median seconds of up to `calls` cold calls, `count` times, each time after a rest.

    What only moves data stays below the power cap, and needs no rest.

    Each repeat begins with `meet`; with a barrier there, several devices start at the same time.

    At full power a device reaches its power cap within a fraction of a second, and then the power regulator
    decides the speed: on an H200 at 700 W, bf16 products fell from 800 to 620 TFLOP/s and varied by 14 %.
    Published figures, and so the bounds, are from short runs; `sustained` measures at the power cap.
    """
    if device().type == "cpu":
        function()
        once = functools.partial(_on_host, function)
    else:
        wipe = torch.empty(WIPE_BYTES, dtype=torch.uint8, device=device())
        once = functools.partial(_rested, function, calls, wipe, rest_s)
    found = []
    for _ in range(count):
        meet()
        found.append(once())
    return found


def _rested(function: Callable[[], object], calls: int, wipe: torch.Tensor, rest_s: float) -> float:
    torch.cuda.synchronize()
    time.sleep(rest_s)
    for _ in range(WARM_WIPES):  # raise the clocks with a load that stays below the power cap
        wipe.zero_()
    warm_s = _on_device(function, WARM_CALLS, wipe)
    return _on_device(function, max(FEWEST_CALLS, min(calls, int(WINDOW_S / warm_s))), wipe)


def sustained(function: Callable[[], object], *, count: int = 5, calls: int = 20) -> list[float]:
    """The same without rests and after a second of load, so at the power cap."""
    if device().type == "cpu":
        return [_on_host(function) for _ in range(count)]
    wipe = torch.empty(WIPE_BYTES, dtype=torch.uint8, device=device())
    soak(function)
    return [_on_device(function, calls, wipe) for _ in range(count)]


def soak(function: Callable[[], object], seconds: float = SOAK_S) -> None:
    """Bring clocks and temperature to the values of a long job."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(10):
            function()
        torch.cuda.synchronize()


def _on_device(function: Callable[[], object], calls: int, wipe: torch.Tensor) -> float:
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(calls)]
    for start, end in events:
        wipe.zero_()  # also hides the host's time for the next launches
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(float(start.elapsed_time(end)) for start, end in events) / 1e3


def _on_host(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
