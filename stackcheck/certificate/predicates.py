"""The four in-toto statements about one image digest that make up what is certified.

In: an image, a run, its verdict, the image's provenance and SBOM. Out: the test result, the build provenance,
the SBOM and the verification summary (VSA), each as a statement or in a signed envelope. The VSA is the
certificate: it alone says PASSED or FAILED, and a later FAILED one revokes it.

The predicates follow https://in-toto.io/attestation/test-result/v0.1, https://slsa.dev/provenance/v1,
https://cyclonedx.org/bom and https://slsa.dev/spec/v1.2/verification_summary. Fields that those do not define
are named by a URI of this project, as the specifications ask.
"""

import copy
import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stackcheck import __version__
from stackcheck.certificate import predecessor
from stackcheck.certificate.levels import levels
from stackcheck.certificate.signers import Signer
from stackcheck.certificate.statement import (
    PAYLOAD_TYPE,
    PROVENANCE,
    RUN_FIELD,
    SBOM,
    STATEMENT,
    TEST_RESULT,
    VERIFIER_ID,
    VSA,
    Envelope,
    Revocations,
    Statement,
    sign,
    time_verified,
)
from stackcheck.certificate.summary import CERTIFICATE_FIELD
from stackcheck.errors import MachineUnfitError
from stackcheck.oci.documents import compact_json, sha256
from stackcheck.suite.results import RunResult
from stackcheck.suite.subject import SITE_SOURCES, Provenance
from stackcheck.suite.verdict import Verdict

# The fields of the certificate that a revocation keeps: which image and host it is about.
_SCOPE = ("stackId", "name", "configDigest", "host", "experimental")


class Certifiable(Protocol):
    """What a certificate says about an image; `stackcheck.imaging.image.Image` satisfies it."""

    @property
    def stack_id(self) -> str | None:
        """The stack, or None for an image that was not built here."""

    @property
    def config_digest(self) -> str:
        """Digest of the image's config: the tested container was started from it."""

    @property
    def manifest_digest(self) -> str:
        """Digest of the manifest: what is published, and the subject of every statement."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a certificate says beside the run and its verdict.

    Attributes:
        files: How the image's files compare with its packages' records; None: an older certificate of the
            same image has no such comparison.
    """

    now: dt.datetime
    experimental: bool = False  # whether the matrix marks the stack so
    archs: Sequence[str] = ()  # the architectures that the stack declares; those that never ran are named
    known_issues: Sequence[Mapping[str, Any]] = ()  # the reported faults of the stack's versions
    name: str | None = None  # the floating tag under which the image is published; None: its stack id
    against: Mapping[str, Any] | None = None  # what a pair with a certified image found
    files: Mapping[str, Any] | None = None
    derived: Mapping[str, Any] | None = None  # what is taken over from the certificate of the image below


def certify(
    image: Certifiable,
    result: RunResult,
    verdict: Verdict,
    provenance: Provenance,
    sbom: Mapping[str, Any],
    *,
    key: Signer,
    terms: Terms,
) -> tuple[Envelope, ...]:
    """The `statements` about a judged image, each signed in an envelope.

    Raises:
        MachineUnfitError: The verdict is UNFIT.
    """
    made = statements(image, result, verdict, provenance, sbom, terms=terms)
    return tuple(sign(statement, key) for statement in made)


def statements(
    image: Certifiable,
    result: RunResult,
    verdict: Verdict,
    provenance: Provenance,
    sbom: Mapping[str, Any],
    *,
    terms: Terms,
) -> tuple[Statement, ...]:
    """Test result, provenance, SBOM, and the VSA that names those three by digest. Pure.

    Raises:
        MachineUnfitError: The verdict is UNFIT, so nothing can be stated about the image.
    """
    kept = (_statement(image, PROVENANCE, _build_provenance(provenance)), _statement(image, SBOM, sbom))
    return statements_of_rerun(image, result, verdict, kept, terms=terms)


