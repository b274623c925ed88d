"""Make a certified image public: the order in which a store is written.

In: an image and its signed statements. Out: a tag that names a digest whose certificate holds. The order is:
copy the image without a tag, read it back, attach the statements, read those back and verify them, tag last.
Whatever stops it on the way leaves the tag where it was, on the digest that was certified before.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stackcheck import attachments, tags
from stackcheck.certificate import lifting
from stackcheck.errors import ConfigurationError, PublishError
from stackcheck.layout import OciLayout
from stackcheck.oci import IMAGE_MANIFESTS, Manifest, RegistryError
from stackcheck.registry import Reference, is_tag, open_store, parse_reference
from stackcheck.statement import (
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
    withdrawn,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

    from stackcheck.registry import Store


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
    store = open_store(target, plain_http=plain_http)
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
    with store.writing(report):
        known = attachments.read(store, manifest.digest, public_key)
        envelopes = _lifting(envelopes, certified, known, store.target, key)
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


def admit(manifest: Manifest, envelopes: Sequence[Envelope]) -> Statement:
    """The certificate that lets an image be published: the newest VSA, PASSED, for this very image.

    Raises:
        PublishError: There is none, it says FAILED, or it is about another image.
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


def promote(
    reference: str,
    *,
    target: str,
    public_key: EllipticCurvePublicKey,
    report: Callable[[str], None],
    plain_http: bool = False,
) -> Published:
    """Copy a certified image and its statements, in both forms, to another target; the digest stays.

    Raises:
        PublishError: The image is not certified by this key, or a store failed.
    """
    found = parse_reference(reference)
    source = open_store(found.target, plain_http=plain_http)
    manifest = source.read_manifest(found.name)
    envelopes = attachments.read(source, manifest.digest, public_key)
    certified = admit(manifest, envelopes)
    tag = tags.floating(found.tag) if found.tag else facts(certified)["stackId"]
    if not tag:
        raise ConfigurationError("name the image by a tag", got=reference, expected=f"{found.target}:TAG")
    store = open_store(target, plain_http=plain_http)
    return release(source, manifest, envelopes, store, tag=tag, public_key=public_key, report=report)


def _lifting(
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
    if not_before(certified) == withdrawal:
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
