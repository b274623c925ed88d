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

--seeds 1,2,3,4,5 trains both arms from each seed, and is the strongest of the three. One seed is one sample:
on H200s two equally exact kernels were 1.5 % apart from one seed, twice, and 0.1 to 0.4 % from four others.
The verdict is that of the differences of the last tenth, one for each seed: the interval that holds their
true mean with 95 % confidence (Student's t) must lie within --margin. An interval that reaches across it is
undecided: no pass, and more seeds make it narrower.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # run by path: find the rooms of trainers/ as train.py does, and not tools/ itself
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import loss_curve
from errors import RefusedError
from tools import launch

if TYPE_CHECKING:
    from collections.abc import Sequence

LOOK_S = 1.0  # a signal that comes just before a wait is seen when that wait ends
LEAST_SEEDS = 3  # for one spread, the interval of two seeds is 3.6 times as wide as that of three
# Quantile 0.975 of Student's t by degrees of freedom; for more than nine that of nine, which is the wider.
STUDENT_T = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def main(arguments: list[str]) -> int:
    """The exit code."""
    options = _parser().parse_args(arguments)
    return launch.exit_code("compare_runs.py", lambda: launch.judged(compare(options), options.out))


def compare(options: launch.Given) -> dict[str, Any]:
    """Run both arms, one after the other or side by side; controls after the first arm, where it ran."""
    first, second, *controls = _systems(options)
    if options.seeds:
        return _over_seeds(first, second, options)
    (one, *again), (other,) = _run([first, *controls], [second], options)
    curve = loss_curve.reference(one, options.band, measured=launch.timestamp())
    for record in (other, *again):
        loss_curve.comparable(curve, record)
    found = gap(one["losses"], other["losses"], curve.tail)
    limits = {
        arm.name: _control(arm.name, curve, record) for arm, record in zip(controls, again, strict=True)
    }
    verdict = loss_curve.judge(curve, other["losses"])
    if limits:
        verdict = dataclasses.replace(verdict, problems=_by_controls(curve, other, found, limits))
    return {
        "arms": [
            {"name": arm.name, **_facts(record)}
            for arm, record in zip((first, second, *controls), (one, other, *again), strict=True)
        ],
        "gap": found,
        "controls": limits,
        "rate_ratio": _rate(other) / _rate(one),
        "band": dataclasses.asdict(curve.band),
        "verdict": dataclasses.asdict(verdict),
    }


def _systems(options: launch.Given) -> list[launch.System]:
    """Both arms, then the controls. Raises RefusedError for flags that do not go together."""
    if len(options.arm) != 2:
        raise RefusedError(f"expected two --arm, got {len(options.arm)}")
    if options.beside and len(options.beside) != 2:
        raise RefusedError(f"--beside names a GPU for each arm: expected two, got {len(options.beside)}")
    systems = [launch.parse_system(text) for text in (*options.arm, *options.control)]
    names = [one.name for one in systems]
    if twice := [name for name in names if names.count(name) > 1]:
        raise RefusedError(f"two runs have the name {twice[0]}; give each --arm and --control its own")
    if options.seeds:
        _check_seeds(systems, options)
    return systems


def _check_seeds(systems: list[launch.System], options: launch.Given) -> None:
    if options.control:
        raise RefusedError("--seeds judges by several seeds and --control by one; give one of the two")
    if len(set(options.seeds)) < max(LEAST_SEEDS, len(options.seeds)):
        told = ",".join(map(str, options.seeds))
        raise RefusedError(f"--seeds: expected {LEAST_SEEDS} or more different seeds, got {told}")
    if any(word.split("=")[0] == "--seed" for one in systems for word in (*one.command, *options.flags)):
        raise RefusedError("--seeds gives each run its --seed; take --seed out of the arms and flags")
    if not 0 < options.margin < 1:
        raise RefusedError(f"--margin: expected a share between 0 and 1, got {options.margin:g}")


def _run(
    first: list[launch.System], second: list[launch.System], options: launch.Given
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The records of two lanes, which run one after the other or, with --beside, each on its GPU."""
    gpus = options.beside or [None, None]

    def lane(systems: list[launch.System], gpu: str | None) -> list[dict[str, Any]]:
        return [_record(launch.on_gpu(system, gpu), options) for system in systems]

    with ThreadPoolExecutor(2 if options.beside else 1) as pool:
        lanes = [pool.submit(lane, *each) for each in zip((first, second), gpus, strict=True)]
        while wait(lanes, timeout=LOOK_S).not_done:
            pass
        return lanes[0].result(), lanes[1].result()


def _over_seeds(first: launch.System, second: launch.System, options: launch.Given) -> dict[str, Any]:
    """Both arms from each seed: the differences, and what they say together."""
    lanes = [[_seeded(arm, seed) for seed in options.seeds] for arm in (first, second)]
    ones, others = _run(lanes[0], lanes[1], options)
    gaps, problems = [], []
    for seed, one, other in zip(options.seeds, ones, others, strict=True):
        curve = loss_curve.reference(one, options.band, measured=launch.timestamp())
        loss_curve.comparable(curve, other)
        gaps.append({"seed": seed, **gap(one["losses"], other["losses"], curve.tail)})
        problems += [f"seed {seed}: {problem}" for problem in loss_curve.unlearned(curve, other["losses"])]
    ends = [each["last"] for each in gaps]
    found = None if None in ends else mean_difference(ends)
    problems += _by_seeds(found, options.margin)
    return {
        "arms": [
            {"name": arm.name, **_facts(record)}
            for arm, record in zip((*lanes[0], *lanes[1]), (*ones, *others), strict=True)
        ],
        "seeds": gaps,
        "difference": found,
        "margin": options.margin,
        "rate_ratio": statistics.mean(map(_rate, others)) / statistics.mean(map(_rate, ones)),
        "verdict": {"problems": problems},
    }


def _seeded(arm: launch.System, seed: int) -> launch.System:
    return launch.System(f"{arm.name}-seed{seed}", (*arm.command, "--seed", str(seed)))


def mean_difference(differences: Sequence[float]) -> dict[str, float]:
    """The mean of paired differences, its standard error, and the 95 % confidence interval of the mean."""
    mean = statistics.mean(differences)
    error = statistics.stdev(differences) / len(differences) ** 0.5
    reach = STUDENT_T[min(len(differences) - 1, max(STUDENT_T))] * error
    return {"mean": mean, "standard_error": error, "low": mean - reach, "high": mean + reach}


def _by_seeds(found: dict[str, float] | None, margin: float) -> list[str]:
    """What is wrong with this mean of the differences between the last tenths."""
    if found is None:
        return ["no difference can be computed: not every run has all its losses as finite numbers"]
    low, high = found["low"], found["high"]
    if -margin <= low and high <= margin:
        return []
    told = f"the last losses differ by {found['mean']:+.2%} on average ({low:+.2%} to {high:+.2%}, 95 %)"
    if low > margin or high < -margin:
        return [f"{told}; the margin is {margin:.2%}"]
    return [f"undecided: {told}, which reaches across the margin of {margin:.2%}; give more --seeds"]


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


def _record(arm: launch.System, options: launch.Given) -> dict[str, Any]:
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
    """Relative differences of the second's losses.

    These are the largest, and those of the means of `tail` losses, for each tenth of the steps and for the
    last ones.
    """
    one, two = (
        [loss for loss in losses if loss is not None and math.isfinite(loss)] for losses in (first, second)
    )
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


def _seeds(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected whole numbers such as 1,2,3, got {text!r}") from error


def _parser() -> launch.Parser:
    parser = launch.parser(__doc__)
    add = parser.add_argument
    add("--arm", action="append", required=True, help="twice: what differs, as NAME: --ranks N FLAGS")
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
    add(
        "--seeds",
        type=_seeds,
        default=[],
        metavar="I,J,K",
        help="train both arms from each of these seeds, and judge the mean difference of their last tenth",
    )
    add(
        "--margin",
        type=float,
        default=0.01,
        help="with --seeds: largest difference that counts as none, as a share of the loss (default: 0.01)",
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
