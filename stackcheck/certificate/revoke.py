"""Withdraw a certificate: a signed FAILED verdict, and floating tags back on what was certified before.

In: a reference, a reason, the signing key. Out: what was withdrawn and which tags moved. The statement comes
first: from then on verification fails, whatever happens to the tags. The image and its history stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stackcheck.certificate import attachments
from stackcheck.certificate.policy import admit
from stackcheck.certificate.predicates import revocation
from stackcheck.certificate.statement import newest, sign
from stackcheck.errors import CertificateError, PublishError
from stackcheck.oci.documents import is_attachment
from stackcheck.oci.store import parse_reference
from stackcheck.oci.stores import open_store
from stackcheck.oci.tags import all_unique, digest_of, is_unique

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable

    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

    from stackcheck.oci.documents import Manifest
    from stackcheck.oci.store import Store


@dataclass(frozen=True, kw_only=True)
class Revoked:
    """What a revocation did: floating tags that moved (and where to), went, or still name the digest."""

    digest: str
    moved: dict[str, str]
    removed: tuple[str, ...]
    left: tuple[str, ...]


def revoke(
    reference: str,
    *,
    reason: str,
    key: EllipticCurvePrivateKey,
    now: dt.datetime,
    report: Callable[[str], None],
    plain_http: bool = False,
) -> Revoked:
    """Withdraw a certificate: a FAILED VSA first, then floating tags back to the last certified digest.

    Raises:
        CertificateError: This key certified no such image.
        PublishError: The store failed.
    """
    found = parse_reference(reference)
    store = open_store(found.target, plain_http=plain_http)
    public_key = key.public_key()
    store.read_manifest(found.name)  # before `writing`, which would create a missing layout
    with store.writing(report), store.tidied():
        manifest = store.read_manifest(found.name)
        known = attachments.read(store, manifest.digest, public_key)
        latest = newest(envelope.statement for envelope in known)
        if latest is None:
            raise CertificateError("there is no certificate of this key to withdraw", where=reference)
        failed = sign(revocation(latest, reason=reason, now=now), key)
        attachments.attach(store, manifest, (failed,), public_key)
        report(f"withdrawn {store.target}@{manifest.digest}")
        return _tags_back(store, manifest.digest, public_key)


def _tags_back(store: Store, digest: str, public_key: EllipticCurvePublicKey) -> Revoked:
    moved: dict[str, str] = {}
    removed: list[str] = []
    left: list[str] = []
    for tag in store.tags():
        if is_unique(tag) or is_attachment(tag) or digest_of(store, tag) != digest:
            continue
        previous = _last_certified(store, tag, public_key)
        if previous is not None:
            store.write_manifest(previous, tag)
            moved[tag] = previous.digest
        else:
            (removed if store.delete_tag(tag) else left).append(tag)
    return Revoked(digest=digest, moved=moved, removed=tuple(removed), left=tuple(left))


def _last_certified(store: Store, tag: str, public_key: EllipticCurvePublicKey) -> Manifest | None:
    """The newest earlier image of a floating tag whose certificate still stands."""
    for name in reversed(all_unique(store, tag)):
        manifest = store.read_manifest(name)
        try:
            admit(manifest, attachments.read(store, manifest.digest, public_key))
        except PublishError:
            continue
        return manifest
    return None