def statements_of_rerun(
    image: Certifiable, result: RunResult, verdict: Verdict, kept: Sequence[Statement], *, terms: Terms
) -> tuple[Statement, ...]:
    """The statements of one more run of an image whose provenance and SBOM are stated already. Pure.

    `kept` has these two: they are about the same bytes, so they hold as they are.

    Returns:
        The test result, `kept`, and the VSA that names all of them by digest.

    Raises:
        MachineUnfitError: The verdict is UNFIT, so nothing can be stated about the image.
    """
    if verdict.status == "UNFIT":
        raise MachineUnfitError(
            "the machine was unfit, so the run says nothing about the image",
            got="; ".join(verdict.reasons[:5]),
            expected="a verdict PASSED or FAILED",
            next_step="run the suites again on an idle and healthy machine",
        )
    evidence = (_statement(image, TEST_RESULT, _test_result(result, verdict)), *kept)
    scope = {
        "stackId": image.stack_id,
        "name": terms.name or image.stack_id,
        "configDigest": image.config_digest,
        "experimental": terms.experimental,
    } | {name: dict(value) for name, value in (("against", terms.against), ("files", terms.files)) if value}
    summary = _summary(
        scope
        | _certificate_field(result, verdict, terms.archs)
        | _taken_over(verdict, terms.derived)
        | {"knownIssues": [*map(dict, terms.known_issues)]}
        | _made_from(kept),
        status=verdict.status,
        resource=f"pkg:oci/{image.stack_id or 'image'}@{image.manifest_digest}",
        evidence=evidence,
        now=terms.now,
    )
    return (*evidence, _statement(image, VSA, summary))


def _taken_over(verdict: Verdict, derived: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the certificate of the image below adds: what passed there, and what judged its figures."""
    if derived is None:
        return {}
    return {
        "derivedFrom": dict(derived),
        "passed": [*verdict.passed, *derived["carried"]],
        "bounds": {**verdict.bounds, **derived["bounds"]},
    }


def _made_from(kept: Sequence[Statement]) -> dict[str, Any]:
    """What a site put in place of a registry and the indexes, as the provenance has it; else nothing."""
    for statement in kept:
        if statement.predicate_type == PROVENANCE:
            parameters = statement.predicate["buildDefinition"]["externalParameters"]
            found = {name: parameters[name] for name in SITE_SOURCES if name in parameters}
            return {"madeFrom": found} if found else {}
    return {}


def revocation(
    certified: Statement, ended: Iterable[Statement], *, reason: str, now: dt.datetime
) -> Statement:
    """A FAILED VSA about the same image as `certified`, which names the certificates that it ends by digest.

    Its time is `now`, or a millisecond after the certificate's if this host's clock is behind.
    """
    document = copy.deepcopy(certified.document)
    predicate = document["predicate"]
    scope = {key: value for key, value in predicate[CERTIFICATE_FIELD].items() if key in _SCOPE}
    document["predicate"] = {
        **{key: predicate[key] for key in ("verifier", "resourceUri", "policy")},
        "timeVerified": _timestamp(max(now, time_verified(certified) + dt.timedelta(milliseconds=1))),
        "inputAttestations": [_reference(item) for item in ended],
        "verificationResult": "FAILED",
        "verifiedLevels": ["FAILED"],
        CERTIFICATE_FIELD: {**scope, "reasons": [reason], "revoked": True},
    }
    return Statement(predicate_type=VSA, payload=compact_json(document))


def superseding(certified: Statement, revoked: Revocations) -> Statement:
    """The same PASSED VSA, which names the revocations that it lifts; older verdicts stay revoked."""
    document = copy.deepcopy(certified.document)
    named = {"notBefore": _timestamp(revoked.last), "lifts": sorted(revoked.digests)}
    document["predicate"][CERTIFICATE_FIELD] |= named
    return Statement(predicate_type=VSA, payload=compact_json(document))


def _statement(image: Certifiable, predicate_type: str, predicate: Mapping[str, Any]) -> Statement:
    subject = {"name": image.stack_id or "image", "digest": {"sha256": _hex(image.manifest_digest)}}
    document = {
        "_type": STATEMENT,
        "subject": [subject],
        "predicateType": predicate_type,
        "predicate": predicate,
    }
    return Statement(predicate_type=predicate_type, payload=compact_json(document))


def _test_result(result: RunResult, verdict: Verdict) -> dict[str, Any]:
    """The predicate of https://in-toto.io/attestation/test-result/v0.1."""
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
            "started": _timestamp(result.started),
            "finished": _timestamp(result.finished) if result.finished else None,
            "skippedTests": [name for name in verdict.skipped if name not in warned],
            "invalidTests": list(verdict.invalid),
            "selection": result.selection.model_dump(mode="json"),
            "host": _host(result),
            "interpreter": result.interpreter.model_dump() if result.interpreter else None,
            "software": dict(result.software),
            "environment": dict(result.environment),
        },
    }


