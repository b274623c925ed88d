"""Revoke a certificate: sign a FAILED verdict, then move floating tags back to the last certified image.

In: a reference, a reason, the signing key. Out: `Revoked`: the digest and what happened to its tags. The
verdict comes first: from then on verification fails, whatever happens to the tags. The image stays.
"""

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass

from stackcheck.certificate import attachments
from stackcheck.certificate.floating import move_back
from stackcheck.certificate.predicates import revocation
from stackcheck.certificate.signers import Signer
from stackcheck.certificate.statement import VSA, Envelope, Statement, facts, newest, sign, status
from stackcheck.errors import CertificateError
from stackcheck.oci.store import parse_reference
from stackcheck.oci.stores import open_store


@dataclass(frozen=True, kw_only=True)
class Revoked:
    """What a revocation did."""

    digest: str  # the manifest whose certificate was revoked
    moved: dict[str, str]  # floating tags that were moved back, each with the digest that it names now
    # Floating tags that were deleted, because no earlier image of the stack is certified
    removed: tuple[str, ...]
    left: tuple[str, ...]  # floating tags that still name `digest`, because the store cannot delete tags


def revoke(
    reference: str,
    *,
    reason: str,
    key: Signer,
    now: dt.datetime,
    report: Callable[[str], None],
    plain_http: bool = False,
) -> Revoked:
    """Revoke the certificate of an image in a store. A second call with the same reason finishes the first.

    The reason is signed, and `verify` shows it.
    """
    found = parse_reference(reference)
    store = open_store(found.target, plain_http=plain_http)
    public_key = key.public_key()
    store.read_manifest(found.name)  # before `writing`, which would create a missing layout
    with store.writing(report), store.tidied():
        manifest = store.read_manifest(found.name)
        known = attachments.read_envelopes(store, manifest.digest, public_key)
        latest = newest(envelope.statement for envelope in known)
        if latest is None:
            raise CertificateError(
                "there is no certificate of this key to revoke",
                where=reference,
                got=f"{len(known)} statements of this key, no verification summary",
                expected="a certificate that this key signed",
                next_step="name the key that signed it: --key PATH",
            )
        # Nothing new to sign if a call that was interrupted did it: repair the forms, and move the tags.
        failed: tuple[Envelope, ...] = ()
        if not _is_revoked(latest, reason):
            statements = [item.statement for item in known if item.statement.predicate_type == VSA]
            ended = [item for item in statements if status(item) == "PASSED"] or [latest]
            failed = (sign(revocation(latest, ended, reason=reason, now=now), key),)
        attachments.attach(store, manifest, failed, public_key)
        report(f"revoked {store.target}@{manifest.digest}")
        moves = move_back(store, manifest.digest, public_key)
        # Last: a publisher elsewhere, who had read these tags before, may have written them meanwhile.
        attachments.attach(store, manifest, failed, public_key)
    return Revoked(
        digest=manifest.digest, moved=moves.moved, removed=tuple(moves.removed), left=tuple(moves.left)
    )


def _is_revoked(latest: Statement, reason: str) -> bool:
    """Whether the newest verdict is already this revocation."""
    return status(latest) == "FAILED" and facts(latest).get("reasons") == [reason]
