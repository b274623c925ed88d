"""Jobs of trainers/train.py, one after the other in the same ranks.

In: JSON, job names -> flags. Out: their options, and the world of the ranks.
"""

import contextlib
import dataclasses
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

import loss_curve
import options as cli
from phases import Phases
from world import World, joined_ranks

# Where the loss falls fastest, around step 36, chance decides. With torchao's scale for each tensor, one, two
# and four ranks on CPUs deviate there by 2.0, 1.0 and 1.9 %, and two H200s by 2.2 %, or 7.5 half widths. Over
# four other seeds, jobs that gather weights in 8 bits and in 16 deviate alike.
WIDER_IN_8_BITS = 15.0


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


def release(*, gpu: bool) -> None:
    """Give the memory of the last job back: the next one may need all of it, and has a peak of its own."""
    gc.collect()  # a model and its hooks hold each other
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def judged(record: dict[str, Any]) -> dict[str, Any] | None:
    """The verdict on a record's losses by the CPU's reference curve; None if this job has no curve."""
    if "error" in record:
        return None
    path = trainers.FOLDER / "curves" / "CPU" / f"{record['model']}-{record['size']}.json"
    if not path.exists() or loss_curve.job_of(record) != (curve := loss_curve.load(path)).job:
        return None
    if record["options"]["precision"].startswith("fp8"):
        wide = {name: WIDER_IN_8_BITS * width for name, width in dataclasses.asdict(curve.band).items()}
        curve = dataclasses.replace(curve, band=loss_curve.Band(**wide))
    return dataclasses.asdict(loss_curve.judge(curve, record["losses"]))


def apart(run: Callable[[], dict[str, Any]], world: World) -> dict[str, Any]:
    """Run one job without what an earlier one left; `{"error": text}` if it raised."""
    torch._dynamo.reset()
    release(gpu=world.gpu)
    try:
        return run()
    # A border between jobs: any error of one is a failure of its check alone.
    except Exception:  # noqa: BLE001
        return {"error": traceback.format_exc()[-4000:]}
