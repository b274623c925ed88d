"""Move one job between systems every K steps through its checkpoints, and judge its loss curve.

    J="--size tiny --data text --global-batch 8"
    python trainers/tools/handoff.py --folder SHARED --every 20 --steps 80 --system 'host: --device cpu'
        --system 'gpus: --ranks 4 --device cuda' -- $J

The systems take turns; each segment resumes from the checkpoint of the segment before. The reference is
--reference, or else an uninterrupted run on the first system. Out: one JSON line with segments, losses and
verdict. Exit code 0: in the band. 1: outside, or a segment failed. 2: not comparable.
"""

from __future__ import annotations

import dataclasses
import itertools
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
    return launch.exit_code("handoff.py", lambda: launch.judged(alternate(options), options.out))


def alternate(options: launch.Given) -> dict[str, Any]:
    """Run the reference if none is given, then every segment, and judge the segments as one curve."""
    if options.folder.exists() and any(options.folder.iterdir()):
        raise RefusedError(
            f"{options.folder} is not empty, and the job would resume from it; name an empty --folder"
        )
    systems = [launch.parse_system(text) for text in options.system]
    curve = loss_curve.load(options.reference) if options.reference else _uninterrupted(systems[0], options)
    records = []
    ends = [*range(options.every, options.steps, options.every), options.steps]
    for until, system in zip(ends, itertools.cycle(systems), strict=False):
        found = segment(system, until, options)
        loss_curve.comparable(curve, found)
        if found["problems"] or found["last_step"] != until:
            raise RefusedError(
                f"{system.name} ended at step {found['last_step']}, expected {until}: {found['problems']}"
            )
        records.append({**found, "system": system.name})
        print(f"{system.name}: steps {found['first_step']} to {until}", file=sys.stderr, flush=True)
    losses = loss_curve.joined(records)
    verdict = dataclasses.asdict(loss_curve.judge(curve, losses))
    return {"segments": [_facts(record) for record in records], "losses": losses, "verdict": verdict}


def segment(system: launch.System, until: int, options: launch.Given) -> dict[str, Any]:
    """The record of the steps from the newest checkpoint to `until`."""
    flags = ["--steps", str(options.steps), "--until", str(until), "--checkpoint", str(options.folder)]
    return launch.run(system, [*launch.COMPARABLE, *options.flags, *flags], timeout_s=options.timeout_s)


def _uninterrupted(system: launch.System, options: launch.Given) -> loss_curve.Curve:
    flags = [*launch.COMPARABLE, *options.flags, "--steps", str(options.steps)]
    found = launch.run(system, flags, timeout_s=options.timeout_s)
    return loss_curve.reference(found, options.band, measured=launch.timestamp())


def _facts(record: dict[str, Any]) -> dict[str, Any]:
    names = ("system", "first_step", "last_step", "world_size", "phases_s", "checkpoint_s", "software")
    return {name: record[name] for name in names} | {"device": record["device"]["model"]}


def _parser() -> launch.Parser:
    parser = launch.parser(__doc__)
    add = parser.add_argument
    turns = "twice or more: NAME: --ranks N FLAGS, or NAME: @COMMAND"
    add("--system", action="append", required=True, help=turns)
    add("--every", type=int, required=True, help="steps of one segment")
    add("--steps", type=int, required=True, help="steps of the whole job")
    add("--folder", type=Path, required=True, help="an empty folder that every system can reach")
    add("--reference", type=Path, help="a reference that curve.py wrote")
    width = "if there is no --reference: relative half width, FIRST:LAST step"
    add("--band", type=loss_curve.Band.parse, default="1e-3:2e-2", help=width)
    add("--timeout-s", type=float, default=1800, help="longest run of one segment")
    add("--out", type=Path, help="write the result here too")
    add("flags", nargs="*", help="flags of train.py, after --")
    return parser


if __name__ == "__main__":
    launch.stop_runs_on_sigterm()
    sys.exit(main(sys.argv[1:]))