def _build_provenance(provenance: Provenance) -> dict[str, Any]:
    """The predicate of https://slsa.dev/provenance/v1."""
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
            "metadata": {key: _timestamp(moment) for key, moment in metadata.items() if moment},
        },
    }


def _summary(
    certificate: Mapping[str, Any],
    *,
    status: str,
    resource: str,
    evidence: Sequence[Statement],
    now: dt.datetime,
) -> dict[str, Any]:
    """The predicate of https://slsa.dev/verification_summary/v1."""
    policy = compact_json({"required": certificate["required"], "waivers": certificate["waivers"]})
    return {
        "verifier": {"id": VERIFIER_ID, "version": {"stackcheck": __version__}},
        "timeVerified": _timestamp(now),
        "resourceUri": resource,
        "policy": {"uri": "urn:stackcheck:policy:v1", "digest": {"sha256": _hex(sha256(policy))}},
        "inputAttestations": [_reference(statement) for statement in evidence],
        "verificationResult": status,
        "verifiedLevels": levels(certificate) if status == "PASSED" else ["FAILED"],
        CERTIFICATE_FIELD: certificate,
    }


def _certificate_field(result: RunResult, verdict: Verdict, archs: Sequence[str]) -> dict[str, Any]:
    """What a consumer may want to decide on, beyond the fields of SLSA."""
    return {
        "host": _host(result),
        "run": {"id": result.run_id, "tier": result.tier, "started": _timestamp(result.started)},
        "archs": _archs(result, archs),
        "bounds": dict(verdict.bounds),
        "driver": dict(verdict.driver),
        "python": _python(result),
        "inputs": result.inputs.model_dump(),
        "checksDigest": verdict.checks_digest,
        "required": list(verdict.required),
        "passed": list(verdict.passed),
        "warned": list(verdict.warned),
        "waivers": [waiver.model_dump(mode="json") for waiver in verdict.waivers],
        "reasons": list(verdict.reasons),
        "metrics": _metrics(result),
        "baselines": [*map(dict, verdict.baselines)],
    }


def _python(result: RunResult) -> dict[str, Any] | None:
    """The Python of the image, and who answers for it: a package, or the person who certified the image."""
    found = result.interpreter
    if found is None:
        return None
    facts = {"file": found.file, "sha256": found.sha256, "package": found.package}
    return facts | ({"libraries": dict(found.libraries)} if found.libraries else {})


def _archs(result: RunResult, declared: Sequence[str]) -> dict[str, list[str]]:
    """The architectures that the image declares: on which it ran, and for which its code was only read."""
    ran = {device.arch for device in result.host.devices if device.arch}
    return {"ran": sorted(ran), "staticOnly": [arch for arch in declared if arch not in ran]}


def _host(result: RunResult) -> dict[str, Any]:
    return result.host.model_dump() | {"deviceCount": len(result.host.devices)}


def _metrics(result: RunResult) -> list[dict[str, Any]]:
    """Every metric that was compared with a bound, or that the stack will be held to."""
    return [
        {"check": check.id, **metric.model_dump(exclude={"repeats", "ceiling"})}
        for check in result.checks
        for metric in check.metrics
        if metric.verdict in {"pass", "fail"} or metric.name in predecessor.OWN
    ]


def _reference(statement: Statement) -> dict[str, Any]:
    """A reference to a statement, by the digest of its signed bytes."""
    return {
        "uri": statement.predicate_type,
        "mediaType": PAYLOAD_TYPE,
        "digest": {"sha256": _hex(statement.digest)},
    }


def _timestamp(moment: dt.datetime) -> str:
    """A moment as RFC 3339 in UTC; with milliseconds, because verdicts are ordered by it."""
    text = moment.astimezone(dt.UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")
