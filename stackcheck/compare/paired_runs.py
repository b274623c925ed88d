"""Run two images in turn on this node, or gate one by a certified one.

In: two subjects. Out: for each metric, whether B is slower than A.

First A runs against itself: that tells how much one run differs from the next on this node, today. Then A
and B take turns. Each run is a new container with the same devices, so what a night, a chip or the room does
to one image it does to the other. Bounds allow the slowest chip of a model, so an image that is 5 % slower
can pass them on a good chip; a pair finds 2 %, and what it found is signed into the certificate.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stackcheck import vendors
from stackcheck.certificate.for_host import Wanted
from stackcheck.certificate.keyring import Pinned
from stackcheck.certificate.pull import pulled_subject
from stackcheck.certificate.verify import Verified, verify
from stackcheck.engine.client import Engine
from stackcheck.errors import ChecksFailedError, ConfigurationError, MachineUnfitError
from stackcheck.files.atomic import write_atomically
from stackcheck.history import metrics, regressions
from stackcheck.matrix import matrix
from stackcheck.oci.tags import label
from stackcheck.policy import Tier
from stackcheck.suite import results, run
from stackcheck.suite.judged import JudgedRun, measure
from stackcheck.suite.results import RunResult
from stackcheck.suite.subject import Subject

if TYPE_CHECKING:
    from stackcheck.flow import FlowSettings


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
    """What the runs of all arms say of each metric that every run measured.

    Raises:
        ChecksFailedError: There is no such metric.
    """
    every = [values for arm in arms.values() for values in arm]
    keys = [key for key in every[0] if all(key in values for values in every)]
    if not keys:
        raise ChecksFailedError(
            "the chosen checks measured nothing that both images have",
            expected="checks with repeated figures of speed",
            next_step="choose others: --checks, an expression for pytest's -k",
        )
    metrics = [_of_arms(key, arms) for key in keys]
    return tuple(sorted(metrics, key=lambda each: (ORDER[each.pair.verdict], -each.pair.loss)))


def _of_arms(key: Key, arms: Mapping[str, Sequence[Values]]) -> PairedMetric:
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


def certified(reference: str, settings: FlowSettings, public_key: Pinned) -> Verified:
    """The certified image that gates others on this host.

    Raises:
        CertificateError: It is not certified for this host.
    """
    return verify(reference, this_host(settings), public_key=public_key, plain_http=settings.plain_http)


def this_host(settings: FlowSettings) -> Wanted:
    """What a certificate has to say to count on this host."""
    host = vendors.host(settings.vendor)
    return Wanted(
        device_model=host.devices[0].model if host.devices else "none",
        driver=host.driver,
        devices=len(host.devices),
    )


def gate(
    candidate: Subject,
    judged: JudgedRun,
    reference: Verified,
    engine: Engine,
    *,
    settings: FlowSettings,
    report: Callable[[str], None],
) -> tuple[JudgedRun, dict[str, Any]]:
    """Run a candidate that passed and its reference in turn; a slow-down makes the verdict FAILED.

    What the pair found is returned as the certificate says it.

    Raises:
        MachineUnfitError: No figure was resolved on this node, so nothing is shown.
        ChecksFailedError: A run of the pair has no valid result.
    """
    name = label(str(reference.reference))
    other = pulled_subject(
        reference,
        engine,
        matrix.load_matrix(settings.root / "matrix.yaml").policy,
        name=name,
        vendor=candidate.vendor,
        layout=settings.folder(name) / "oci",
        report=report,
        plain_http=settings.plain_http,
    )
    found = paired(other, candidate, engine, root=settings.root, tier=judged.result.tier, report=report)
    _require_resolved(found, settings)
    return _with_verdict(judged, found, reference), statement(found, reference)


def statement(found: PairedRuns, reference: Verified) -> dict[str, Any]:
    """What a certificate says of a pair."""
    verdicts = [each.pair.verdict for each in found.metrics]
    return {
        "reference": str(reference.reference),
        "digest": reference.digest,
        "stackId": reference.stack_id,
        "driver": reference.driver,
        "at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "runs": found.rounds,
        **{verdict: verdicts.count(verdict) for verdict in ("slower", "equal", "noisy")},
        "metrics": [_metric(each) for each in found.metrics],
    }


def _metric(each: PairedMetric) -> dict[str, Any]:
    pair = each.pair
    return {
        "check": each.check,
        "name": each.name,
        "unit": each.unit,
        "reference": statistics.median(each.a),
        "candidate": statistics.median(each.b),
        "loss": pair.loss,
        "countsFrom": pair.limit,
        "finds": pair.resolves,
        "verdict": pair.verdict,
    }


def _with_verdict(judged: JudgedRun, found: PairedRuns, reference: Verified) -> JudgedRun:
    slower = tuple(
        f"{each.name} of {each.check}: {each.pair.loss:.1%} slower than {reference.reference} in a pair"
        for each in found.slower()
    )
    if not slower:
        return judged
    verdict = dataclasses.replace(judged.verdict, status="FAILED", reasons=(*judged.verdict.reasons, *slower))
    return judged.judged_as(verdict)


def _require_resolved(found: PairedRuns, settings: FlowSettings) -> None:
    """A node on which every figure is noisy shows nothing, and shows it of a slow image too."""
    if any(each.pair.verdict != "noisy" for each in found.metrics):
        return
    best = min(found.metrics, key=lambda each: each.pair.resolves)
    raise MachineUnfitError(
        "this node is too noisy for a pair: no figure could show a loss of 2 %",
        where=settings.root.name,
        got=f"the steadiest, {best.name} of {best.check}, shows {best.pair.resolves:.1%}",
        expected="one figure or more that differs by less than 0.5 % from run to run",
        next_step="run the same command on an idle machine; or certify without --against",
    )
