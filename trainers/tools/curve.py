"""Record a reference loss curve, or judge a curve against one.

    python trainers/tools/curve.py record --out trainers/curves/CPU/llama-tiny.json -- --size tiny --data text
    python trainers/tools/curve.py judge --reference trainers/curves/CPU/llama-tiny.json RECORD [RECORD …]

`record` runs the job on --system and writes its curve as a reference; it adds the flags that make devices
comparable. `judge` reads records of train.py: the segments of one job, in any order. Out: one JSON line. Exit
code 0: in the band. 1: outside, or the job failed. 2: not comparable, or no reference.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run by path: find the rooms of trainers/ as train.py does, and not tools/ itself
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import loss_curve
from errors import RefusedError
from tools import launch


def main(arguments: list[str]) -> int:
    """The exit code."""
    options = _parser().parse_args(arguments)
    work = record_reference if options.verb == "record" else judge
    return launch.exit_code("curve.py", lambda: work(options))


def record_reference(options: launch.Given) -> int:
    """Run the job and write its reference."""
    system = launch.parse_system(options.system)
    found = launch.run(system, [*launch.COMPARABLE, *options.flags], timeout_s=options.timeout_s)
    if options.record:
        options.record.write_text(json.dumps(found) + "\n")
    curve = loss_curve.reference(found, options.band, measured=launch.timestamp())
    loss_curve.save(curve, options.out)
    print(json.dumps({"reference": str(options.out), "first": curve.losses[0], "floor": curve.floor}))
    return 0


def judge(options: launch.Given) -> int:
    """Compare the records with the reference; print the verdict."""
    curve = loss_curve.load(options.reference)
    records = [read_record(path) for path in options.records]
    for found in records:
        loss_curve.comparable(curve, found)
    verdict = loss_curve.judge(curve, loss_curve.joined(records))
    print(json.dumps(dataclasses.asdict(verdict)))
    return 1 if verdict.problems else 0


def read_record(path: Path) -> dict[str, Any]:
    """The record in what train.py wrote to stdout or to --record."""
    lines = [line for line in path.read_text().splitlines() if line.startswith("{")]
    if not lines:
        raise RefusedError(f"{path}: expected a record of train.py (a line that begins with {{), found none")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _parser() -> launch.Parser:
    parser = launch.parser(__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("record", help="run a job and write its curve as a reference")
    one.add_argument("--out", type=Path, required=True, help="file of the reference")
    one.add_argument("--system", default="here: --ranks 1", help="NAME: --ranks N FLAGS, or NAME: @COMMAND")
    one.add_argument(
        "--band", type=loss_curve.Band.parse, default="1e-3:2e-2", help="relative half width, FIRST:LAST step"
    )
    one.add_argument("--record", type=Path, help="keep the run's record here too, for `judge` by another one")
    one.add_argument("--timeout-s", type=float, default=3600, help="longest run")
    one.add_argument("flags", nargs="*", help="flags of train.py, after --")
    two = verbs.add_parser("judge", help="judge records against a reference")
    two.add_argument("--reference", type=Path, required=True, help="file that `record` wrote")
    two.add_argument("records", type=Path, nargs="+", metavar="RECORD")
    return parser


if __name__ == "__main__":
    launch.stop_runs_on_sigterm()
    sys.exit(main(sys.argv[1:]))
