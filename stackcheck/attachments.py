"""Attestations beside an image in a store, in both forms that verifiers read.

In: an image's manifest and signed envelopes. Out: the same in the store, as one legacy `.att` manifest
(cosign 2.x) and as sigstore bundles that refer to the image (cosign 3); and back again. A bundle gets a tag
of its own, as a registry's garbage collection takes manifests that only the fallback index knows. The legacy
form is that of sigstore/cosign specs/ATTESTATION_SPEC.md.
"""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING

from stackcheck import bundle
from stackcheck.errors import CertificateError
from stackcheck.oci import (
    OCI_MANIFEST,
    Descriptor,
    Manifest,
    MissingError,
    RegistryError,
    compact_json,
)
from stackcheck.registry import read_small_blob, write_small_blob
from stackcheck.statement import (
    VSA,
    Envelope,
    not_before,
    open_envelope,
    status,
    subject_digests,
    time_verified,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

    from stackcheck.registry import Store

DSSE_LAYER = "application/vnd.dsse.envelope.v1+json"
IMAGE_CONFIG = "application/vnd.oci.image.config.v1+json"
# Without this annotation cosign 2.5 and 3.1 both refuse the layer, though its value is empty.
REQUIRED_ANNOTATION = {"dev.cosignproject.cosign/signature": ""}
ATTEMPTS = 3  # another host may write at the same moment, and a registry has no lock


def attach(
    store: Store, subject: Manifest, envelopes: Sequence[Envelope], public_key: EllipticCurvePublicKey
) -> None:
    """Write envelopes in both forms where they lack, read them back, and start over when that was undone.

    FAILED summaries of this key that a newer PASSED one among `envelopes` replaces are taken out, as cosign
    refuses an image while any of its summaries fails; what they had ended goes with them.

    Raises:
        RegistryError: The store refused, or the envelopes are not there after three attempts.
    """
    created = dt.datetime.now(dt.UTC)
    for _ in range(ATTEMPTS):
        _write_legacy(store, subject, envelopes, public_key)
        _write_bundles(store, subject, envelopes, public_key, created)
        if not _lacking(store, subject.digest, envelopes, public_key):
            return
    raise RegistryError(
        "the attestations are not in the store after they were written",
        where=f"{store.target}@{subject.digest}",
        got=", ".join(sorted(_lacking(store, subject.digest, envelopes, public_key))),
        next_step="see who else writes to this repository, then run the same command again",
    )


def read(store: Store, digest: str, public_key: EllipticCurvePublicKey) -> tuple[Envelope, ...]:
    """Every statement about a manifest that the key signed, from both forms, each once.

    What other keys signed is passed over. Bytes that are not what their digest names are an error.
    """
    found: dict[str, Envelope] = {}
    for manifest in (*_legacy(store, digest), *bundle.listed(store, digest)):
        for layer in manifest.descriptors("layers"):
            envelope = _opened(store, layer, digest, public_key)
            if envelope is not None:
                found.setdefault(envelope.statement.digest, envelope)
    return tuple(found.values())


def manifests(store: Store, digest: str) -> tuple[Manifest, ...]:
    """The manifests that carry a manifest's attestations, whoever signed them."""
    return (*_legacy(store, digest), *bundle.listed(store, digest))


def legacy_tag(digest: str) -> str:
    """Where cosign 2.x looks for attestations."""
    return bundle.fallback_tag(digest) + ".att"


def _write_legacy(
    store: Store, subject: Manifest, envelopes: Sequence[Envelope], public_key: EllipticCurvePublicKey
) -> None:
    kept, present = _kept(store, subject.digest, _legacy(store, subject.digest), envelopes, public_key)
    added = [_legacy_layer(store, item) for item in envelopes if item.statement.digest not in present]
    layers = {layer.digest: layer for layer in (*kept, *added)}
    config = {
        "architecture": "",
        "os": "",
        "created": "0001-01-01T00:00:00Z",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": list(layers)},
        "history": [{"created": "0001-01-01T00:00:00Z"}] * len(layers),
    }
    document = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": write_small_blob(store, IMAGE_CONFIG, compact_json(config)).as_json(),
        "layers": [layer.as_json() for layer in layers.values()],
    }
    manifest = Manifest(media_type=OCI_MANIFEST, body=compact_json(document))
    store.write_manifest(manifest, legacy_tag(subject.digest))


