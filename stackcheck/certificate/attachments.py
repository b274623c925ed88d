"""Attestations beside an image in a store, in both forms that cosign reads.

In: an image's manifest and signed envelopes. Out: the same envelopes in the store, and back again.

- The legacy form, for cosign 2.x: all envelopes are layers of one manifest under the tag `sha256-<hex>.att`
  (sigstore/cosign specs/ATTESTATION_SPEC.md).
- Sigstore bundles, for cosign 3: one manifest for each envelope, which refers to the image
  (specs/BUNDLE_SPEC.md). If the registry has no referrers API, a fallback tag lists them (OCI
  distribution-spec, "Referrers Tag Schema"). Each bundle also has a tag of its own, because a registry's
  garbage collection removes manifests that only the fallback index names.
"""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING

from stackcheck.certificate import keys
from stackcheck.certificate.statement import (
    VSA,
    Envelope,
    not_before,
    open_envelope,
    status,
    subject_digests,
    time_verified,
)
from stackcheck.errors import CertificateError
from stackcheck.oci.documents import (
    OCI_INDEX,
    OCI_MANIFEST,
    Descriptor,
    Manifest,
    MissingError,
    RegistryError,
    compact_json,
)
from stackcheck.oci.store import read_small_blob, write_small_blob

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

    from stackcheck.oci.store import Store

DSSE_LAYER = "application/vnd.dsse.envelope.v1+json"
IMAGE_CONFIG = "application/vnd.oci.image.config.v1+json"
BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
EMPTY_CONFIG = "application/vnd.oci.empty.v1+json"
# Without this annotation cosign 2.5 and 3.1 both refuse the layer, though its value is empty.
REQUIRED_ANNOTATION = {"dev.cosignproject.cosign/signature": ""}
ATTEMPTS = 3  # a registry has no lock, so another host may write at the same moment


def attach(
    store: Store,
    subject: Manifest,
    envelopes: Sequence[Envelope],
    public_key: EllipticCurvePublicKey,
    *,
    obsolete: AbstractSet[str] = frozenset(),
) -> None:
    """Write the envelopes that are missing, in both forms; read them back; repeat if another writer undid it.

    FAILED summaries of this key that are older than a PASSED one among `envelopes` are removed, because
    cosign refuses an image while any of its summaries is FAILED. PASSED summaries that such a revocation had
    made invalid are removed too, and the statements of this key whose digests are in `obsolete`.

    Raises:
        RegistryError: The store refused, or envelopes are still missing after three attempts.
    """
    created = dt.datetime.now(dt.UTC)
    for _ in range(ATTEMPTS):
        _write_legacy(store, subject, envelopes, public_key, obsolete=obsolete)
        _write_bundles(store, subject, envelopes, public_key, created, obsolete=obsolete)
        if not _missing(store, subject.digest, envelopes, public_key):
            return
    raise RegistryError(
        f"attestations are missing in the store after {ATTEMPTS} attempts to write them",
        where=f"{store.target}@{subject.digest}",
        got=f"without {', '.join(sorted(_missing(store, subject.digest, envelopes, public_key)))}",
        expected=f"{len(envelopes)} attestations in both forms",
        next_step="check who else writes to this repository, then run the same command again",
    )


def read_envelopes(store: Store, digest: str, public_key: EllipticCurvePublicKey) -> tuple[Envelope, ...]:
    """Every statement about a manifest that the key signed, from both forms, each once.

    Statements that other keys signed are ignored.

    Raises:
        RegistryError: The store failed, or bytes do not have the digest that names them.
    """
    found: dict[str, Envelope] = {}
    for manifest in manifests(store, digest):
        for layer in manifest.descriptors("layers"):
            envelope = _opened(store, layer, digest, public_key)
            if envelope is not None:
                found.setdefault(envelope.statement.digest, envelope)
    return tuple(found.values())


def manifests(store: Store, digest: str) -> tuple[Manifest, ...]:
    """The manifests that hold the attestations of a manifest, of all signers, in both forms."""
    return (*_legacy(store, digest), *bundles_of(store, digest))


