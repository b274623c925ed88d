"""Gate an image by a certified one. In: a reference and the image that was judged. Out: what the pair found.

Bounds allow the slowest chip of a model, so an image that is 5 % slower can pass them on a good chip. The
paired comparison on one node finds 2 % (`paired_runs.py`); what it found is signed into the certificate.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stackcheck import vendors
from stackcheck.certificate.for_host import Wanted
from stackcheck.certificate.keyring import Pinned
from stackcheck.certificate.pull import pulled_subject
from stackcheck.certificate.verify import Verified, verify
from stackcheck.compare import paired_runs
from stackcheck.compare.paired_runs import PairedMetric, PairedRuns
from stackcheck.engine.client import Engine
from stackcheck.errors import MachineUnfitError
from stackcheck.matrix import matrix
from stackcheck.oci.tags import label
from stackcheck.suite.judged import JudgedRun
from stackcheck.suite.subject import Subject

if TYPE_CHECKING:
    from stackcheck.flow import FlowSettings


def certified(reference: str, settings: FlowSettings, public_key: Pinned) -> Verified:
    """The certified image that gates others on this host."""
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
    found = paired_runs.paired(
        other, candidate, engine, root=settings.root, tier=judged.result.tier, report=report
    )
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
