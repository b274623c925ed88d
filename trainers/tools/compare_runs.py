"""Train one job in two ways, and judge the second loss curve by the first: for example FP8 by BF16.

    J="--size 8b --layers 4 --parallel zero1 --implementation fused --seq-len 2048 --global-batch 32"
    python trainers/tools/compare_runs.py --steps 500 --arm 'bf16: --ranks 4 --precision bf16'
        --arm 'fp8: --ranks 4 --precision fp8' -- $J

Out: one JSON line: the largest gap between the losses, the gap of the means of each tenth of the steps, the
ratio of the rates, and the verdict. Exit code 0: in the band. 1: outside, or an arm failed. 2: the arms are
different jobs, or the first one cannot be a reference. The shipped text is small: a wide model knows it by
heart after a hundred steps. --beside runs the arms at the same time, each on its own GPU. With --out each
arm's record is kept beside that file when it is done, and the same command does not run it again.

Rounding differences grow from step to step, so a long curve at a high learning rate leaves any narrow band,
also when the first arm only runs again. --control shows how far: it is the first arm with another rounding
(another attention backend, another number of ranks). With controls the verdict is not the band's: the mean of
the last tenth must be as near to the first arm's as that of the farthest control, and the model must have
learned. Give two or more: one may be near by chance.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # run by path: find the rooms of trainers/ as train.py does, and not tools/ itself
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import loss_curve
from errors import RefusedError
from tools import launch

if TYPE_CHECKING:
    from collections.abc import Sequence


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
    """Run both arms, one after the other or side by side; controls after the first arm, where it ran."""
    if len(options.arm) != 2:
        raise RefusedError(f"expected two --arm, got {len(options.arm)}")
    arms = [launch.parse_system(text) for text in (*options.arm, *options.control)]
    names = [arm.name for arm in arms]
    if twice := [name for name in names if names.count(name) > 1]:
        raise RefusedError(f"two runs have the name {twice[0]}; give each --arm and --control its own")
    gpus = options.beside or [None, None]
    if len(gpus) != 2:
        raise RefusedError(f"--beside names a GPU for each arm: expected two, got {len(gpus)}")
    lanes = ([arms[0], *arms[2:]], [arms[1]])

    def run(lane: list[launch.System], gpu: str | None) -> list[dict[str, Any]]:
        return [_record(launch.on_gpu(arm, gpu), options) for arm in lane]

    with ThreadPoolExecutor(2 if options.beside else 1) as pool:
        one, other = (pool.submit(run, lane, gpu) for lane, gpu in zip(lanes, gpus, strict=True))
        (first, *controls), (second,) = one.result(), other.result()
    curve = loss_curve.reference(first, options.band, measured=launch.timestamp())
    for record in (second, *controls):
        loss_curve.comparable(curve, record)
    found = gap(first["losses"], second["losses"], curve.tail)
    limits = {
        arm.name: _control(arm.name, curve, record) for arm, record in zip(arms[2:], controls, strict=True)
    }
    verdict = loss_curve.judge(curve, second["losses"])
    if limits:
        verdict = dataclasses.replace(verdict, problems=_by_controls(curve, second, found, limits))
    return {
        "arms": [
            {"name": arm.name, **_facts(record)}
            for arm, record in zip(arms, (first, second, *controls), strict=True)
        ],
        "gap": found,
        "controls": limits,
        "rate_ratio": _rate(second) / _rate(first),
        "band": dataclasses.asdict(curve.band),
        "verdict": dataclasses.asdict(verdict),
    }


def _control(name: str, curve: loss_curve.Curve, record: dict[str, Any]) -> dict[str, Any]:
    """How far this control is from the first arm. Raises RefusedError where it shows nothing."""
    if problems := loss_curve.unlearned(curve, record["losses"]):
        raise RefusedError(f"--control {name} is no measure: {'; '.join(problems)}")
    found = gap(curve.losses, record["losses"], curve.tail)
    if found["largest"] == 0:
        raise RefusedError(
            f"--control {name} has the losses of the first arm; let it round otherwise: --attention flash"
        )
    return found


def _by_controls(
    curve: loss_curve.Curve, record: dict[str, Any], found: dict[str, Any], limits: dict[str, Any]
) -> list[str]:
    """What is wrong with the second arm, beside runs of the first that round in another way."""
    problems = loss_curve.unlearned(curve, record["losses"])
    farthest = max(limits, key=lambda name: abs(limits[name]["last"]))
    limit = abs(limits[farthest]["last"])
    if found["last"] is not None and not abs(found["last"]) <= limit:
        means = f"its last {curve.tail} losses are {abs(found['last']):.2%} from the first arm's on average"
        problems.append(f"{means}; those of --control {farthest}, which is the farthest, {limit:.2%}")
    return problems


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


def gap(first: Sequence[float | None], second: Sequence[float | None], tail: int) -> dict[str, Any]:
    """Relative differences of the second's losses: the largest, and those of the means of `tail` losses, for
    each tenth of the steps and for the last ones.
    """
    one, two = ([loss for loss in losses if loss is not None] for losses in (first, second))
    if len(one) != len(first) or len(two) != len(second) or len(one) != len(two):
        return {"largest": None, "tenths": None, "last": None}
    tenths = [
        statistics.mean(two[step : step + tail]) / statistics.mean(one[step : step + tail]) - 1
        for step in range(0, len(one), tail)
    ]
    last = statistics.mean(two[-tail:]) / statistics.mean(one[-tail:]) - 1
    return {
        "largest": max(abs(b / a - 1) for a, b in zip(one, two, strict=True)),
        "tenths": tenths,
        "last": last,
    }


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
        "--control",
        action="append",
        default=[],
        help="the first arm with another rounding, NAME: --ranks N FLAGS; may be given several times",
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
