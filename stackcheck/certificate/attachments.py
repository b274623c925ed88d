"""Attestations beside an image in a store: written in every form, and read back from all of them.

In: an image's manifest and signed envelopes. Out: the same envelopes in the store, and back again. The forms
are those of `storage_forms`. A registry has no lock: of two hosts that write one tag at the same moment, one
undoes the other. So statements are only added, what any form has is repaired in the others, and a writer ends
only when a last look found nothing missing. Only a run that lifts a revocation takes statements away.
"""

import datetime as dt
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from stackcheck.certificate.keyring import Pinned
from stackcheck.certificate.reader import Reader, optional, too_many
from stackcheck.certificate.statement import (
    VSA,
    Envelope,
    Statement,
    lifted,
    open_envelope,
    status,
    time_verified,
)
from stackcheck.certificate.storage_forms import (
    bundle,
    bundle_entry,
    bundle_tag,
    bundle_tags,
    fallback_index,
    fallback_tag,
    is_bundle,
    legacy_layer,
    legacy_manifest,
    legacy_tag,
    revoked_tag,
)
from stackcheck.errors import CertificateError, PublishError
from stackcheck.oci.documents import Descriptor, Manifest, RegistryError
from stackcheck.oci.store import Store

Obsolete = Callable[[Sequence[Statement]], AbstractSet[str]]