def legacy_tag(digest: str) -> str:
    """The tag under which cosign 2.x looks for attestations."""
    return fallback_tag(digest) + ".att"


def fallback_tag(digest: str) -> str:
    """The tag that lists the referrers of a manifest where the registry does not list them itself."""
    return digest.replace(":", "-")


def bundle_tag(subject: str, bundle: str) -> str:
    """The tag that keeps a bundle from a registry's garbage collection."""
    return f"cert-{subject.removeprefix('sha256:')[:12]}-{bundle.removeprefix('sha256:')[:12]}"


def bundles_of(store: Store, digest: str) -> tuple[Manifest, ...]:
    """The bundles of a manifest, by the store's list of referrers and by the fallback index.

    Both are read: a registry may have got its referrers API after the fallback index was written.
    """
    listed = {item.digest: item for item in (*(store.referrers(digest) or ()), *_fallback(store, digest))}
    found = (store.read_manifest(name) for name in listed)
    # The layers decide: cosign writes wrong artifact types.
    return tuple(manifest for manifest in found if _is_bundle(manifest))


def write_fallback(store: Store, digest: str, bundles: Sequence[Manifest], replaced: set[str]) -> None:
    """Add bundles to the fallback index and remove the `replaced` ones; entries of other clients stay."""
    entries = {entry.digest: entry for entry in _fallback(store, digest) if entry.digest not in replaced}
    for manifest in bundles:
        annotations = manifest.document["annotations"]
        entries[manifest.digest] = manifest.as_descriptor(artifact_type=BUNDLE, annotations=annotations)
    document = {
        "schemaVersion": 2,
        "mediaType": OCI_INDEX,
        "manifests": [entry.as_json() for entry in entries.values()],
    }
    index = Manifest(media_type=OCI_INDEX, body=compact_json(document))
    store.write_manifest(index, fallback_tag(digest))


# -- the legacy form


def _write_legacy(
    store: Store,
    subject: Manifest,
    envelopes: Sequence[Envelope],
    public_key: EllipticCurvePublicKey,
    *,
    obsolete: AbstractSet[str],
) -> None:
    before = _legacy(store, subject.digest)
    kept, present = _kept(store, subject.digest, before, envelopes, public_key, obsolete=obsolete)
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


def _legacy_layer(store: Store, envelope: Envelope) -> Descriptor:
    blob = write_small_blob(store, DSSE_LAYER, envelope.body)
    annotations = {**REQUIRED_ANNOTATION, "predicateType": envelope.statement.predicate_type}
    return Descriptor(media_type=DSSE_LAYER, digest=blob.digest, size=blob.size, annotations=annotations)


def _legacy(store: Store, digest: str) -> tuple[Manifest, ...]:
    try:
        return (store.read_manifest(legacy_tag(digest)),)
    except MissingError:
        return ()


# -- the bundles


def _write_bundles(
    store: Store,
    subject: Manifest,
    envelopes: Sequence[Envelope],
    public_key: EllipticCurvePublicKey,
    created: dt.datetime,
    *,
    obsolete: AbstractSet[str],
) -> None:
    before = bundles_of(store, subject.digest)
    kept, present = _kept(store, subject.digest, before, envelopes, public_key, obsolete=obsolete)
    kept_digests = {layer.digest for layer in kept}
    replaced = [
        manifest
        for manifest in before
        if not any(layer.digest in kept_digests for layer in manifest.descriptors("layers"))
    ]
    added = [
        _make_bundle(store, subject, envelope, public_key, created)
        for envelope in envelopes
        if envelope.statement.digest not in present
    ]
    listed = [store.write_manifest(item, bundle_tag(subject.digest, item.digest)) for item in added]
    if not all(listed) or (replaced and store.referrers(subject.digest) is None):
        write_fallback(store, subject.digest, added, {manifest.digest for manifest in replaced})
    for manifest in replaced:
        # A store that cannot delete keeps the FAILED bundle, and cosign 3 goes on refusing the image.
        store.delete_manifest(manifest.digest)


