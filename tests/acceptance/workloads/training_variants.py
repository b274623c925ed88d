"""A torchrun program: jobs beside the plain ones, compiled or in 8 bits. In: JSON, job names -> flags.
Out: a JSON line.

The flags are those of trainers/train.py. The line is `{"records": {name: record}, "curves": {name:
verdict}}`. A job that raises has `{"error": text}` as its record, so that the other jobs are judged all the
same. Losses of 8 bits lie in a wider band around the reference curve than those of 32.
"""

import dataclasses
import functools
import json
import sys
from typing import Any

from workloads import trainer_jobs, trainers

sys.path.insert(0, str(trainers.FOLDER))

import loss_curve
import train

# Where the loss falls fastest, around step 36, chance decides. With torchao's scale for each tensor, one, two
# and four ranks on CPUs deviate there by 2.0, 1.0 and 1.9 %, and two H200s by 2.2 %, or 7.5 half widths. Over
# four other seeds, jobs that gather weights in 8 bits and in 16 deviate alike.
WIDER_IN_8_BITS = 15.0


def main(arguments: list[str]) -> None:
    """Run the jobs in their order."""
    with trainer_jobs.joined(arguments[0]) as (jobs, world, phases):
        records = {
            name: trainer_jobs.apart(functools.partial(train.job, options, world, phases, None), world)
            for name, options in jobs.items()
        }
    if world.rank == 0:
        verdicts = {name: judged(record) for name, record in records.items()}
        print(json.dumps({"records": records, "curves": verdicts}), flush=True)


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


if __name__ == "__main__":
    main(sys.argv[1:])
