"""What the statements say: predicates of test result, build provenance, verification summary. Pure.

In: a run, its verdict, the build. Out: JSON values as https://github.com/in-toto/attestation (test-result
v0.1), https://slsa.dev/spec/v1.2/verification_summary and https://slsa.dev/spec/v1.2/provenance have them.
What those formats have no field for stands under a URI of ours, as they ask.
"""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from stackcheck import __version__
from stackcheck.oci import compact_json, sha256
from stackcheck.statement import (
    CERTIFICATE_FIELD,
    CERTIFIED_LEVEL,
    PAYLOAD_TYPE,
    RUN_FIELD,
    VERIFIER_ID,
    Statement,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stackcheck.results import RunResult
    from stackcheck.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """How an image came to be.

    Args:
        parameters: What was asked for: the cell of the matrix.
        dependencies: URI -> digest (`sha256:…`) of what went in: Dockerfile, lock, base image, matrix.
        builder: URI of who built; the default says "a stackcheck on some machine".
        started: When the build began; None when it is not known.
        finished: When it ended.
    """

    parameters: Mapping[str, Any] = field(default_factory=dict)
    dependencies: Mapping[str, str] = field(default_factory=dict)
    builder: str = "urn:stackcheck:builder:v1"
    started: dt.datetime | None = None
    finished: dt.datetime | None = None


def level(name: str) -> str:
    """The custom SLSA level that names an architecture or a device model: STACKCHECK_GFX942."""
    return "STACKCHECK_" + re.sub(r"[^A-Z0-9]+", "_", name.upper()).strip("_")


def summary(
    certificate: Mapping[str, Any],
    *,
    status: str,
    resource: str,
    evidence: Sequence[Statement],
    now: dt.datetime,
) -> dict[str, Any]:
    """The predicate of the VSA."""
    policy = compact_json({"required": certificate["required"], "waivers": certificate["waivers"]})
    return {
        "verifier": {"id": VERIFIER_ID, "version": {"stackcheck": __version__}},
        "timeVerified": timestamp(now),
        "resourceUri": resource,
        "policy": {"uri": "urn:stackcheck:policy:v1", "digest": {"sha256": _hex(sha256(policy))}},
        "inputAttestations": [reference(statement) for statement in evidence],
        "verificationResult": status,
        "verifiedLevels": _levels(certificate) if status == "PASSED" else ["FAILED"],
        CERTIFICATE_FIELD: certificate,
    }


def _levels(certificate: Mapping[str, Any]) -> list[str]:
    host = certificate["host"]
    names = {name for device in host["devices"] for name in (device["arch"], device["model"]) if name}
    return [CERTIFIED_LEVEL, *sorted(map(level, names))]


def certificate(result: RunResult, verdict: Verdict) -> dict[str, Any]:
    """Everything of a run that a consumer may want to decide on, in one place."""
    return {
        "host": _host(result),
        "run": {"id": result.run_id, "tier": result.tier, "started": timestamp(result.started)},
        "inputs": result.inputs.model_dump(),
        "required": list(verdict.required),
        "passed": list(verdict.passed),
        "warned": list(verdict.warned),
        "waivers": [asdict(waiver) for waiver in verdict.waivers],
        "reasons": list(verdict.reasons),
        "metrics": _metrics(result),
    }


def _host(result: RunResult) -> dict[str, Any]:
    host = result.host.model_dump()
    return host | {"deviceCount": len(result.host.devices)}


def _metrics(result: RunResult) -> list[dict[str, Any]]:
    """Every number that had a bound: what the certificate vouches for."""
    return [
        {"check": check.id, **metric.model_dump(exclude={"repeats", "ceiling"})}
        for check in result.checks
        for metric in check.metrics
        if metric.verdict in {"pass", "fail"}
    ]


def test_result(result: RunResult, verdict: Verdict) -> dict[str, Any]:
    """The predicate of the test result; https://in-toto.io/attestation/test-result/v0.1."""
    inputs = result.inputs.model_dump()
    warned = set(verdict.warned)
    outcome = "FAILED" if verdict.status == "FAILED" else "WARNED" if warned else "PASSED"
    return {
        "result": outcome,
        "configuration": [
            {"name": name, "digest": {"sha256": _hex(digest)}} for name, digest in inputs.items() if digest
        ],
        "passedTests": [name for name in verdict.passed if name not in warned],
        "warnedTests": list(verdict.warned),
        "failedTests": [name for name in verdict.failed if name not in warned],
        RUN_FIELD: {
            "id": result.run_id,
            "tier": result.tier,
            "started": timestamp(result.started),
            "finished": timestamp(result.finished) if result.finished else None,
            "skippedTests": [name for name in verdict.skipped if name not in warned],
            "invalidTests": list(verdict.invalid),
            "selection": result.selection.model_dump(mode="json"),
            "host": _host(result),
            "software": dict(result.software),
            "environment": dict(result.environment),
        },
    }


def provenance(provenance: Provenance) -> dict[str, Any]:
    """The predicate of the build provenance; https://slsa.dev/provenance/v1."""
    metadata = {"startedOn": provenance.started, "finishedOn": provenance.finished}
    return {
        "buildDefinition": {
            "buildType": "urn:stackcheck:build:v1",
            "externalParameters": dict(provenance.parameters),
            "resolvedDependencies": [
                {"uri": uri, "digest": {"sha256": _hex(digest)}}
                for uri, digest in sorted(provenance.dependencies.items())
            ],
        },
        "runDetails": {
            "builder": {"id": provenance.builder, "version": {"stackcheck": __version__}},
            "metadata": {key: timestamp(moment) for key, moment in metadata.items() if moment},
        },
    }


def reference(statement: Statement) -> dict[str, Any]:
    """A reference to another statement, by the digest of its signed bytes."""
    return {
        "uri": statement.predicate_type,
        "mediaType": PAYLOAD_TYPE,
        "digest": {"sha256": _hex(statement.digest)},
    }


def timestamp(moment: dt.datetime) -> str:
    """A moment as RFC 3339 in UTC; milliseconds, as verdicts are ordered by it."""
    text = moment.astimezone(dt.UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")
