"""Train one job in two ways, and judge the second loss curve by the first: for example FP8 by BF16.

    J="--size 8b --layers 4 --parallel zero1 --implementation fused --seq-len 2048 --global-batch 32"
    python trainers/tools/compare_runs.py --steps 500 --arm 'bf16: --ranks 4 --precision bf16'
        --arm 'fp8: --ranks 4 --precision fp8' -- $J

Out: one JSON line: the largest gap between the losses, the gap over the last tenth, the ratio of the rates,
and the verdict. Exit code 0: in the band. 1: outside, or an arm failed. 2: the arms are different jobs, or
the first one cannot be a reference. The shipped text is small: a wide model knows it by heart after a hundred
steps. --beside runs the arms at the same time, each on its own GPU. With --out each arm's record is kept
beside that file when it is done, and the same command does not run it again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
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
    try:
        result = compare(options)
    except RefusedError as error:
        print(f"compare_runs.py: {error}", file=sys.stderr)
        return 2
    except launch.RunError as error:
        print(f"compare_runs.py: {error}", file=sys.stderr)
        return 1
    line = json.dumps(result)
    if options.out:
        options.out.write_text(line + "\n")
    print(line)
    return 1 if result["verdict"]["problems"] else 0


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Run both arms, one after the other or side by side."""
    if len(options.arm) != 2:
        raise RefusedError(f"expected two --arm, got {len(options.arm)}")
    arms = [launch.parse_system(text) for text in options.arm]
    if arms[0].name == arms[1].name:
        raise RefusedError(f"both --arm have the name {arms[0].name}; give two names")
    gpus = options.beside or [None, None]
    if len(gpus) != 2:
        raise RefusedError(f"--beside names a GPU for each arm: expected two, got {len(gpus)}")
    with ThreadPoolExecutor(2 if options.beside else 1) as pool:
        both = [
            pool.submit(_record, launch.on_gpu(arm, gpu), options)
            for arm, gpu in zip(arms, gpus, strict=True)
        ]
        first, second = (one.result() for one in both)
    curve = loss_curve.reference(first, options.band, measured=launch.timestamp())
    loss_curve.comparable(curve, second)
    verdict = loss_curve.judge(curve, second["losses"])
    return {
        "arms": [
            {"name": arm.name, **_facts(record)} for arm, record in zip(arms, (first, second), strict=True)
        ],
        "gap": gap(first["losses"], second["losses"], curve.tail),
        "rate_ratio": _rate(second) / _rate(first),
        "band": dataclasses.asdict(curve.band),
        "verdict": dataclasses.asdict(verdict),
    }


def _record(arm: launch.System, options: argparse.Namespace) -> dict[str, Any]:
    """The record of this arm: kept beside --out by an earlier call of the same job, or run now."""
    flags = [*launch.COMPARABLE, *options.flags, "--steps", str(options.steps)]
    path = options.out.with_suffix(f".{arm.name}.json") if options.out else None
    if path is not None and path.exists():
        kept: dict[str, Any] = json.loads(path.read_text())
        if kept["job"] == [*arm.command, *flags]:
            return kept
    record = {**launch.run(arm, flags, timeout_s=options.timeout_s), "job": [*arm.command, *flags]}
    if path is not None and len(record["losses"]) == options.steps:  # SIGTERM leaves a record of fewer
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(record))
        partial.rename(path)
    return record


def gap(first: list[float | None], second: list[float | None], tail: int) -> dict[str, float | None]:
    """Relative differences of the second's losses: the largest, and that of the means of the last losses."""
    one, two = ([loss for loss in losses if loss is not None] for losses in (first, second))
    if len(one) != len(first) or len(two) != len(second) or len(one) != len(two):
        return {"largest": None, "last": None}
    ends = [statistics.mean(losses[-tail:]) for losses in (one, two)]
    largest = max(abs(b / a - 1) for a, b in zip(one, two, strict=True))
    return {"largest": largest, "last": ends[1] / ends[0] - 1}


def _rate(record: dict[str, Any]) -> float:
    speed = record["performance"]
    return float(speed[f"{speed['unit']}_per_s_per_gpu"])


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
    add(
        "--arm",
        action="append",
        required=True,
        help="twice: a system and what differs, NAME: --ranks N FLAGS",
    )
    add(
        "--beside",
        type=lambda text: text.split(","),
        metavar="I,J",
        help="run both arms at the same time, the first on GPU I and the second on GPU J, with a rank each",
    )
    add("--steps", type=int, default=500, help="steps of each arm")
    add(
        "--band", type=loss_curve.Band.parse, default="2e-3:3e-2", help="relative half width, FIRST:LAST step"
    )
    add("--timeout-s", type=float, default=1800, help="longest run of one arm")
    add("--out", type=Path, help="write the result here too")
    add("flags", nargs="*", help="flags of train.py for both arms, after --")
    return parser


if __name__ == "__main__":
    launch.stop_runs_on_sigterm()
    sys.exit(main(sys.argv[1:]))
