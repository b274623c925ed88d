"""Run two images in turn on this node. In: two subjects. Out: for each metric, whether B is slower than A.

First A runs against itself: that tells how much one run differs from the next on this node, today. Then A
and B take turns. Each run is a new container with the same devices, so what a night, a chip or the room does
to one image it does to the other.
"""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stackcheck.engine.client import Engine
from stackcheck.errors import ChecksFailedError, ConfigurationError, MachineUnfitError
from stackcheck.files.atomic import write_atomically
from stackcheck.history import metrics, regressions
from stackcheck.policy import Tier
from stackcheck.suite import results, run
from stackcheck.suite.judged import measure
from stackcheck.suite.results import RunResult
from stackcheck.suite.subject import Subject

SPEED = "speed or busbw or bandwidth or throughput or latency"
ROUNDS = 5
Key = tuple[str, str, str]  # check, metric, unit
Values = dict[Key, tuple[float, regressions.Direction]]
ORDER = {"slower": 0, "noisy": 1, "equal": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairedMetric:
    """One metric of both images: a value for each run, and what they say."""

    check: str
    name: str
    unit: str
    itself: tuple[tuple[float, ...], tuple[float, ...]]
    a: tuple[float, ...]
    b: tuple[float, ...]
    pair: regressions.Pair


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairedRuns:
    """A paired comparison, slower metrics first."""

    a: str
    b: str
    rounds: int
    metrics: tuple[PairedMetric, ...]

    def slower(self) -> tuple[PairedMetric, ...]:
        """The metrics in which B is slower."""
        return tuple(each for each in self.metrics if each.pair.verdict == "slower")


def paired(
    a: Subject,
    b: Subject,
    engine: Engine,
    *,
    root: Path,
    tier: Tier,
    only: str = SPEED,
    rounds: int = ROUNDS,
    report: Callable[[str], None],
) -> PairedRuns:
    """Run A against itself, then A against B, `rounds` times each in turn; write build/paired/result.json.

    Raises:
        ChecksFailedError: A run has no valid result, a check failed without a figure, or none was measured.
        MachineUnfitError: A check found the machine unfit.
        ConfigurationError: The images are of two vendors.
    """
    if a.vendor != b.vendor:
        raise ConfigurationError(
            "the two images are for devices of two vendors",
            got=f"{a.vendor} and {b.vendor}",
            expected="two images that run on the same devices",
        )
    arms: dict[str, list[Values]] = defaultdict(list)
    turns = [(turn, arms_of) for arms_of in (("A", "A again"), ("A beside B", "B")) for turn in range(rounds)]
    for turn, names in turns:
        ordered = names if turn % 2 == 0 else names[::-1]  # neither side is always the first
        for name in ordered:
            report(f"pair: round {turn + 1} of {rounds}: {name}")
            subject = b if name == "B" else a
            arms[name].append(_measured(subject, engine, root, tier, only))
    found = PairedRuns(a=a.name, b=b.name, rounds=rounds, metrics=judged(arms))
    _write(found, root / "build" / "paired" / "result.json")
    return found


def _measured(subject: Subject, engine: Engine, root: Path, tier: Tier, only: str) -> Values:
    """The metrics of one run of the chosen checks."""
    out = root / "build" / "paired" / subject.name
    plan = run.plan(subject, tier=tier, root=root, out=out)
    # Twenty runs would hide the rounds.
    result = measure(plan, engine, out=out, report=lambda _line: None, only=only)
    _require_measured(result, subject.name, out)
    # Every metric of a result for which less or more is better.
    body = results.read_result_file(out / "run" / "result.json")
    found: Values = {}
    for check, rows in metrics.of(json.loads(body))["points"].items():
        for name, unit, value, repeats, direction, _, _ in rows:
            better = regressions.better(unit, direction)
            if better and repeats and value:
                found[check, name, unit] = value, better
    return found


def _require_measured(result: RunResult, name: str, out: Path) -> None:
    """A check that failed its bound has measured; one that failed otherwise has not."""
    unfit = [check.id for check in result.checks if check.outcome == "invalid"]
    if unfit:
        raise MachineUnfitError(
            "the machine was unfit during the pair, so nothing is compared",
            where=name,
            got=", ".join(unfit[:5]),
            expected="an idle and healthy machine",
            next_step="run the same command again there",
        )
    bad = [check.id for check in result.checks if check.outcome in {"failed", "error"} and not check.metrics]
    if bad or result.state != "finished":
        raise ChecksFailedError(
            "a run of the pair failed, so nothing is compared",
            where=name,
            got=", ".join(bad[:5]) or f"a run that is {result.state}",
            expected="checks that measure in both images",
            next_step=f"read {out / 'container.log'}",
        )


def judged(arms: Mapping[str, Sequence[Values]]) -> tuple[PairedMetric, ...]:
    """What the runs of all arms say of each metric that every run measured."""
    every = [values for arm in arms.values() for values in arm]
    keys = [key for key in every[0] if all(key in values for values in every)]
    if not keys:
        raise ChecksFailedError(
            "the chosen checks measured nothing that both images have",
            expected="checks with repeated figures of speed",
            next_step="choose others: --checks, an expression for pytest's -k",
        )
    metrics = [_metric(key, arms) for key in keys]
    return tuple(sorted(metrics, key=lambda each: (ORDER[each.pair.verdict], -each.pair.loss)))


def _metric(key: Key, arms: Mapping[str, Sequence[Values]]) -> PairedMetric:
    first, again, a, b = (
        tuple(values[key][0] for values in arms[name]) for name in ("A", "A again", "A beside B", "B")
    )
    direction = arms["A"][0][key][1]
    check, name, unit = key
    return PairedMetric(
        check=check,
        name=name,
        unit=unit,
        itself=(first, again),
        a=a,
        b=b,
        pair=regressions.paired(a, b, direction, again=(first, again)),
    )


def _write(found: PairedRuns, path: Path) -> None:
    write_atomically(path, (json.dumps(dataclasses.asdict(found), indent=2).encode(),))
