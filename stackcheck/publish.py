"""Make a certified image public: the order in which a store is written.

In: an image and its signed statements. Out: a tag that names a digest whose certificate holds. The order is:
copy the image without a tag, read it back, attach the statements, read those back and verify them, tag last.
Whatever stops it on the way leaves the tag where it was, on the digest that was certified before.
"""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stackcheck import attachments
from stackcheck.errors import ConfigurationError, PublishError
from stackcheck.layout import OciLayout
from stackcheck.oci import IMAGE_MANIFESTS, Manifest, MissingError, RegistryError
from stackcheck.registry import Reference, is_tag, open_store, parse_reference
from stackcheck.statement import (
    VSA,
    Envelope,
    Statement,
    evidence,
    facts,
    newest,
    status,
    subject_digests,
    time_verified,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

    from stackcheck.registry import Store

_UNIQUE = re.compile(r"(?P<tag>.+)-(?P<date>\d{8})-(?P<number>\d+)")


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

    Raises:
        PublishError: The certificate does not hold for this image, or the store failed; the tag did not move.
    """
    source = OciLayout(layout)
    store = open_store(target, plain_http=plain_http)
    return release(
        source, source.only_manifest(), envelopes, store, tag=tag, public_key=public_key, report=report
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
) -> Published:
    """Copy an image and its statements from one store to another, and tag it last; as `publish`."""
    if not is_tag(tag):
        raise ConfigurationError("this is no tag", got=tag, expected="letters, digits, '.', '_' and '-'")
    certified = admit(manifest, envelopes)
    with store.writing(report):
        _refuse_withdrawn(store, manifest, certified, public_key)
        _copy_image(source, manifest, store, report)
        report(f"attaching {len(envelopes)} statements to {manifest.digest}")
        attachments.attach(store, manifest, envelopes, public_key)
        admit(manifest, attachments.read(store, manifest.digest, public_key))
        unique = _unique_tag(store, tag, manifest.digest)
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
    unique = _UNIQUE.fullmatch(found.tag or "")
    tag = unique["tag"] if unique else found.tag or facts(certified)["stackId"]
    if not tag:
        raise ConfigurationError("name the image by a tag", got=reference, expected=f"{found.target}:TAG")
    store = open_store(target, plain_http=plain_http)
    return release(source, manifest, envelopes, store, tag=tag, public_key=public_key, report=report)


def _refuse_withdrawn(
    store: Store, manifest: Manifest, certified: Statement, public_key: EllipticCurvePublicKey
) -> None:
    """A revocation is lifted by a run that was made after it, never by an older run that is signed again."""
    started = dt.datetime.fromisoformat(facts(certified)["run"]["started"])
    for envelope in attachments.read(store, manifest.digest, public_key):
        found = envelope.statement
        if found.predicate_type == VSA and status(found) == "FAILED" and time_verified(found) > started:
            raise PublishError(
                "the image was withdrawn after the run that certifies it",
                where=f"{store.target}@{manifest.digest}",
                got=f"{time_verified(found).isoformat()}: {'; '.join(facts(found).get('reasons', ()))}",
                expected=f"a run that began later than that, not {started.isoformat()}",
                next_step="run the suites again: stackcheck certify --force",
            )


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


def _unique_tag(store: Store, tag: str, digest: str) -> str:
    """The tag that stays: the one this digest has already, or `<tag>-<UTC date>-<n>` with the next free n."""
    mine = unique_tags(store, tag)
    kept = next((name for name in reversed(mine) if digest_of(store, name) == digest), None)
    today = f"{tag}-{dt.datetime.now(dt.UTC):%Y%m%d}-"
    numbers = (int(name.removeprefix(today)) for name in mine if name.startswith(today))
    return kept or f"{today}{max(numbers, default=0) + 1}"


def unique_tags(store: Store, tag: str) -> list[str]:
    """The tags `<tag>-<UTC date>-<n>` of a floating tag, oldest first."""
    matches = [_UNIQUE.fullmatch(name) for name in store.tags()]
    mine = [match for match in matches if match and match["tag"] == tag]
    return [match.string for match in sorted(mine, key=lambda match: (match["date"], int(match["number"])))]


def is_unique(tag: str) -> bool:
    """Whether a tag is one that stays: `<tag>-<UTC date>-<n>`."""
    return _UNIQUE.fullmatch(tag) is not None


def digest_of(store: Store, tag: str) -> str | None:
    """The digest that a tag names; None when there is no such tag."""
    try:
        return store.read_manifest(tag).digest
    except MissingError:  # taken away since the tags were listed
        return None