def _kept(
    store: Store,
    digest: str,
    carriers: Sequence[Manifest],
    envelopes: Sequence[Envelope],
    public_key: EllipticCurvePublicKey,
) -> tuple[list[Descriptor], set[str]]:
    """Layers that stay beside `envelopes`, and the digests of this key's statements in them."""
    kept: list[Descriptor] = []
    present: set[str] = set()
    for manifest in carriers:
        for layer in manifest.descriptors("layers"):
            opened = _opened(store, layer, digest, public_key)
            if not _replaced(opened, envelopes):
                kept.append(layer)
                present |= {opened.statement.digest} if opened else set()
    return kept, present


def _legacy_layer(store: Store, envelope: Envelope) -> Descriptor:
    blob = write_small_blob(store, DSSE_LAYER, envelope.body)
    annotations = {**REQUIRED_ANNOTATION, "predicateType": envelope.statement.predicate_type}
    return Descriptor(media_type=DSSE_LAYER, digest=blob.digest, size=blob.size, annotations=annotations)


def _write_bundles(
    store: Store,
    subject: Manifest,
    envelopes: Sequence[Envelope],
    public_key: EllipticCurvePublicKey,
    created: dt.datetime,
) -> None:
    before = bundle.listed(store, subject.digest)
    kept, present = _kept(store, subject.digest, before, envelopes, public_key)
    staying = {layer.digest for layer in kept}
    replaced = [
        manifest
        for manifest in before
        if not any(layer.digest in staying for layer in manifest.descriptors("layers"))
    ]
    added = [
        bundle.make(store, subject, envelope, public_key, created)
        for envelope in envelopes
        if envelope.statement.digest not in present
    ]
    listed = [store.write_manifest(item, bundle.bundle_tag(subject.digest, item.digest)) for item in added]
    if not all(listed) or (replaced and store.referrers(subject.digest) is None):
        bundle.write_fallback(store, subject.digest, added, {manifest.digest for manifest in replaced})
    for manifest in replaced:
        store.delete_manifest(
            manifest.digest
        )  # a store that cannot delete keeps it: cosign 3 then still refuses


def _lacking(
    store: Store, digest: str, envelopes: Sequence[Envelope], public_key: EllipticCurvePublicKey
) -> set[str]:
    """Digests of the statements that one of the two forms does not have."""
    wanted = {envelope.statement.digest for envelope in envelopes}
    lacking: set[str] = set()
    for form in (_legacy(store, digest), bundle.listed(store, digest)):
        layers = (layer for manifest in form for layer in manifest.descriptors("layers"))
        opened = (_opened(store, layer, digest, public_key) for layer in layers)
        lacking |= wanted - {envelope.statement.digest for envelope in opened if envelope}
    return lacking


def _replaced(envelope: Envelope | None, by: Sequence[Envelope]) -> bool:
    """Whether a PASSED summary being written is newer than a FAILED one, or lifts what ended another."""
    if envelope is None or envelope.statement.predicate_type != VSA:
        return False
    moment, failed = time_verified(envelope.statement), status(envelope.statement) == "FAILED"
    passed = [item.statement for item in by if item.statement.predicate_type == VSA]
    passed = [item for item in passed if status(item) == "PASSED"]
    if failed:
        return any(time_verified(item) > moment for item in passed)
    return any(lifted > moment for lifted in map(not_before, passed) if lifted)


def _legacy(store: Store, digest: str) -> tuple[Manifest, ...]:
    try:
        return (store.read_manifest(legacy_tag(digest)),)
    except MissingError:
        return ()


def _opened(
    store: Store, layer: Descriptor, digest: str, public_key: EllipticCurvePublicKey
) -> Envelope | None:
    """The statement in a layer; None when another key signed it, or it is about another image."""
    if layer.media_type not in {DSSE_LAYER, bundle.BUNDLE}:
        return None
    body = read_small_blob(store, layer)
    try:
        signed = (
            json.dumps(json.loads(body)["dsseEnvelope"]).encode()
            if layer.media_type == bundle.BUNDLE
            else body
        )
        envelope = open_envelope(signed, public_key)
    except (CertificateError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return envelope if digest in subject_digests(envelope.statement) else None
