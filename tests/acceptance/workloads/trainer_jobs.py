"""Jobs of trainers/train.py, one after the other in the same ranks.

In: JSON, job names -> flags. Out: their options, and the world of the ranks.
"""

import contextlib
import functools
import gc
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from workloads import trainers
from workloads.time_limits import scaled

sys.path.insert(0, str(trainers.FOLDER))

import options as cli
from phases import Phases
from world import World, joined_ranks


@contextlib.contextmanager
def joined(text: str) -> Iterator[tuple[dict[str, cli.Options], World, Phases]]:
    """Join the ranks for these jobs; yields their options by name, the world, and the phases of a job."""
    jobs = {name: cli.parse(flags) for name, flags in json.loads(text).items()}
    first = next(iter(jobs.values()))
    if not torch.cuda.is_available():
        # Inductor needs a C++ compiler on a CPU, which an image need not have. The tracing is the same.
        torch.compile = functools.partial(torch.compile, backend="aot_eager")
    phases = Phases(scaled(first.phase_limit_s))
    phases.enter("connect")
    with joined_ranks(first) as world:
        yield jobs, world, phases


def apart(run: Callable[[], dict[str, Any]], world: World) -> dict[str, Any]:
    """Run one job without what an earlier one left; `{"error": text}` if it raised."""
    torch._dynamo.reset()
    gc.collect()  # a model and its hooks hold each other
    if world.gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        return run()
    # A border between jobs: any error of one is a failure of its check alone.
    except Exception:  # noqa: BLE001
        return {"error": traceback.format_exc()[-4000:]}
