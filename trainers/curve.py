"""Record a reference loss curve, or judge a curve against one.

    python trainers/curve.py record --out trainers/curves/CPU/llama-tiny.json -- --size tiny --data text
    python trainers/curve.py judge --reference trainers/curves/CPU/llama-tiny.json RECORD [RECORD …]

`record` runs the job on --system and writes the reference; flags that make devices comparable are added.
`judge` takes records of train.py, the segments of one run in any order. Out: one JSON line. Exit code 0: in
the band; 1: not; 2: not comparable.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import curves
import systems
from errors import RefusedError

# Inputs drawn on the CPU, so that another device starts from the same weights.
COMMON = ["--portable", "--no-digest", "--no-backend-check"]


def main(arguments: list[str]) -> int:
    """The exit code."""
    options = _parser().parse_args(arguments)
    try:
        return record(options) if options.verb == "record" else judge(options)
    except RefusedError as error:
        print(f"curve.py: {error}", file=sys.stderr)
        return 2
    except systems.RunError as error:
        print(f"curve.py: {error}", file=sys.stderr)
        return 1


def record(options: argparse.Namespace) -> int:
    """Run the job, write its reference."""
    where = systems.system(options.system)
    found = systems.run(where, [*COMMON, *options.flags], timeout_s=options.timeout_s)
    curve = curves.reference(found, options.band, measured=systems.timestamp())
    curves.save(curve, options.out)
    print(json.dumps({"reference": str(options.out), "first": curve.losses[0], "floor": curve.floor}))
    return 0


def judge(options: argparse.Namespace) -> int:
    """Compare; the verdict as one line."""
    curve = curves.load(options.reference)
    records = [_record(path) for path in options.records]
    for found in records:
        curves.comparable(curve, found)
    verdict = curves.judge(curve, curves.joined(records))
    print(json.dumps(dataclasses.asdict(verdict)))
    return 1 if verdict.problems else 0


def _record(path: Path) -> dict[str, Any]:
    lines = [line for line in path.read_text().splitlines() if line.startswith("{")]
    if not lines:
        raise RefusedError(f"{path} holds no record of train.py")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def band(text: str) -> curves.Band:
    """FIRST:LAST, relative."""
    first, _, last = text.partition(":")
    return curves.Band(first=float(first), last=float(last))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("record", help="run a job and write its curve as a reference")
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--system", default="here: --ranks 1", help="where it runs; see systems.py")
    one.add_argument("--band", type=band, default="1e-3:2e-2", help="relative half width, FIRST:LAST step")
    one.add_argument("--timeout-s", type=float, default=3600)
    one.add_argument("flags", nargs="*", help="flags of train.py, after --")
    two = verbs.add_parser("judge", help="judge records against a reference")
    two.add_argument("--reference", type=Path, required=True)
    two.add_argument("records", type=Path, nargs="+", metavar="RECORD")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