ATTEMPTS = 10  # another host may write at the same moment, and undo what was written
PAUSE_S = 0.2  # at most, after the first attempt; two hosts that repair at once have to get out of step
MOST_MANIFESTS = 4096  # as MOST_LAYERS


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What a store holds about one manifest.

    Attributes:
        listed: What refers to the manifest, by the store's list or the fallback index: digest -> manifest.
        fallback: The entries of the fallback index; of an entry, the manifest may be gone.
    """

    legacy: tuple[Manifest, ...]  # the manifest of the legacy form, if there is one
    mark: tuple[Manifest, ...]  # the mark of a revoked image, if there is one
    listed: Mapping[str, Manifest]
    fallback: tuple[Descriptor, ...]
    tagged: Mapping[str, Manifest]  # the bundles that have a tag of their own: digest -> manifest
    native: bool  # whether the store lists referrers itself

    @property
    def bundles(self) -> dict[str, Manifest]:
        """All bundles, listed or only tagged."""
        return {name: item for name, item in {**self.tagged, **self.listed}.items() if is_bundle(item)}

    @property
    def holders(self) -> tuple[Manifest, ...]:
        """Every manifest with attestations."""
        return (*self.legacy, *self.mark, *self.bundles.values())


def attach(
    store: Store,
    subject: Manifest,
    envelopes: Sequence[Envelope],
    public_key: Pinned,
    *,
    obsolete: Obsolete = lambda _known: frozenset(),
) -> None:
    """Add envelopes in every form, and repair what any form lacks; done when a last look finds nothing to do.

    FAILED summaries of this key that a PASSED one lifts (`notBefore`) are removed, because cosign refuses an
    image while any of its summaries is FAILED; so are the PASSED summaries that such a revocation had ended,
    and of all statements that are there those whose digests `obsolete` returns, unless they say FAILED.

    Raises:
        PublishError: The key did not sign an envelope: nothing is written.
        RegistryError: The store refused, or other writers undid it ten times.
    """
    where = f"{store.target}@{subject.digest}"
    try:
        for envelope in envelopes:
            open_envelope(envelope.body, public_key)
    except CertificateError as error:
        next_step = "give the key that signed the certificate, or certify the image again with this one"
        raise error.but(PublishError, where=where, next_step=next_step) from error
    reader = Reader(store, subject.digest, public_key)
    for attempt in range(ATTEMPTS):
        seen = _look(reader)
        known = (*reader.envelopes(seen.holders).values(), *envelopes)
        # The mark first: it ends trust. It keeps what was lifted too, so a copy of the image has its history.
        marked = _repair_mark(reader, seen, known)
        if not _repair(reader, subject, seen, _wanted(known, obsolete)) and not marked:
            return
        if attempt:
            time.sleep(random.uniform(0, PAUSE_S * attempt))  # noqa: S311  # no secret
    raise RegistryError(
        f"other writers undid the attestations {ATTEMPTS} times",
        where=f"{store.target}@{subject.digest}",
        expected=f"{len(envelopes)} attestations in every form",
        next_step="check who else writes to this repository, then run the same command again",
    )


def read_envelopes(store: Store, digest: str, public_key: Pinned) -> tuple[Envelope, ...]:
    """Every statement about a manifest that the key signed, from all forms, each once.

    Statements that other keys signed are ignored.

    Raises:
        RegistryError: The store failed, or bytes do not have the digest that names them.
    """
    return tuple(Reader(store, digest, public_key).envelopes(manifests(store, digest)).values())


def manifests(store: Store, digest: str) -> tuple[Manifest, ...]:
    """The manifests that hold the attestations of a manifest, of all signers, in all forms."""
    return (
        *optional(store, legacy_tag(digest)),
        *optional(store, revoked_tag(digest)),
        *bundles_of(store, digest),
    )


def bundles_of(store: Store, digest: str) -> tuple[Manifest, ...]:
    """The bundles of a manifest, by the store's list of referrers and by the fallback index.

    Both are read: a registry may have got its referrers API after the fallback index was written.
    """
    listed = {item.digest: item for item in (*(store.referrers(digest) or ()), *_fallback(store, digest))}
    if len(listed) > MOST_MANIFESTS:
        raise too_many(store, digest, f"at most {MOST_MANIFESTS} bundles")
    found = (store.read_manifest(name) for name in listed)
    return tuple(manifest for manifest in found if is_bundle(manifest))


def write_fallback(store: Store, digest: str, bundles: Sequence[Manifest], replaced: set[str]) -> None:
    """Add bundles to the fallback index and remove the `replaced` ones; entries of other clients stay."""
    entries = {entry.digest: entry for entry in _fallback(store, digest) if entry.digest not in replaced}
    entries |= {manifest.digest: bundle_entry(manifest) for manifest in bundles}
    store.write_manifest(fallback_index(entries.values()), fallback_tag(digest))


# -- what is there, and what should be


def _look(reader: Reader) -> _Seen:
    """Everything that a store holds about a manifest. A manifest that is listed but missing is ignored."""
    store, digest = reader.store, reader.digest
    native = store.referrers(digest)
    fallback = _fallback(store, digest)
    names = {item.digest for item in (*(native or ()), *fallback)}
    tags = {tag for tag in store.tags() if tag.startswith(bundle_tags(digest))}
    if len(names) + len(tags) > 2 * MOST_MANIFESTS:
        raise too_many(store, digest, f"at most {MOST_MANIFESTS} bundles")
    listed = {name: item for name in names for item in reader.manifest(name)}
    own = {name: item for name, item in listed.items() if bundle_tag(digest, name) in tags}
    # Bundles that have a tag and are not listed: of a writer that was killed, or was undone by another.
    others = tags - {bundle_tag(digest, name) for name in own}
    unlisted = [item for tag in others for item in optional(store, tag)]
    return _Seen(
        legacy=optional(store, legacy_tag(digest)),
        mark=optional(store, revoked_tag(digest)),
        listed=listed,
        fallback=fallback,
        # Tags are named by twelve digits, so a bundle of another image may share them.
        tagged=own | {item.digest: item for item in unlisted if _refers(item, digest)},
        native=native is not None,
    )


def _wanted(known: Iterable[Envelope], obsolete: Obsolete) -> dict[str, Envelope]:
    """The envelopes that an image should have: all but obsolete ones and what a lifted revocation ended."""
    found = {envelope.statement.digest: envelope for envelope in known}
    statements = [envelope.statement for envelope in found.values()]
    ended, dropped = set(lifted(statements)), obsolete(statements)
    return {
        digest: item
        for digest, item in found.items()
        if item.statement not in ended and (digest not in dropped or _is_failed(item.statement))
    }


def _repair(reader: Reader, subject: Manifest, seen: _Seen, wanted: Mapping[str, Envelope]) -> bool:
    """Write what is missing in both forms; whether that was anything."""
    legacy = _repair_legacy(reader, seen, wanted)
    return _repair_bundles(reader, subject, seen, wanted) or legacy


# -- the forms


def _repair_mark(reader: Reader, seen: _Seen, known: Iterable[Envelope]) -> bool:
    there = [layer for item in seen.mark for layer in item.descriptors("layers")]
    marked = reader.envelopes(seen.mark)
    failed = {item.statement.digest: item for item in known if _is_failed(item.statement)}
    missing = [item for name, item in failed.items() if name not in marked]
    if missing:
        added = [legacy_layer(reader.store, item) for item in missing]
        mark = legacy_manifest(reader.store, (*there, *added))
        reader.store.write_manifest(mark, revoked_tag(reader.digest))
    return bool(missing)


def _repair_legacy(reader: Reader, seen: _Seen, wanted: Mapping[str, Envelope]) -> bool:
    there = [layer for item in seen.legacy for layer in item.descriptors("layers")]
    kept, present = _kept(reader, there, wanted)
    missing = [item for name, item in wanted.items() if name not in present]
    if len(kept) == len(there) and not missing:
        return False
    added = [legacy_layer(reader.store, item) for item in missing]
    manifest = legacy_manifest(reader.store, (*kept, *added))
    reader.store.write_manifest(manifest, legacy_tag(reader.digest))
    return True


def _repair_bundles(reader: Reader, subject: Manifest, seen: _Seen, wanted: Mapping[str, Envelope]) -> bool:
    store = reader.store
    kept: list[Manifest] = []
    replaced: list[Manifest] = []
    present: set[str] = set()
    for item in seen.bundles.values():
        layers = item.descriptors("layers")
        stays, statements = _kept(reader, layers, wanted)
        (kept if stays else replaced).append(item)
        present |= statements
    created = _moment(wanted.values())
    new = [
        bundle(store, subject, envelope, reader.public_key, created)
        for name, envelope in wanted.items()
        if name not in present
    ]
    mine = [*new, *(item for item in kept if _refers(item, reader.digest) and _is_ours(reader, item))]
    written = _tag_bundles(store, subject.digest, mine, seen)
    return _list_bundles(store, subject.digest, mine, replaced, seen) or written


def _tag_bundles(store: Store, digest: str, mine: Sequence[Manifest], seen: _Seen) -> bool:
    """Store each bundle under its own tag; a registry with a list of referrers adds it there by that."""
    missing = [
        item
        for item in mine
        if item.digest not in seen.tagged or (seen.native and item.digest not in seen.listed)
    ]
    for item in missing:
        store.write_manifest(item, bundle_tag(digest, item.digest))
    return bool(missing)


def _list_bundles(
    store: Store, digest: str, mine: Sequence[Manifest], replaced: Sequence[Manifest], seen: _Seen
) -> bool:
    """Bring the fallback index up to date where the store keeps no list, and delete what was replaced."""
    entries = {entry.digest for entry in seen.fallback}
    stale = entries & {item.digest for item in replaced} | entries - set(seen.listed)
    unlisted = [] if seen.native else [item for item in mine if item.digest not in seen.listed]
    if unlisted or stale:
        write_fallback(store, digest, unlisted, stale)
    # A store that cannot delete keeps the FAILED bundle, and cosign 3 goes on refusing the image.
    deleted = [store.delete_manifest(item.digest) for item in replaced]
    return bool(unlisted or stale or any(deleted))


def _kept(
    reader: Reader, layers: Iterable[Descriptor], wanted: Mapping[str, Envelope]
) -> tuple[list[Descriptor], set[str]]:
    """The layers that stay, also those of other signers, and the digests of this key's statements in them."""
    kept: list[Descriptor] = []
    present: set[str] = set()
    for layer in layers:
        opened = reader.open(layer)
        if opened is None or opened.statement.digest in wanted:
            kept.append(layer)
            present |= {opened.statement.digest} if opened else set()
    return kept, present


def _is_ours(reader: Reader, manifest: Manifest) -> bool:
    return any(reader.open(layer) for layer in manifest.descriptors("layers"))


def _is_failed(statement: Statement) -> bool:
    return statement.predicate_type == VSA and status(statement) == "FAILED"


def _refers(manifest: Manifest, digest: str) -> bool:
    return digest in {item.digest for item in manifest.descriptors("subject")}


def _moment(envelopes: Iterable[Envelope]) -> dt.datetime:
    """The date of new bundles: that of the newest summary, so a repeated command makes the same bytes."""
    summaries = (item.statement for item in envelopes if item.statement.predicate_type == VSA)
    return max(map(time_verified, summaries), default=dt.datetime.fromtimestamp(0, dt.UTC))


def _fallback(store: Store, digest: str) -> tuple[Descriptor, ...]:
    found = optional(store, fallback_tag(digest))
    return tuple(entry for item in found for entry in item.descriptors("manifests"))
