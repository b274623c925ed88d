"""A torchrun program: jobs beside the plain ones, compiled or in 8 bits. In: JSON, job names -> flags.
Out: a JSON line.

The flags are those of trainers/train.py. The line is `{"records": {name: record}, "curves": {name:
verdict}}`. A job that raises has `{"error": text}` as its record, so that the other jobs are judged all the
same. Losses of 8 bits lie in a wider band around the reference curve than those of 32.
"""

import functools
import json
import sys

from workloads import trainer_jobs, trainers

sys.path.insert(0, str(trainers.FOLDER))

import train


def main(arguments: list[str]) -> None:
    """Run the jobs in their order."""
    with trainer_jobs.joined(arguments[0]) as (jobs, world, phases):
        records = {
            name: trainer_jobs.apart(functools.partial(train.job, options, world, phases, None), world)
            for name, options in jobs.items()
        }
    if world.rank == 0:
        verdicts = {name: trainer_jobs.judged(record) for name, record in records.items()}
        print(json.dumps({"records": records, "curves": verdicts}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
