"""Switch one job between systems every K steps, through its checkpoints, and judge its loss curve.

    J="--size tiny --data text --global-batch 8"
    python trainers/handoff.py --folder SHARED --every 20 --steps 80 --system 'host: --device cpu'
        --system 'gpus: --ranks 4 --device cuda' -- $J

Segments go round over the systems; each resumes from the last one's checkpoint. The reference is --reference,
or the uninterrupted run of the first system. Out: one JSON line with segments, losses and verdict. Exit code
0: in the band; 1: not, or a segment failed; 2: cannot be compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import curves
import systems
from curve import COMMON, band
from errors import RefusedError


def main(arguments: list[str]) -> int:
    """The exit code."""
    options = _parser().parse_args(arguments)
    try:
        result = alternate(options)
    except RefusedError as error:
        print(f"handoff.py: {error}", file=sys.stderr)
        return 2
    except systems.RunError as error:
        print(f"handoff.py: {error}", file=sys.stderr)
        return 1
    line = json.dumps(result)
    if options.out:
        options.out.write_text(line + "\n")
    print(line)
    return 1 if result["verdict"]["problems"] else 0


def alternate(options: argparse.Namespace) -> dict[str, Any]:
    """Run the reference if there is none, then every segment, and judge them as one curve."""
    if options.folder.exists() and any(options.folder.iterdir()):
        raise RefusedError(f"{options.folder} is not empty: its checkpoints would be taken for this job's")
    places = [systems.system(text) for text in options.system]
    curve = curves.load(options.reference) if options.reference else _uninterrupted(places[0], options)
    records = []
    ends = [*range(options.every, options.steps, options.every), options.steps]
    for until, place in zip(ends, itertools.cycle(places), strict=False):
        found = segment(place, until, options)
        curves.comparable(curve, found)
        if found["problems"] or found["last_step"] != until:
            raise RefusedError(f"{place.name} ended at step {found['last_step']}: {found['problems']}")
        records.append({**found, "system": place.name})
        print(f"{place.name}: steps {found['first_step']} to {until}", file=sys.stderr, flush=True)
    losses = curves.joined(records)
    verdict = dataclasses.asdict(curves.judge(curve, losses))
    return {"segments": [_facts(record) for record in records], "losses": losses, "verdict": verdict}


def segment(place: systems.System, until: int, options: argparse.Namespace) -> dict[str, Any]:
    """The record of the steps from the newest checkpoint to `until`."""
    flags = ["--steps", str(options.steps), "--until", str(until), "--checkpoint", str(options.folder)]
    return systems.run(place, [*COMMON, *options.flags, *flags], timeout_s=options.timeout_s)


def _uninterrupted(place: systems.System, options: argparse.Namespace) -> curves.Curve:
    flags = [*COMMON, *options.flags, "--steps", str(options.steps)]
    found = systems.run(place, flags, timeout_s=options.timeout_s)
    return curves.reference(found, options.band, measured=systems.timestamp())


def _facts(record: dict[str, Any]) -> dict[str, Any]:
    names = ("system", "first_step", "last_step", "world_size", "phases_s", "checkpoint_s", "software")
    return {name: record[name] for name in names} | {"device": record["device"]["model"]}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--system", action="append", required=True, help="a place to run; twice or more (systems.py)")
    add("--every", type=int, required=True, help="steps of a segment")
    add("--steps", type=int, required=True, help="steps in all")
    add("--folder", type=Path, required=True, help="empty folder that every system sees")
    add("--reference", type=Path, help="a file of curve.py")
    add("--band", type=band, default="1e-3:2e-2", help="where no --reference says it")
    add("--timeout-s", type=float, default=1800, help="of one segment")
    add("--out", type=Path, help="write the result here too")
    add("flags", nargs="*", help="flags of train.py, after --")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