def _make_bundle(
    store: Store,
    subject: Manifest,
    envelope: Envelope,
    public_key: EllipticCurvePublicKey,
    created: dt.datetime,
) -> Manifest:
    """The manifest of one bundle. Its blobs are written to the store, the manifest is not yet."""
    signed = json.loads(envelope.body)
    signed["signatures"] = [{"sig": item["sig"]} for item in signed["signatures"]]
    body = {
        "mediaType": BUNDLE,
        "verificationMaterial": {"publicKey": {"hint": keys.hint(public_key)}},
        "dsseEnvelope": signed,
    }
    document = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "artifactType": BUNDLE,
        "config": write_small_blob(store, EMPTY_CONFIG, b"{}").as_json(),
        "layers": [write_small_blob(store, BUNDLE, compact_json(body)).as_json()],
        "subject": subject.as_descriptor().as_json(),
        "annotations": {
            "org.opencontainers.image.created": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "dev.sigstore.bundle.content": "dsse-envelope",
            "dev.sigstore.bundle.predicateType": envelope.statement.predicate_type,
        },
    }
    return Manifest(media_type=OCI_MANIFEST, body=compact_json(document))


def _is_bundle(manifest: Manifest) -> bool:
    return any(layer.media_type == BUNDLE for layer in manifest.descriptors("layers"))


def _fallback(store: Store, digest: str) -> tuple[Descriptor, ...]:
    try:
        return store.read_manifest(fallback_tag(digest)).descriptors("manifests")
    except MissingError:
        return ()


# -- both forms


def _kept(
    store: Store,
    digest: str,
    holders: Sequence[Manifest],
    envelopes: Sequence[Envelope],
    public_key: EllipticCurvePublicKey,
    *,
    obsolete: AbstractSet[str],
) -> tuple[list[Descriptor], set[str]]:
    """Layers that stay beside `envelopes`, and the digests of this key's statements in them."""
    kept: list[Descriptor] = []
    present: set[str] = set()
    for manifest in holders:
        for layer in manifest.descriptors("layers"):
            opened = _opened(store, layer, digest, public_key)
            dropped = opened is not None and opened.statement.digest in obsolete
            if not dropped and not _is_replaced(opened, envelopes):
                kept.append(layer)
                present |= {opened.statement.digest} if opened else set()
    return kept, present


def _is_replaced(envelope: Envelope | None, by: Sequence[Envelope]) -> bool:
    """Whether a PASSED summary in `by` makes this summary obsolete.

    A FAILED summary is obsolete if a PASSED one is newer; a PASSED one, if it is older than the revocation
    that a PASSED one in `by` supersedes.
    """
    if envelope is None or envelope.statement.predicate_type != VSA:
        return False
    moment, failed = time_verified(envelope.statement), status(envelope.statement) == "FAILED"
    summaries = [item.statement for item in by if item.statement.predicate_type == VSA]
    passed = [item for item in summaries if status(item) == "PASSED"]
    if failed:
        return any(time_verified(item) > moment for item in passed)
    return any(revoked_at > moment for revoked_at in map(not_before, passed) if revoked_at)


def _missing(
    store: Store, digest: str, envelopes: Sequence[Envelope], public_key: EllipticCurvePublicKey
) -> set[str]:
    """Digests of the statements that at least one of the two forms does not have."""
    wanted = {envelope.statement.digest for envelope in envelopes}
    missing: set[str] = set()
    for form in (_legacy(store, digest), bundles_of(store, digest)):
        layers = (layer for manifest in form for layer in manifest.descriptors("layers"))
        opened = (_opened(store, layer, digest, public_key) for layer in layers)
        missing |= wanted - {envelope.statement.digest for envelope in opened if envelope}
    return missing


def _opened(
    store: Store, layer: Descriptor, digest: str, public_key: EllipticCurvePublicKey
) -> Envelope | None:
    """The envelope in a layer; None if a different key signed it, or it is about a different image."""
    if layer.media_type not in {DSSE_LAYER, BUNDLE}:
        return None
    body = read_small_blob(store, layer)
    try:
        signed = json.dumps(json.loads(body)["dsseEnvelope"]).encode() if layer.media_type == BUNDLE else body
        envelope = open_envelope(signed, public_key)
    except (CertificateError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return envelope if digest in subject_digests(envelope.statement) else None
