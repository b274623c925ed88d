"""An in-toto statement and its signed envelope (DSSE).

In: a statement and a private key, or an envelope's bytes and a public key. Out: the envelope, or the
statement in it; an error if it is malformed or another key signed it. The functions below `open_envelope`
read the fields of a verification summary (VSA). Formats: https://github.com/in-toto/attestation,
https://github.com/secure-systems-lab/dsse; tried against cosign 2.5.
"""

import base64
import datetime as dt
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from stackcheck.certificate import keyring, summary
from stackcheck.certificate.keyring import Pinned, TrustedKey, hint, hints
from stackcheck.certificate.signers import Signer
from stackcheck.certificate.summary import CERTIFICATE_FIELD
from stackcheck.errors import CertificateError
from stackcheck.files import strictjson
from stackcheck.oci.documents import compact_json, is_digest, sha256

STATEMENT = "https://in-toto.io/Statement/v1"
TEST_RESULT = "https://in-toto.io/attestation/test-result/v0.1"
PROVENANCE = "https://slsa.dev/provenance/v1"
SBOM = "https://cyclonedx.org/bom"
VSA = "https://slsa.dev/verification_summary/v1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
VERIFIER_ID = "urn:stackcheck:verifier:v1"
RUN_FIELD = "urn:stackcheck:run:v1"


class MalformedSummaryError(CertificateError):
    """A summary that the expected key signed cannot be read: it may be a revocation."""


class RetiredKeyError(CertificateError):
    """A trusted key signed it, and was retired before."""


@dataclass(frozen=True, kw_only=True)
class Statement:
    """An in-toto statement: its predicate type and the exact bytes that are signed."""

    predicate_type: str
    payload: bytes

    @cached_property
    def document(self) -> dict[str, Any]:
        """The statement as JSON; a change of it does not change the signed bytes."""
        return dict(json.loads(self.payload))

    @property
    def predicate(self) -> dict[str, Any]:
        """What the statement says about its subject."""
        return dict(self.document["predicate"])

    @cached_property
    def digest(self) -> str:
        """Digest of the signed bytes."""
        return sha256(self.payload)


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """A signed statement: the DSSE JSON as it is stored, the statement inside, and the hint of its key."""

    statement: Statement
    body: bytes
    signer: str = ""


def sign(statement: Statement, key: Signer) -> Envelope:
    """Sign a statement with DSSE (ECDSA P-256, SHA-256). The key id stays empty: cosign 2.5 accepts that."""
    data = _pre_authentication(statement.payload)
    signature = key.sign(data, keyring.ALGORITHM)
    signer = keyring.signer(key.public_key(), signature, data)
    document = {
        "payloadType": PAYLOAD_TYPE,
        "payload": base64.b64encode(statement.payload).decode(),
        "signatures": [{"keyid": "", "sig": base64.b64encode(signature).decode()}],
    }
    return Envelope(
        statement=statement, body=compact_json(document), signer=hint(signer.key) if signer else ""
    )


