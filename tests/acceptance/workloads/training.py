"""A torchrun program: several training jobs in one process group. In: JSON, job names -> flags.
Out: a JSON line.

The flags are those of trainers/train.py. One preflight comes first, unless --no-preflight follows the JSON.
The line is `{"preflight": {} or null, "records": {name: record}, "curves": {name: verdict}}`; starting torch
for each job would take most of the smoke tier's time. A job with a reference curve in trainers/curves is
judged against it here, because trainers/ is on the path. If the machine fails its preflight, no job starts
and `records` is empty.
"""

import dataclasses
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch

from workloads.time_limits import scaled

TRAINERS = Path(__file__).resolve().parents[3] / "trainers"
sys.path.insert(0, str(TRAINERS))

import loss_curve  # noqa: E402 - trainers/ has to be on the path first
import options as cli  # noqa: E402
import peaks  # noqa: E402
import preflight  # noqa: E402
import train  # noqa: E402
from phases import Phases  # noqa: E402
from world import joined_ranks  # noqa: E402


def main(arguments: list[str]) -> None:
    """Run the jobs in their order."""
    jobs = {name: cli.parse(flags) for name, flags in json.loads(arguments[0]).items()}
    first = next(iter(jobs.values()))
    phases = Phases(scaled(first.phase_limit_s))
    phases.enter("connect")
    with joined_ranks(first) as world:
        fitness = None
        if "--no-preflight" not in arguments:
            phases.enter("preflight")
            fitness = preflight.measure(world, peaks.find(world), fp8=first.precision.startswith("fp8"))
        records = {}
        for name, options in jobs.items() if not (fitness and fitness["problems"]) else ():
            records[name] = train.job(options, world, phases, fitness)
            release(gpu=world.gpu)
        verdicts = {name: judged(record) for name, record in records.items()}
    if world.rank == 0:
        print(json.dumps({"preflight": fitness, "records": records, "curves": verdicts}), flush=True)


def release(*, gpu: bool) -> None:
    """Give the memory of the last job back: the next one may need all of it, and has a peak of its own."""
    gc.collect()  # a model and its hooks hold each other
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def judged(record: dict[str, Any]) -> dict[str, Any] | None:
    """The verdict on a record's losses by the CPU's reference curve; None if this job has no curve."""
    path = TRAINERS / "curves" / "CPU" / f"{record['model']}-{record['size']}.json"
    if not path.exists() or loss_curve.job_of(record) != (curve := loss_curve.load(path)).job:
        return None
    return dataclasses.asdict(loss_curve.judge(curve, record["losses"]))


if __name__ == "__main__":
    main(sys.argv[1:])
