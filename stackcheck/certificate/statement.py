"""An in-toto statement and its signed envelope (DSSE).

In: a statement's bytes and a key. Out: an envelope, or, the other way, a checked statement or an error.
Formats: https://github.com/in-toto/attestation and https://github.com/secure-systems-lab/dsse; tried against
cosign 2.5.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from stackcheck.errors import CertificateError
from stackcheck.oci.documents import compact_json, is_digest, sha256

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

STATEMENT = "https://in-toto.io/Statement/v1"
TEST_RESULT = "https://in-toto.io/attestation/test-result/v0.1"
PROVENANCE = "https://slsa.dev/provenance/v1"
SBOM = "https://cyclonedx.org/bom"
VSA = "https://slsa.dev/verification_summary/v1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
VERIFIER_ID = "urn:stackcheck:verifier:v1"
CERTIFICATE_FIELD = "urn:stackcheck:certificate:v1"  # extension fields are named by URIs
RUN_FIELD = "urn:stackcheck:run:v1"
CERTIFIED_LEVEL = "STACKCHECK_CERTIFIED"


@dataclass(frozen=True, kw_only=True)
class Statement:
    """An in-toto statement: its predicate type and the exact bytes that are signed."""

    predicate_type: str
    payload: bytes

    @property
    def document(self) -> dict[str, Any]:
        """The statement as JSON."""
        return dict(json.loads(self.payload))

    @property
    def predicate(self) -> dict[str, Any]:
        """What the statement says of its subject."""
        return dict(self.document["predicate"])

    @property
    def digest(self) -> str:
        """Digest of the signed bytes."""
        return sha256(self.payload)


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """A signed statement: the DSSE JSON as it is stored, and the statement inside."""

    statement: Statement
    body: bytes


def sign(statement: Statement, key: ec.EllipticCurvePrivateKey) -> Envelope:
    """Sign a statement with DSSE; the key id stays empty, as in what cosign 2.5 accepted."""
    signature = key.sign(_pre_authentication(statement.payload), ec.ECDSA(hashes.SHA256()))
    document = {
        "payloadType": PAYLOAD_TYPE,
        "payload": base64.b64encode(statement.payload).decode(),
        "signatures": [{"keyid": "", "sig": base64.b64encode(signature).decode()}],
    }
    return Envelope(statement=statement, body=compact_json(document))


def open_envelope(body: bytes, public_key: ec.EllipticCurvePublicKey) -> Envelope:
    """Check an envelope's signature and read the statement in it.

    Raises:
        CertificateError: It is no DSSE envelope of an in-toto statement, or another key signed it.
    """
    try:
        document = json.loads(body)
        payload = base64.b64decode(document["payload"], validate=True)
        signatures = [base64.b64decode(item["sig"], validate=True) for item in document["signatures"]]
        payload_type = document["payloadType"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CertificateError("an attestation is no DSSE envelope", got=repr(error)) from error
    if payload_type != PAYLOAD_TYPE or not any(_signed(payload, item, public_key) for item in signatures):
        raise CertificateError("an attestation is not signed with the expected key", got=str(payload_type))
    return Envelope(statement=_parse(payload), body=body)


def subject_digests(statement: Statement) -> tuple[str, ...]:
    """The digests that a statement is about."""
    return tuple(f"sha256:{subject['digest']['sha256']}" for subject in statement.document["subject"])


def evidence(statement: Statement) -> frozenset[str]:
    """Digests of the statements that a VSA was given on."""
    return frozenset(
        f"sha256:{item['digest']['sha256']}" for item in statement.predicate["inputAttestations"]
    )


def time_verified(statement: Statement) -> dt.datetime:
    """When a VSA's verdict was given."""
    return dt.datetime.fromisoformat(statement.predicate["timeVerified"])


def not_before(statement: Statement) -> dt.datetime | None:
    """The withdrawal that a VSA lifts: no verdict on the image from before it counts any more."""
    moment = facts(statement).get("notBefore")
    return dt.datetime.fromisoformat(moment) if moment else None


def withdrawn(statements: Iterable[Statement]) -> dt.datetime | None:
    """When an image was last withdrawn, by FAILED summaries and by those that lift one."""
    summaries = [item for item in statements if item.predicate_type == VSA]
    failed = [time_verified(item) for item in summaries if status(item) == "FAILED"]
    lifted = [moment for moment in map(not_before, summaries) if moment]
    return max((*failed, *lifted), default=None)


def status(statement: Statement) -> Literal["PASSED", "FAILED"]:
    """A VSA's verdict; anything that is not PASSED counts as FAILED."""
    return "PASSED" if statement.predicate["verificationResult"] == "PASSED" else "FAILED"


def newest(statements: Iterable[Statement]) -> Statement | None:
    """The VSA that counts: the latest, and at the same moment the FAILED one."""
    summaries = [item for item in statements if item.predicate_type == VSA]
    return max(summaries, key=lambda item: (time_verified(item), status(item) == "FAILED"), default=None)


def facts(statement: Statement) -> dict[str, Any]:
    """What a VSA of this project says beyond the SLSA fields: stack, host, inputs, checks, figures."""
    return dict(statement.predicate[CERTIFICATE_FIELD])


def _pre_authentication(payload: bytes) -> bytes:
    """What DSSE signs: type and payload, with their lengths, so that neither can grow into the other."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def _signed(payload: bytes, signature: bytes, public_key: ec.EllipticCurvePublicKey) -> bool:
    try:
        public_key.verify(signature, _pre_authentication(payload), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


def _parse(payload: bytes) -> Statement:
    """Read a payload whose signature holds; what the pinned key signed may still be another tool's."""
    try:
        document = json.loads(payload)
        found = Statement(predicate_type=document["predicateType"], payload=payload)
        if document["_type"] != STATEMENT or not all(map(is_digest, subject_digests(found))):
            raise ValueError(document["_type"])
        if found.predicate_type == VSA:
            _check_summary(found.predicate)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CertificateError("a signed attestation is malformed", got=repr(error)) from error
    return found


def _check_summary(predicate: Mapping[str, Any]) -> None:
    if predicate["verifier"]["id"] != VERIFIER_ID:
        raise ValueError(predicate["verifier"]["id"])
    for moment in (predicate["timeVerified"], predicate[CERTIFICATE_FIELD].get("notBefore")):
        if moment is not None and dt.datetime.fromisoformat(moment).tzinfo is None:
            raise ValueError(moment)
    for key in ("stackId", "configDigest", "host"):
        predicate[CERTIFICATE_FIELD][key]
    for named in predicate["inputAttestations"]:
        named["digest"]["sha256"].lower()
    predicate["verificationResult"].upper()