def open_envelope(body: bytes, public_key: Pinned) -> Envelope:
    """Check an envelope's signature and read the statement in it.

    Raises:
        CertificateError: It is not a DSSE envelope of an in-toto statement, or a different key signed it.
    """
    try:
        document = json.loads(body)
        payload = base64.b64decode(document["payload"], validate=True)
        signatures = [base64.b64decode(item["sig"], validate=True) for item in document["signatures"]]
        payload_type = document["payloadType"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CertificateError(
            "an attestation is not a DSSE envelope",
            got=repr(error),
            expected="a JSON object with payload, payloadType and signatures",
        ) from error
    if payload_type != PAYLOAD_TYPE:
        raise CertificateError(
            "an attestation has the wrong payload type", got=str(payload_type), expected=PAYLOAD_TYPE
        )
    data = _pre_authentication(payload)
    signer = next((key for item in signatures if (key := keyring.signer(public_key, item, data))), None)
    if signer is None:
        raise CertificateError(
            "an attestation is not signed with the expected key",
            got=f"{len(signatures)} signatures of other keys",
            expected=f"a signature of the key {' or '.join(hints(public_key))} (base64 of its SHA-256)",
        )
    return Envelope(statement=_in_time(parse(payload), signer), body=body, signer=hint(signer.key))


def subject_digests(statement: Statement) -> tuple[str, ...]:
    """The digests (sha256:…) of the images that a statement is about."""
    return tuple(f"sha256:{subject['digest']['sha256']}" for subject in statement.document["subject"])


def evidence(statement: Statement) -> frozenset[str]:
    """Digests of the statements that a VSA is based on: test result, provenance, SBOM."""
    return frozenset(
        f"sha256:{item['digest']['sha256']}" for item in statement.predicate["inputAttestations"]
    )


def time_verified(statement: Statement) -> dt.datetime:
    """When the verdict of a VSA was given."""
    return dt.datetime.fromisoformat(statement.predicate["timeVerified"])


def not_before(statement: Statement) -> dt.datetime | None:
    """The time of the last revocation that a VSA lifts: earlier verdicts on the image stay invalid."""
    moment = facts(statement).get("notBefore")
    return dt.datetime.fromisoformat(moment) if moment else None


@dataclass(frozen=True, kw_only=True)
class Revocations:
    """What ended the certificates of an image.

    Attributes:
        digests: The FAILED summaries: those that are there, and those that a PASSED one names as lifted.
    """

    last: dt.datetime  # when it was last revoked
    digests: frozenset[str]


def revocations(statements: Iterable[Statement]) -> Revocations | None:
    """What was revoked, by FAILED summaries or by PASSED ones that say that they lift some; None if nothing.

    `attachments.attach` removes a lifted FAILED summary from cosign's forms; the PASSED one remembers it.
    """
    summaries = [item for item in statements if item.predicate_type == VSA]
    failed = [item for item in summaries if status(item) == "FAILED"]
    times = [*map(time_verified, failed), *(moment for moment in map(not_before, summaries) if moment)]
    if not times:
        return None
    named = (digest for item in summaries for digest in lifted_by(item))
    return Revocations(last=max(times), digests=frozenset((*(item.digest for item in failed), *named)))


def lifts(statement: Statement, revoked: Revocations | None) -> bool:
    """Whether a PASSED summary counts although the image was revoked: it has to name each revocation.

    Its time is not enough. A verdict that was signed later may be about a run from before the revocation,
    clocks differ, and of two hosts each sees what the other wrote only later.
    """
    if revoked is None:
        return True
    superseded = not_before(statement)
    later = superseded is not None and superseded >= revoked.last
    return later and revoked.digests <= lifted_by(statement)


def lifted_by(statement: Statement) -> frozenset[str]:
    """The digests of the revocations that a VSA names as lifted."""
    return frozenset(facts(statement).get("lifts", ()))


def lifted(statements: Iterable[Statement]) -> tuple[Statement, ...]:
    """The summaries that no longer count because a run lifted a revocation: it, and PASSED ones before it."""
    summaries = [item for item in statements if item.predicate_type == VSA]
    passed = [item for item in summaries if status(item) == "PASSED"]
    named = frozenset(digest for item in passed for digest in lifted_by(item))
    failed = [item for item in summaries if status(item) == "FAILED" and item.digest in named]
    return (*failed, *(item for item in passed if not named <= lifted_by(item)))


def status(statement: Statement) -> Literal["PASSED", "FAILED"]:
    """The verdict of a VSA; anything but PASSED counts as FAILED."""
    return "PASSED" if statement.predicate["verificationResult"] == "PASSED" else "FAILED"


def newest(statements: Iterable[Statement]) -> Statement | None:
    """The VSA that counts: the last one by `recency`."""
    return max((item for item in statements if item.predicate_type == VSA), key=recency, default=None)


def recency(vsa: Statement) -> tuple[dt.datetime, bool]:
    """What orders VSAs: their time; of two from the same moment the FAILED one is the later one."""
    return time_verified(vsa), status(vsa) == "FAILED"


def facts(statement: Statement) -> dict[str, Any]:
    """What a VSA of this project states beyond the SLSA fields: stack, host, inputs, checks, metrics."""
    return dict(statement.predicate[CERTIFICATE_FIELD])


def carried_from(statement: Statement) -> dict[str, Any]:
    """Which image a VSA takes checks over from; empty if all of its checks ran in the image itself."""
    found = facts(statement).get("derivedFrom") or {}
    return dict(found) if found.get("carried") else {}


def accepted_python(certificate: Mapping[str, Any]) -> tuple[str, ...]:
    """The digests of the files that were accepted as the image's Python when it was certified.
    Empty if a package owns the Python, or if the certificate does not say.
    """
    python = certificate.get("python")
    if not python or python["package"]:
        return ()
    return (python["sha256"], *python.get("libraries", {}).values())


def name_of(statement: Statement) -> str | None:
    """The name under which an image was certified, its tag; None in old ones of images of no stack."""
    name = facts(statement).get("name") or facts(statement)["stackId"]
    return None if name is None else str(name)


def _pre_authentication(payload: bytes) -> bytes:
    """The bytes that DSSE signs; with the lengths, no byte can move from the type into the payload."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def _in_time(statement: Statement, signer: TrustedKey) -> Statement:
    """The statement itself. PASSED must be from before its key was retired; FAILED always counts."""
    if signer.retired is None or statement.predicate_type != VSA or status(statement) == "FAILED":
        return statement
    if time_verified(statement) < signer.retired:
        return statement
    raise RetiredKeyError(
        "the certificate is from after its key was retired",
        got=f"a verdict of {time_verified(statement).isoformat()}, signed with the key {hint(signer.key)}",
        expected=f"a verdict from before {signer.retired.isoformat()}, or of a key that is not retired",
        next_step="ask the publisher for a certificate of the new key",
    )


def parse(payload: bytes) -> Statement:
    """The statement in a correctly signed payload. Another tool may have signed it with the same key.

    Raises:
        CertificateError: It is malformed, or no statement of stackcheck.
    """
    try:
        strictjson.check(payload)
        document = json.loads(payload)
        found = Statement(predicate_type=document["predicateType"], payload=payload)
        if document["_type"] != STATEMENT or not all(map(is_digest, subject_digests(found))):
            raise ValueError(document["_type"])
        if found.predicate_type == VSA:
            _check_summary(found.predicate)
        elif not isinstance(document["predicate"], dict):
            raise TypeError("predicate")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CertificateError(
            "a signed attestation is malformed",
            got=repr(error),
            expected=f"an in-toto statement ({STATEMENT}) of stackcheck",
        ) from error
    return found


def _check_summary(predicate: dict[str, Any]) -> None:
    """A summary of this verifier must be well formed. Passing it over could pass over a revocation."""
    verifier = predicate.get("verifier")
    if isinstance(verifier, dict) and isinstance(verifier.get("id"), str) and verifier["id"] != VERIFIER_ID:
        raise ValueError(verifier["id"])  # another verifier's, signed with the same key
    try:
        summary.check(predicate)
        for moment in (predicate["timeVerified"], predicate[CERTIFICATE_FIELD].get("notBefore")):
            if moment is not None:
                dt.datetime.fromisoformat(moment)
    except (ValueError, RecursionError) as error:
        raise MalformedSummaryError(
            "a signed verification summary is malformed",
            got=str(error),
            expected="a summary as this version of stackcheck, or an earlier one, signs it",
            next_step="update stackcheck; if that does not help, certify the image again",
        ) from error
