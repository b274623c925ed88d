"""Publish a certified image: copy it and its statements to a store, and move the tag last.

In: an image and its signed statements. Out: `Published`: a tag that names a digest with a valid certificate.
The order is: copy the image without a tag, read it back, attach the statements, read them back and verify
them, tag last. If any step fails, the tag still names the digest that was certified before. Then a last look:
if another host revoked the image meanwhile, the tag is moved back.
"""

import datetime as dt
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stackcheck.certificate import attachments
from stackcheck.certificate.keyring import Pinned
from stackcheck.certificate.policy import MAX_AGE, admit, age_text, supersede_revocation
from stackcheck.certificate.revoke import move_back
from stackcheck.certificate.signers import Signer
from stackcheck.certificate.statement import (
    Envelope,
    Statement,
    carried_from,
    facts,
    name_of,
    time_verified,
)
from stackcheck.certificate.verify import image_blobs
from stackcheck.errors import ConfigurationError, PublishError, StackcheckError
from stackcheck.oci import tags
from stackcheck.oci.documents import Manifest, MissingError, RegistryError
from stackcheck.oci.layout import OciLayout
from stackcheck.oci.store import Reference, Store, copy_blob, is_tag, parse_reference, parse_target
from stackcheck.oci.stores import open_store


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published image."""

    reference: Reference  # the floating tag, which the next certified image of the stack takes over
    unique: Reference  # the tag that stays on this digest
    digest: str


def publish(
    layout: Path,
    *,
    tag: str,
    envelopes: Sequence[Envelope],
    target: str,
    public_key: Pinned,
    report: Callable[[str], None],
    plain_http: bool = False,
    key: Signer | None = None,
) -> Published:
    """Publish the image of a layout, which holds only this image, under a floating tag and a unique one.

    The statements are verified with `public_key` before and after they are written; `key` signs the
    certificate anew if it has to supersede a revocation in the target, and None refuses that.

    Raises:
        PublishError: The certificate is not valid for this image, or the store failed; the tag did not move.
        ConfigurationError: `tag` or `target` is malformed.
    """
    source = OciLayout(layout)
    store = open_store(parse_target(target), plain_http=plain_http)
    return copy_and_tag(
        source,
        source.only_manifest(),
        envelopes,
        store,
        tag=tag,
        public_key=public_key,
        report=report,
        key=key,
    )


def with_next_step(error: RegistryError, target: str) -> StackcheckError:
    """The same error with a next step. Only a user may move a damaged layout: it may hold a revocation."""
    folder = target.removeprefix("oci:")
    if error.next_step or folder == target:
        return error
    next_step = f"move {folder} away, then run the same command again: it publishes to a new folder"
    return error.but(PublishError, next_step=next_step)


def copy_and_tag(
    source: Store,
    manifest: Manifest,
    envelopes: Sequence[Envelope],
    store: Store,
    *,
    tag: str,
    public_key: Pinned,
    report: Callable[[str], None],
    key: Signer | None = None,
) -> Published:
    """Copy an image and its statements from one store to another and tag it last, as `publish` does."""
    if not is_tag(tag):
        raise ConfigurationError(
            "the tag is not valid",
            got=tag,
            expected="at most 128 letters, digits, '.', '_' and '-', and no '.' or '-' first",
            next_step="name the image by the id of its stack: stackcheck list",
        )
    certified = admit(manifest, envelopes)
    _require_below(store, certified, public_key)
    name, stack_id = name_of(certified), facts(certified)["stackId"]
    if not tags.names(tag, name, stack_id):
        raise PublishError(
            "the tag does not belong to the image",
            where=f"{store.target}:{tag}",
            got=f"an image of {f'stack {stack_id}' if stack_id else 'no stack'}, certified as {name}",
            expected="the stack id as tag, or for an image without a stack the tag that certify gave it",
            next_step=f"stackcheck publish {stack_id or 'IMAGE'} --to {store.target}",
        )
    with store.writing(report), store.tidied():
        known = attachments.read_envelopes(store, manifest.digest, public_key)
        envelopes = supersede_revocation(envelopes, certified, known, store.target, key)
        _copy_image(source, manifest, store, report)
        report(f"attaching {len(envelopes)} statements to {manifest.digest}")
        attachments.attach(store, manifest, envelopes, public_key)
        admit(manifest, attachments.read_envelopes(store, manifest.digest, public_key))
        unique = tags.unique(store, tag, manifest.digest)
        store.write_manifest(manifest, unique)
        store.write_manifest(manifest, tag)
        _look_again(store, manifest, envelopes, public_key)
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
    public_key: Pinned,
    report: Callable[[str], None],
    plain_http: bool = False,
    now: dt.datetime | None = None,
) -> Published:
    """Copy a certified image and its statements, in both forms, to another target; the digest stays the same.

    Raises:
        PublishError: This key did not certify the image, or more than 30 days ago, or a store failed.
        ConfigurationError: The image is named by digest alone, and its certificate, an old one, names no tag.
    """
    found = parse_reference(reference)
    source = open_store(found.target, plain_http=plain_http)
    manifest = source.read_manifest(found.name)
    envelopes = attachments.read_envelopes(source, manifest.digest, public_key)
    certified = admit(manifest, envelopes, now=now)
    age = (now or dt.datetime.now(dt.UTC)) - time_verified(certified)
    if age > MAX_AGE:
        raise PublishError(
            "the certificate is too old to be promoted",
            where=reference,
            got=f"{age_text(age)} old",
            expected=f"at most {MAX_AGE}",
            next_step="certify and publish the image again: stackcheck certify STACK",
        )
    tag = tags.floating(found.tag) if found.tag else name_of(certified)
    if not tag:
        raise ConfigurationError(
            "the certificate does not name the image",
            got=reference,
            expected="a certificate that names it",
            next_step="certify the image again: stackcheck certify IMAGE --force",
        )
    store = open_store(parse_target(target), plain_http=plain_http)
    return copy_and_tag(source, manifest, envelopes, store, tag=tag, public_key=public_key, report=report)


def _require_below(store: Store, certified: Statement, public_key: Pinned) -> None:
    """Refuse an image whose certificate takes checks over from one that this target does not have certified.

    Raises:
        PublishError: The image below is not there, or its certificate does not hold.
    """
    taken = carried_from(certified)
    if not taken:
        return
    where = f"{store.target}@{taken['digest']}"
    try:
        below = store.read_manifest(taken["digest"])
        admit(below, attachments.read_envelopes(store, below.digest, public_key))
    except (PublishError, MissingError) as error:
        raise PublishError(
            "the image below is not certified in this target, and checks were taken over from it",
            where=where,
            got=f"{error.what}{f': {error.got}' if error.got else ''}",
            expected=f"{taken['name']}, certified, so that a revocation of it counts for this one too",
            next_step=f"publish the image below first: stackcheck promote REF --to {store.target}",
        ) from error


def _look_again(store: Store, manifest: Manifest, envelopes: Sequence[Envelope], public_key: Pinned) -> None:
    """After the tag moved: repair what other hosts undid, and move the tag back if one revoked the image.

    Raises:
        PublishError: The image was revoked meanwhile.
    """
    attachments.attach(store, manifest, envelopes, public_key)
    try:
        admit(manifest, attachments.read_envelopes(store, manifest.digest, public_key))
    except PublishError as error:
        moves = move_back(store, manifest.digest, public_key)
        places = [f"{tag} -> {digest}" for tag, digest in moves.moved.items()]
        raise PublishError(
            "the image was revoked while it was being published",
            where=f"{store.target}@{manifest.digest}",
            got=f"{error.got}; tags: {', '.join((*places, *moves.removed, *moves.left)) or 'none named it'}",
            expected="no revocation during the publication: let one host at a time write to a repository",
            next_step=error.next_step,
        ) from error


def _copy_image(source: Store, manifest: Manifest, store: Store, report: Callable[[str], None]) -> None:
    """Copy the blobs that are missing, and the manifest by its digest alone, without a tag."""
    blobs = image_blobs(manifest)
    for blob in blobs:
        if not store.has_blob(blob.digest) and not store.mount_blob(blob.digest, source):
            report(f"copying {blob.digest[:19]} ({blob.size / 1e6:.1f} MB) to {store.target}")
            copy_blob(blob, source, store, report)
    store.write_manifest(manifest, manifest.digest)
    absent = [blob.digest for blob in blobs if not store.has_blob(blob.digest)]
    if absent or store.read_manifest(manifest.digest).body != manifest.body:
        raise RegistryError(
            "the store does not return what was written to it",
            where=f"{store.target}@{manifest.digest}",
            got=f"without {', '.join(absent)}" if absent else "a different manifest",
            expected="the manifest and every blob of the image",
            next_step="check the disk of the store, then run the same command again",
        )
