"""A torchrun program: several training jobs in one process group. In: JSON, job names -> flags.
Out: a JSON line.

The flags are those of trainers/train.py. One preflight comes first, unless --no-preflight follows the JSON.
The line is `{"preflight": {} or null, "records": {name: record}, "curves": {name: verdict}}`; starting torch
for each job would take most of the smoke tier's time. A job with a reference curve in trainers/curves is
judged against it here, because trainers/ is on the path. If the machine fails its preflight, no job starts
and `records` is empty.
"""

import json
import sys

from workloads import trainer_jobs, trainers
from workloads.time_limits import scaled

sys.path.insert(0, str(trainers.FOLDER))

import options as cli
import peaks
import preflight
import train
from phases import Phases
from world import joined_ranks


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
            trainer_jobs.release(gpu=world.gpu)
        verdicts = {name: trainer_jobs.judged(record) for name, record in records.items()}
    if world.rank == 0:
        print(json.dumps({"preflight": fitness, "records": records, "curves": verdicts}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
