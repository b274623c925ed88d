"""What is certified: four signed in-toto statements about one image digest.

In: an image, a run, its verdict, how the image was built and what is in it. Out: test result, build
provenance, list of packages (SBOM) and verification summary in their signed envelopes. The verification
summary (VSA) is the certificate: it alone says PASSED or FAILED, and a later FAILED one withdraws it.
"""

from __future__ import annotations

import datetime as dt
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Protocol

from stackcheck import predicates
from stackcheck.errors import MachineUnfitError
from stackcheck.keys import load_or_create as load_or_create_key
from stackcheck.oci import compact_json
from stackcheck.predicates import Provenance
from stackcheck.statement import (
    CERTIFICATE_FIELD,
    PROVENANCE,
    SBOM,
    STATEMENT,
    TEST_RESULT,
    VSA,
    Envelope,
    Statement,
    open_envelope,
    sign,
    time_verified,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cryptography.hazmat.primitives.asymmetric import ec

    from stackcheck.results import RunResult
    from stackcheck.verdict import Verdict

__all__ = [
    "Certifiable",
    "Envelope",
    "Provenance",
    "Statement",
    "certify",
    "lifting",
    "load_or_create_key",
    "open_envelope",
    "policy_text",
    "revocation",
    "sign",
    "statements",
]

_SCOPE = ("stackId", "configDigest", "host", "experimental")


class Certifiable(Protocol):
    """What a certificate needs to know of an image; `stackcheck.build.Image` has it."""

    @property
    def stack_id(self) -> str | None:
        """The stack, or None for an image that was not built here."""

    @property
    def config_digest(self) -> str:
        """Digest of the image's config: what the container that was tested was started from."""

    @property
    def manifest_digest(self) -> str:
        """Digest of the manifest: what is published, and the subject of every statement."""


def statements(
    image: Certifiable,
    result: RunResult,
    verdict: Verdict,
    provenance: Provenance,
    sbom: Mapping[str, Any],
    *,
    now: dt.datetime,
    experimental: bool = False,
) -> tuple[Statement, ...]:
    """The statements about a judged image: test result, provenance, SBOM, and the VSA that names them. Pure.

    Raises:
        MachineUnfitError: The verdict is UNFIT: there is nothing to state.
    """
    if verdict.status == "UNFIT":
        raise MachineUnfitError(
            "the machine was unfit, so the run says nothing of the image",
            got="; ".join(verdict.reasons[:5]),
            next_step="run the suites again on a machine that is idle and healthy",
        )
    evidence = (
        _statement(image, TEST_RESULT, predicates.test_result(result, verdict)),
        _statement(image, PROVENANCE, predicates.provenance(provenance)),
        _statement(image, SBOM, sbom),
    )
    scope = {"stackId": image.stack_id, "configDigest": image.config_digest, "experimental": experimental}
    summary = predicates.summary(
        scope | predicates.certificate(result, verdict),
        status=verdict.status,
        resource=f"pkg:oci/{image.stack_id or 'image'}@{image.manifest_digest}",
        evidence=evidence,
        now=now,
    )
    return (*evidence, _statement(image, VSA, summary))


def revocation(certified: Statement, *, reason: str, now: dt.datetime) -> Statement:
    """A FAILED VSA about the same image as a PASSED one, which it withdraws from `now` on."""
    document = certified.document
    predicate = document["predicate"]
    scope = {key: value for key, value in predicate[CERTIFICATE_FIELD].items() if key in _SCOPE}
    document["predicate"] = {
        **{key: predicate[key] for key in ("verifier", "resourceUri", "policy")},
        "timeVerified": predicates.timestamp(
            max(now, time_verified(certified) + dt.timedelta(milliseconds=1))
        ),
        "inputAttestations": [predicates.reference(certified)],
        "verificationResult": "FAILED",
        "verifiedLevels": ["FAILED"],
        CERTIFICATE_FIELD: {**scope, "reasons": [reason], "revoked": True},
    }
    return Statement(predicate_type=VSA, payload=compact_json(document))


def lifting(certified: Statement, withdrawal: dt.datetime) -> Statement:
    """A PASSED VSA that says which withdrawal it lifts, so that nobody can bring back what that ended."""
    document = certified.document
    document["predicate"][CERTIFICATE_FIELD]["notBefore"] = predicates.timestamp(withdrawal)
    return Statement(predicate_type=VSA, payload=compact_json(document))


def certify(
    image: Certifiable,
    result: RunResult,
    verdict: Verdict,
    provenance: Provenance,
    sbom: Mapping[str, Any],
    *,
    key: ec.EllipticCurvePrivateKey,
    now: dt.datetime,
    experimental: bool = False,
) -> tuple[Envelope, ...]:
    """State and sign: `statements`, each in its envelope."""
    made = statements(image, result, verdict, provenance, sbom, now=now, experimental=experimental)
    return tuple(sign(statement, key) for statement in made)


def policy_text() -> str:
    """The CUE policy for `cosign verify-attestation --policy`: only PASSED is accepted."""
    return files("stackcheck").joinpath("stackcheck.cue").read_text(encoding="utf-8")


def _statement(image: Certifiable, predicate_type: str, predicate: Mapping[str, Any]) -> Statement:
    document = {
        "_type": STATEMENT,
        "subject": [
            {
                "name": image.stack_id or "image",
                "digest": {"sha256": image.manifest_digest.removeprefix("sha256:")},
            }
        ],
        "predicateType": predicate_type,
        "predicate": predicate,
    }
    return Statement(predicate_type=predicate_type, payload=compact_json(document))
