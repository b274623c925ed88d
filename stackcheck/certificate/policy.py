"""Which verdicts on an image are valid, and which certificate may be published.

In: statements signed with one key, a time, a maximum age. Out: the valid PASSED summaries, or a
`CertificateError`; the certificate to publish, or a `PublishError`.
"""

import datetime as dt
import math
from collections.abc import Iterable, Sequence

from stackcheck.certificate.predicates import superseding
from stackcheck.certificate.signers import Signer
from stackcheck.certificate.statement import (
    VSA,
    Envelope,
    Statement,
    evidence,
    facts,
    lifted_by,
    lifts,
    newest,
    revocations,
    sign,
    status,
    subject_digests,
    time_verified,
)
from stackcheck.errors import CertificateError, PublishError
from stackcheck.oci.documents import IMAGE_MANIFESTS, Manifest
from stackcheck.policy import Policy, is_enough
from stackcheck.suite.last_run import CANNOT_CERTIFY

MAX_AGE = dt.timedelta(days=30)
CLOCK_SKEW = dt.timedelta(minutes=10)  # how far a host's clock may be off, in either direction


def valid_verdicts(
    reference: str, statements: Sequence[Statement], now: dt.datetime, max_age: dt.timedelta
) -> list[Statement]:
    """The PASSED summaries that count: not too old, and not older than the last revocation.

    Only summaries that name every revocation as lifted count after it.

    Raises:
        CertificateError: There is no summary, or the newest is FAILED, from the future, too old, or about a
            run from before the last revocation.
    """
    latest, revoked = _newest(reference, statements, now), revocations(statements)
    if (age := now - time_verified(latest)) > max_age:
        raise CertificateError(
            "the certificate is too old",
            where=reference,
            got=f"{age_text(age)} old, signed at {time_verified(latest).isoformat()}",
            expected=f"at most {max_age}",
            next_step="certify the image again, or accept an older certificate: --max-age",
        )
    passed = [item for item in statements if item.predicate_type == VSA and status(item) == "PASSED"]
    return [item for item in passed if now - time_verified(item) <= max_age and lifts(item, revoked)]


def admit(manifest: Manifest, envelopes: Sequence[Envelope], *, now: dt.datetime | None = None) -> Statement:
    """The certificate that lets an image be published: the newest summary, if it is PASSED for this image.

    Raises:
        PublishError: It is missing, FAILED, from the future, incomplete, or about a different image.
    """
    if manifest.media_type not in IMAGE_MANIFESTS:
        raise PublishError(
            "only an image for a single platform can be published",
            where=manifest.digest,
            got=manifest.media_type,
            expected=" or ".join(sorted(IMAGE_MANIFESTS)),
            next_step="name the image of one platform by its digest",
        )
    statements = [envelope.statement for envelope in envelopes]
    latest = newest(statements)
    if latest is None:
        raise PublishError(
            "the image has no certificate",
            where=manifest.digest,
            got=f"{len(envelopes)} signed statements, no verification summary",
            expected="a PASSED verification summary",
            next_step="stackcheck certify STACK",
        )
    try:
        _newest(manifest.digest, statements, now or dt.datetime.now(dt.UTC))
        check_complete(manifest.digest, latest, statements)
        check_subject(manifest.digest, latest, manifest)
    except CertificateError as error:
        next_step = "fix what failed, then: stackcheck certify STACK --force"
        raise error.but(PublishError, next_step=next_step) from error
    return latest


def require_tier(envelopes: Iterable[Envelope], name: str, required: Policy) -> None:
    """Refuse a certificate of a lower tier than the policy requires now; it may have been enough when signed.

    Raises:
        PublishError: It is of a lower tier.
    """
    certified = newest(envelope.statement for envelope in envelopes)
    if certified is None or "run" not in facts(certified):
        return  # `admit` refuses it with a better reason
    tier, vendor = facts(certified)["run"]["tier"], facts(certified)["host"]["vendor"]
    if not is_enough(tier, required.certifies[vendor]):
        raise PublishError(
            f"the signed run is of a lower tier: {CANNOT_CERTIFY}",
            where=name,
            got=tier,
            expected=f"{required.certifies[vendor]}, which certifies {vendor} (policy in matrix.yaml)",
            next_step=f"stackcheck certify {name} --force",
        )


