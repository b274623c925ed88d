"""The sigstore bundle form of an attestation: a manifest that refers to the image (cosign 3).

In: a signed envelope. Out: a bundle's manifest, and the lists by which it is found: the registry's own, or
the fallback tag's index. Formats: sigstore/cosign specs/BUNDLE_SPEC.md and, in OCI's distribution-spec,
"Referrers Tag Schema".
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from stackcheck import keys
from stackcheck.oci import OCI_INDEX, OCI_MANIFEST, Descriptor, Manifest, MissingError, compact_json
from stackcheck.registry import write_small_blob

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Sequence

    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

    from stackcheck.registry import Store
    from stackcheck.statement import Envelope

BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
EMPTY_CONFIG = "application/vnd.oci.empty.v1+json"


def fallback_tag(digest: str) -> str:
    """Where the referrers of a manifest are listed when the registry does not list them itself."""
    return digest.replace(":", "-")


def bundle_tag(subject: str, bundle: str) -> str:
    """The tag that keeps a bundle from a registry's garbage collection."""
    return f"cert-{subject.removeprefix('sha256:')[:12]}-{bundle.removeprefix('sha256:')[:12]}"


def make(
    store: Store,
    subject: Manifest,
    envelope: Envelope,
    public_key: EllipticCurvePublicKey,
    created: dt.datetime,
) -> Manifest:
    """The manifest of one bundle; its blobs are then in the store, the manifest is not yet."""
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


def write_fallback(store: Store, digest: str, bundles: Sequence[Manifest], replaced: set[str]) -> None:
    """Add to the index that stands in for a referrers API; keys are kept as other clients wrote them."""
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


def listed(store: Store, digest: str) -> tuple[Manifest, ...]:
    """The bundles of a manifest: from the store's own list, and from the fallback index of an older time."""
    listed = {item.digest: item for item in (*(store.referrers(digest) or ()), *_fallback(store, digest))}
    found = (
        store.read_manifest(name) for name in listed
    )  # cosign writes wrong artifact types, so look inside
    return tuple(manifest for manifest in found if _is_bundle(manifest))


def _is_bundle(manifest: Manifest) -> bool:
    return any(layer.media_type == BUNDLE for layer in manifest.descriptors("layers"))


def _fallback(store: Store, digest: str) -> tuple[Descriptor, ...]:
    try:
        return store.read_manifest(fallback_tag(digest)).descriptors("manifests")
    except MissingError:
        return ()
