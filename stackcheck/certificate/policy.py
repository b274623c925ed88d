"""Which verdicts on an image are valid, and which of them admits it to a target.

In: statements signed with one key, a moment, an age. Out: the valid PASSED verdicts, or a `CertificateError`;
the certificate that admits an image, or a `PublishError`.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from stackcheck.certificate.predicates import lifting
from stackcheck.certificate.statement import (
    VSA,
    Envelope,
    Statement,
    evidence,
    facts,
    newest,
    not_before,
    sign,
    status,
    subject_digests,
    time_verified,
    withdrawn,
)
from stackcheck.errors import CertificateError, PublishError
from stackcheck.oci.documents import IMAGE_MANIFESTS, Manifest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey


def admit(manifest: Manifest, envelopes: Sequence[Envelope], *, now: dt.datetime | None = None) -> Statement:
    """The certificate that lets an image be published: the newest VSA, PASSED, for this very image.

    Raises:
        PublishError: There is none, it says FAILED, it is from the future, or about another image.
    """
    if manifest.media_type not in IMAGE_MANIFESTS:
        raise PublishError("only a single-platform image is published", got=manifest.media_type)
    (config,) = manifest.descriptors("config") or (None,)
    latest = newest(envelope.statement for envelope in envelopes)
    if latest is None:
        raise PublishError(
            "the image has no certificate", where=manifest.digest, next_step="stackcheck certify STACK"
        )
    if status(latest) != "PASSED":
        raise PublishError("the newest verdict on the image is FAILED", got=str(facts(latest).get("reasons")))
    if time_verified(latest) > (now or dt.datetime.now(dt.UTC)) + CLOCK_SKEW:
        raise PublishError(
            "the certificate is from the future",
            got=time_verified(latest).isoformat(),
            next_step="set this host's clock, then: stackcheck certify --force",
        )
    named = (subject_digests(latest), facts(latest)["configDigest"])
    lost = evidence(latest) - {envelope.statement.digest for envelope in envelopes}
    if lost:
        raise PublishError("statements that the certificate names are not there", got=", ".join(sorted(lost)))
    if config is None or named != ((manifest.digest,), config.digest):
        raise PublishError(
            "the certificate is about another image",
            got=f"manifest {' '.join(named[0])}, config {named[1]}",
            expected=f"manifest {manifest.digest}, config {config.digest if config else 'none'}",
            next_step="certify the image that is to be published",
        )
    return latest


def lifted_by(
    envelopes: Sequence[Envelope],
    certified: Statement,
    known: Sequence[Envelope],
    where: str,
    key: EllipticCurvePrivateKey | None,
) -> tuple[Envelope, ...]:
    """The statements, the certificate among them naming the withdrawal that it lifts.

    A run made after the withdrawal lifts it, never an older run that is signed again.
    """
    statements = [envelope.statement for envelope in known]
    withdrawal = withdrawn(statements)
    if withdrawal is None:
        return tuple(envelopes)
    started = dt.datetime.fromisoformat(facts(certified)["run"]["started"])
    if withdrawal > started:
        failed = [item for item in statements if item.predicate_type == VSA and status(item) == "FAILED"]
        reasons = [reason for item in failed for reason in facts(item).get("reasons", ())]
        raise PublishError(
            "the image was withdrawn after the run that certifies it",
            where=where,
            got=": ".join(filter(None, (withdrawal.isoformat(), "; ".join(reasons)))),
            expected=f"a run that began later than that, not {started.isoformat()}",
            next_step="run the suites again: stackcheck certify --force",
        )
    lifts = not_before(certified)
    if lifts is not None and lifts >= withdrawal:  # a later one takes the earlier along
        return tuple(envelopes)
    if key is None:
        raise PublishError(
            "the image was withdrawn there, and its certificate does not say that it lifts that",
            where=where,
            got=withdrawal.isoformat(),
            next_step=f"publish it there with the signing key: stackcheck publish STACK --to {where}",
        )
    lifted = sign(lifting(certified, withdrawal), key)
    return tuple(lifted if envelope.statement == certified else envelope for envelope in envelopes)


MAX_AGE = dt.timedelta(days=30)
CLOCK_SKEW = dt.timedelta(minutes=10)


def standing(
    reference: str, statements: Sequence[Statement], now: dt.datetime, max_age: dt.timedelta
) -> list[Statement]:
    """The PASSED verdicts that count: within the age, and later than every withdrawal, lifted or not."""
    _check_newest(reference, newest(statements), now, max_age)
    passed = [item for item in statements if item.predicate_type == VSA and status(item) == "PASSED"]
    since = withdrawn(statements)
    return [
        item
        for item in passed
        if now - time_verified(item) <= max_age and (since is None or time_verified(item) >= since)
    ]


def _check_newest(reference: str, latest: Statement | None, now: dt.datetime, max_age: dt.timedelta) -> None:
    if latest is None:
        raise CertificateError(
            "there is no certificate signed with the pinned key",
            where=reference,
            next_step="name the publisher's public key: --key PATH",
        )
    if status(latest) != "PASSED":
        raise CertificateError(
            "the newest verdict on this image is FAILED",
            where=reference,
            got=f"{time_verified(latest).isoformat()}: {'; '.join(facts(latest).get('reasons', ()))}",
            next_step="take another image of this stack: stackcheck list",
        )
    if time_verified(latest) > now + CLOCK_SKEW:
        raise CertificateError(
            "the certificate is from the future", where=reference, got=time_verified(latest).isoformat()
        )
    if now - time_verified(latest) > max_age:
        raise CertificateError(
            "the certificate is too old",
            where=reference,
            got=f"{(now - time_verified(latest)).days} days",
            expected=f"at most {max_age}",
            next_step="certify it again, or accept older ones: --max-age",
        )