def supersede_revocation(
    envelopes: Sequence[Envelope],
    certified: Statement,
    known: Sequence[Envelope],
    where: str,
    key: Signer | None,
) -> tuple[Envelope, ...]:
    """The statements to publish, where the target may hold a revocation of the same image.

    If it does, the certificate is signed again, and names the revocations that it lifts. Only a run that
    began after the last one lifts it: signing an older run again does not. Two clocks decide which was first,
    and each may be off by CLOCK_SKEW. Without a `key`, as in `promote`, nothing can be signed again.

    Raises:
        PublishError: The run began before the revocation, or the certificate has to be signed and cannot be.
    """
    statements = [envelope.statement for envelope in known]
    revoked = revocations(statements)
    if revoked is None:
        return tuple(envelopes)
    started = dt.datetime.fromisoformat(facts(certified)["run"]["started"])
    earliest = revoked.last + 2 * CLOCK_SKEW
    if started <= earliest:
        raise PublishError(
            "the image was revoked after the run that certifies it, or shortly before",
            where=where,
            got=f"revoked at {revoked.last.isoformat()}: {_failed_reasons(statements)}",
            expected=f"a run that began after {earliest.isoformat()} (clocks differ), "
            f"not at {started.isoformat()}",
            next_step="run the suites again after that time: stackcheck certify STACK --force",
        )
    if lifts(certified, revoked):  # it lifts the earlier ones too
        return tuple(envelopes)
    if key is None:
        raise PublishError(
            "the image was revoked there; this certificate does not supersede the revocation",
            where=where,
            got=f"a certificate that lifts {len(lifted_by(certified))} of these revocations",
            expected=f"one that names {', '.join(sorted(revoked.digests))}",
            next_step=f"publish it there with the signing key: stackcheck publish STACK --to {where}",
        )
    renewed = sign(superseding(certified, revoked), key)
    return tuple(renewed if envelope.statement == certified else envelope for envelope in envelopes)


def age_text(age: dt.timedelta) -> str:
    """An age in days and whole seconds, rounded up: an age above a limit never reads like the limit."""
    return str(dt.timedelta(seconds=math.ceil(age.total_seconds())))


def _newest(reference: str, statements: Sequence[Statement], now: dt.datetime) -> Statement:
    """The newest verdict, if it is PASSED, not from the future, and lifts every revocation."""
    latest, revoked = newest(statements), revocations(statements)
    if latest is None:
        raise CertificateError(
            "there is no certificate signed with the pinned key",
            where=reference,
            got="no verification summary that this key signed",
            expected="at least one",
            next_step="name the publisher's public key: --key PATH",
        )
    moment = time_verified(latest)
    if status(latest) != "PASSED":
        raise CertificateError(
            "the newest verdict on the image is FAILED",
            where=reference,
            got="; ".join(facts(latest).get("reasons", ())) or "FAILED, without a reason",
            expected="PASSED",
            next_step="use a different image of this stack: stackcheck list",
        )
    if moment > now + CLOCK_SKEW:
        raise CertificateError(
            "the certificate is from the future",
            where=reference,
            got=moment.isoformat(),
            expected=f"at most {CLOCK_SKEW} after this host's clock, {now.isoformat()}",
            next_step="set this host's clock, or ask the publisher to",
        )
    if revoked and not lifts(latest, revoked):
        raise CertificateError(
            "the image was revoked (FAILED), and the newest verdict does not lift that",
            where=reference,
            got=f"revoked at {revoked.last}: {_failed_reasons(statements)}",
            expected="a verdict on a run that began after the revocation",
            next_step="use a different image of this stack: stackcheck list",
        )
    return latest


def check_complete(reference: str, chosen: Statement, known: Sequence[Statement]) -> None:
    """Raise `CertificateError` unless each statement that a verdict names is there."""
    missing = evidence(chosen) - {item.digest for item in known}
    if missing:
        raise CertificateError(
            "statements that the certificate names are not attached to the image",
            where=reference,
            got=f"without {', '.join(sorted(missing))}",
            expected="the signed test result, provenance and SBOM",
            next_step="fetch the image again from where it was published",
        )


def check_subject(reference: str, chosen: Statement, manifest: Manifest) -> None:
    """Raise `CertificateError` unless a verdict is about the image of a manifest."""
    if manifest.media_type not in IMAGE_MANIFESTS:
        raise CertificateError(
            "the store gives the manifest a media type that no image has",
            where=reference,
            got=manifest.media_type or "none",
            expected=" or ".join(sorted(IMAGE_MANIFESTS)),
            next_step="ask who runs the registry; or fetch the image from where it was published",
        )
    configs = " ".join(blob.digest for blob in manifest.descriptors("config")) or "none"
    found = f"{manifest.digest} with config {configs}"
    named = f"{' '.join(subject_digests(chosen))} with config {facts(chosen)['configDigest']}"
    if found != named:
        raise CertificateError(
            "the certificate is about a different image",
            where=reference,
            got=found,
            expected=named,
            next_step="fetch the image again from where it was published",
        )


def _failed_reasons(statements: Sequence[Statement]) -> str:
    failed = [item for item in statements if item.predicate_type == VSA and status(item) == "FAILED"]
    reasons = [reason for item in failed for reason in facts(item).get("reasons", ())]
    return "; ".join(reasons) or "no reason is signed"
