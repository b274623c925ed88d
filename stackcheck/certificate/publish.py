"""Make a certified image public: the order in which a store is written.

In: an image and its signed statements. Out: a tag that names a digest whose certificate holds. The order is:
copy the image without a tag, read it back, attach the statements, read those back and verify them, tag last.
Whatever stops it on the way leaves the tag where it was, on the digest that was certified before.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stackcheck.certificate import attachments
from stackcheck.certificate.policy import MAX_AGE, admit, lifted_by
from stackcheck.certificate.statement import Envelope, facts, time_verified
from stackcheck.errors import ConfigurationError, PublishError
from stackcheck.oci import tags
from stackcheck.oci.documents import Manifest, RegistryError
from stackcheck.oci.layout import OciLayout
from stackcheck.oci.store import Reference, is_tag, parse_reference, parse_target
from stackcheck.oci.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

    from stackcheck.oci.store import Store


@dataclass(frozen=True, kw_only=True)
class Published:
    """What was made public.

    Args:
        reference: The floating tag, which moves with the next certified image of the stack.
        unique: The tag that stays with this digest.
        digest: The manifest's digest: what to run.
    """

    reference: Reference
    unique: Reference
    digest: str


def publish(
    layout: Path,
    *,
    tag: str,
    envelopes: Sequence[Envelope],
    target: str,
    public_key: EllipticCurvePublicKey,
    report: Callable[[str], None],
    plain_http: bool = False,
    key: EllipticCurvePrivateKey | None = None,
) -> Published:
    """Publish the image of a layout under a floating tag and a unique one.

    Args:
        layout: An OCI image layout that holds exactly this image.
        tag: The floating tag: the stack's id.
        envelopes: Its statements; the newest VSA among them has to be PASSED, for this very image.
        target: `oci:DIR` or `HOST/REPO`.
        public_key: The key that the statements are verified with, before and after they are written.
        report: Told each step.
        plain_http: Talk http to a registry that is not on a loopback address.
        key: Signs a certificate that lifts a withdrawal; without it such an image is refused.

    Raises:
        PublishError: The certificate does not hold for this image, or the store failed; the tag did not move.
    """
    source = OciLayout(layout)
    store = open_store(parse_target(target), plain_http=plain_http)
    return release(
        source,
        source.only_manifest(),
        envelopes,
        store,
        tag=tag,
        public_key=public_key,
        report=report,
        key=key,
    )


def release(
    source: Store,
    manifest: Manifest,
    envelopes: Sequence[Envelope],
    store: Store,
    *,
    tag: str,
    public_key: EllipticCurvePublicKey,
    report: Callable[[str], None],
    key: EllipticCurvePrivateKey | None = None,
) -> Published:
    """Copy an image and its statements from one store to another, and tag it last; as `publish`."""
    if not is_tag(tag):
        raise ConfigurationError("this is no tag", got=tag, expected="letters, digits, '.', '_' and '-'")
    certified = admit(manifest, envelopes)
    stack_id = facts(certified)["stackId"]
    if not tags.names(tag, stack_id):
        raise PublishError(
            "the tag is not that of the image's stack",
            where=f"{store.target}:{tag}",
            got=f"an image of {stack_id or 'no stack'}",
            expected=f"the tag {stack_id}" if stack_id else "a tag as `certify` names the image",
        )
    with store.writing(report), store.tidied():
        known = attachments.read(store, manifest.digest, public_key)
        envelopes = lifted_by(envelopes, certified, known, store.target, key)
        _copy_image(source, manifest, store, report)
        report(f"attaching {len(envelopes)} statements to {manifest.digest}")
        attachments.attach(store, manifest, envelopes, public_key)
        admit(manifest, attachments.read(store, manifest.digest, public_key))
        unique = tags.unique(store, tag, manifest.digest)
        store.write_manifest(manifest, unique)
        store.write_manifest(manifest, tag)
    report(f"published {store.target}:{tag}")
    return Published(
        reference=Reference(target=store.target, tag=tag),
        unique=Reference(target=store.target, tag=unique),
        digest=manifest.digest,
    )


def promote(
    reference: str,
    *,
    target: str,
    public_key: EllipticCurvePublicKey,
    report: Callable[[str], None],
    plain_http: bool = False,
    now: dt.datetime | None = None,
) -> Published:
    """Copy a certified image and its statements, in both forms, to another target; the digest stays.

    Raises:
        PublishError: The image is not certified by this key, or too long ago, or a store failed.
    """
    found = parse_reference(reference)
    source = open_store(found.target, plain_http=plain_http)
    manifest = source.read_manifest(found.name)
    envelopes = attachments.read(source, manifest.digest, public_key)
    certified = admit(manifest, envelopes, now=now)
    age = (now or dt.datetime.now(dt.UTC)) - time_verified(certified)
    if age > MAX_AGE:
        raise PublishError(
            "the certificate is too old to be promoted",
            where=reference,
            got=f"{age.days} days",
            expected=f"at most {MAX_AGE.days} days",
            next_step="certify the image again",
        )
    tag = tags.floating(found.tag) if found.tag else facts(certified)["stackId"]
    if not tag:
        raise ConfigurationError("name the image by a tag", got=reference, expected=f"{found.target}:TAG")
    store = open_store(parse_target(target), plain_http=plain_http)
    return release(source, manifest, envelopes, store, tag=tag, public_key=public_key, report=report)


def _copy_image(source: Store, manifest: Manifest, store: Store, report: Callable[[str], None]) -> None:
    """Copy what is missing. The manifest is stored by its digest alone: a candidate needs no tag."""
    blobs = (*manifest.descriptors("config"), *manifest.descriptors("layers"))
    for blob in blobs:
        if not store.has_blob(blob.digest) and not store.mount_blob(blob.digest, source):
            report(f"copying {blob.digest[:19]} ({blob.size / 1e6:.1f} MB) to {store.target}")
            store.write_blob(blob, lambda digest=blob.digest: source.read_blob(digest))  # type: ignore[misc]
    store.write_manifest(manifest, manifest.digest)
    absent = [blob.digest for blob in blobs if not store.has_blob(blob.digest)]
    if absent or store.read_manifest(manifest.digest).body != manifest.body:
        raise RegistryError(
            "the store does not give back what was written", where=store.target, got=f"without {absent}"
        )
