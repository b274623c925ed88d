"""How fast one system is in another's terms: the ratio of the rates of their records, job by job.

    python benchmarks/training/ratio.py --ours mi250/*.json --theirs a100/*.json
    python benchmarks/training/ratio.py --ours new-stack.json --theirs old-stack.json

Records are what train.py wrote. A job is model, size, layers, precision and sequence; the microbatch may
differ, because each system is tuned by itself. Out: a Markdown table with the mean over the jobs, and beside
it the published figures: of these two devices, or else of the pairs that they compared.
Exit code 2: no job that both have.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run by path: find the rooms of trainers/ as train.py does
    sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "trainers"))

import rows
from errors import RefusedError
from tools.curve import read_record

METRICS = ("speed_ratio", "speed_ratio_one_head", "stack_ratio")
Job = tuple[str, ...]


def main(arguments: list[str]) -> int:
    """The exit code."""
    options = _parser().parse_args(arguments)
    try:
        ours, theirs = jobs(options.ours), jobs(options.theirs)
        print("\n".join(table(ours, theirs)))
    except RefusedError as error:
        print(f"ratio.py: {error}", file=sys.stderr)
        return 2
    return 0


def jobs(paths: list[Path]) -> dict[Job, dict[str, Any]]:
    """The records of one system by job. Raises RefusedError where one has no sound speed."""
    found: dict[Job, dict[str, Any]] = {}
    for path in paths:
        record = read_record(path)
        if record["problems"] or record["performance"] is None:
            raise RefusedError(f"{path}: no sound speed: {record['problems'] or 'nothing was timed'}")
        given = record["options"]
        names = ("model", "size", "layers", "precision")
        job = (*(str(given[name]) for name in names), str(record["plan"]["seq_len"]))
        if job in found:
            raise RefusedError(f"{path}: a second record of {' '.join(job)} on one side; keep one")
        found[job] = record
    devices = {record["device"]["model"] for record in found.values()}
    if len(devices) > 1:
        raise RefusedError(
            f"one side has several devices, {sorted(devices)}: expected the records of one system"
        )
    return found


def table(ours: dict[Job, dict[str, Any]], theirs: dict[Job, dict[str, Any]]) -> list[str]:
    """The lines: one a job, the mean, and what was published."""
    shared = sorted(set(ours) & set(theirs))
    if not shared:
        raise RefusedError(f"no job on both sides: {sorted(ours)} and {sorted(theirs)}")
    left, right = (next(iter(side.values())) for side in (ours, theirs))
    names = [f"{side['device']['model']} ({side['software']['torch']})" for side in (left, right)]
    lines = [f"| job | {names[0]} | {names[1]} | ratio |", "| --- | --- | --- | --- |"]
    ratios = []
    for job in shared:
        rates = [_rate(side[job]) for side in (ours, theirs)]
        ratios.append(rates[0] / rates[1])
        cells = (" ".join(word for word in job if word != "None"), *(f"{rate:,.0f}" for rate in rates))
        lines.append(f"| {' | '.join(cells)} | {ratios[-1]:.3f} |")
    lines.append(f"| mean of {len(ratios)} | | | {statistics.mean(ratios):.3f} |")
    lines += [f"only on one side: {' '.join(job)}" for job in sorted(set(ours) ^ set(theirs))]
    return [*lines, "", *published(left["device"]["model"], right["device"]["model"])]


def published(ours: str, theirs: str) -> list[str]:
    """The published ratios of these two devices; all of them where there is none."""
    every = [row for document in rows.load_rows().values() for row in document.rows if row.metric in METRICS]
    same = [row for row in every if (row.device, row.against) == (ours, theirs)]
    head = "published:" if same else "published, of other devices:"
    return [head, *(f"  {row.document} {row.id}: {row.middle:g} {row.unit}" for row in same or every)]


def _rate(record: dict[str, Any]) -> float:
    speed = record["performance"]
    return float(speed[f"{speed['unit']}_per_s_per_gpu"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for side, whose in (
        ("--ours", "of the system that is described"),
        ("--theirs", "of the system that it is compared with"),
    ):
        parser.add_argument(
            side, type=Path, nargs="+", required=True, metavar="RECORD", help=f"records {whose}"
        )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
