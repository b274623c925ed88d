"""The most memory of a processor that torch holds, and what stays. In: a body. Out: bytes.

The profiler sees each allocation and each release of the thread that it runs in. So its sums are as exact as
the counts of a device's caching allocator, and repeat to the byte.
"""

import contextlib
import gc
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile


@dataclass
class Held:
    """Bytes beyond those at the begin: the most at once, and those that are left after the body."""

    peak: float = 0.0
    left: float = 0.0


@contextlib.contextmanager
def watched() -> Iterator[Held]:
    """Count what the body holds. What a collection of garbage frees is not left."""
    held = Held()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        yield held
        gc.collect()
    assert seen.profiler is not None
    events = [one for one in seen.profiler.kineto_results.events() if one.name() == "[memory]"]
    steps = [one.nbytes() for one in sorted(events, key=lambda one: one.start_ns())]
    sums = list(itertools.accumulate(steps, initial=0))
    held.peak, held.left = float(max(sums)), float(sums[-1])
