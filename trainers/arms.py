"""Train the same job in two ways and judge the second's loss by the first's: FP8 against BF16, for one.

    J="--size 8b --layers 4 --parallel zero1 --implementation fused --seq-len 2048 --global-batch 32"
    python trainers/arms.py --steps 500 --arm 'bf16: --ranks 4 --precision bf16'
        --arm 'fp8: --ranks 4 --precision fp8' -- $J

Out: one JSON line: the gap of the losses at its largest and over the last tenth, the ratio of the rates, and
the verdict. Exit code 0: in the band; 1: not, or an arm failed; 2: not one job, or the first arm makes no
reference. The text that is shipped is small: a wide model knows it by heart after a hundred steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
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
        result = compare(options)
    except RefusedError as error:
        print(f"arms.py: {error}", file=sys.stderr)
        return 2
    except systems.RunError as error:
        print(f"arms.py: {error}", file=sys.stderr)
        return 1
    line = json.dumps(result)
    if options.out:
        options.out.write_text(line + "\n")
    print(line)
    return 1 if result["verdict"]["problems"] else 0


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Run both arms in turn."""
    if len(options.arm) != 2:
        raise RefusedError(f"two arms make a comparison, got {len(options.arm)}")
    flags = [*COMMON, *options.flags, "--steps", str(options.steps)]
    places = [systems.system(text) for text in options.arm]
    first = systems.run(places[0], flags, timeout_s=options.timeout_s)
    curve = curves.reference(first, options.band, measured=systems.timestamp())
    second = systems.run(places[1], flags, timeout_s=options.timeout_s)
    curves.comparable(curve, second)
    verdict = curves.judge(curve, second["losses"])
    return {
        "arms": [
            {"name": place.name, **_facts(record)}
            for place, record in zip(places, (first, second), strict=True)
        ],
        "gap": gap(first["losses"], second["losses"], curve.tail),
        "rate_ratio": _rate(second) / _rate(first),
        "band": dataclasses.asdict(curve.band),
        "verdict": dataclasses.asdict(verdict),
    }


def gap(first: list[float | None], second: list[float | None], tail: int) -> dict[str, float | None]:
    """Relative differences of the second's losses: the largest, and of the means of the last ones."""
    if None in first + second or len(first) != len(second):
        return {"largest": None, "last": None}
    ends = [statistics.mean(losses[-tail:]) for losses in (first, second)]
    largest = max(abs(b / a - 1) for a, b in zip(first, second, strict=True))
    return {"largest": largest, "last": ends[1] / ends[0] - 1}


def _rate(record: dict[str, Any]) -> float:
    speed = record["performance"]
    return speed[f"{speed['unit']}_per_s_per_gpu"]


def _facts(record: dict[str, Any]) -> dict[str, Any]:
    names = ("world_size", "losses", "gradient_norms", "problems", "software")
    how = ("precision", "parallel", "implementation")
    facts = {name: record[name] for name in names} | {name: record["options"][name] for name in how}
    return facts | {"rate": _rate(record), "unit": record["performance"]["unit"]}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--arm", action="append", required=True, help="a place to run and what differs; twice (systems.py)")
    add("--steps", type=int, default=500)
    add("--band", type=band, default="2e-3:3e-2", help="relative half width, FIRST:LAST step")
    add("--timeout-s", type=float, default=1800, help="of one arm")
    add("--out", type=Path, help="write the result here too")
    add("flags", nargs="*", help="flags of train.py for both, after --")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
