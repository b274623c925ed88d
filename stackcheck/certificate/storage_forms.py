"""The forms in which a signed statement lies in a store: cosign's two, and the mark of a revoked image.

In: an image's manifest and signed envelopes. Out: manifests and layers, whose blobs are written; and the tags
that find them. Nothing here reads a tag or moves one.

- The legacy form, for cosign 2.x: all envelopes are layers of one manifest under the tag `sha256-<hex>.att`
  (sigstore/cosign specs/ATTESTATION_SPEC.md).
- Sigstore bundles, for cosign 3: one manifest for each envelope, which refers to the image
  (specs/BUNDLE_SPEC.md). If the registry has no referrers API, a fallback tag lists them (OCI
  distribution-spec, "Referrers Tag Schema"). Each bundle also has a tag of its own, because a registry's
  garbage collection removes manifests that only the fallback index names.
- The mark of a revoked image, `sha256-<hex>.revoked`: its FAILED summaries, as layers. Publishers write the
  other two tags at the same moment as a revocation, and a registry keeps the last; this tag only ever gains.
"""

import datetime as dt
import json
from collections.abc import Iterable

from stackcheck.certificate import keyring
from stackcheck.certificate.keyring import Pinned
from stackcheck.certificate.statement import Envelope
from stackcheck.oci.documents import OCI_INDEX, OCI_MANIFEST, Descriptor, Manifest, compact_json
from stackcheck.oci.store import Store, write_small_blob

DSSE_LAYER = "application/vnd.dsse.envelope.v1+json"
IMAGE_CONFIG = "application/vnd.oci.image.config.v1+json"
BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
EMPTY_CONFIG = "application/vnd.oci.empty.v1+json"
# Without this annotation cosign 2.5 and 3.1 both refuse the layer, though its value is empty.
REQUIRED_ANNOTATION = {"dev.cosignproject.cosign/signature": ""}


def legacy_tag(digest: str) -> str:
    """The tag under which cosign 2.x looks for attestations."""
    return fallback_tag(digest) + ".att"


def fallback_tag(digest: str) -> str:
    """The tag that lists the referrers of a manifest where the registry does not list them itself."""
    return digest.replace(":", "-")


def revoked_tag(digest: str) -> str:
    """The tag that holds the FAILED summaries of a manifest."""
    return fallback_tag(digest) + ".revoked"


def bundle_tag(subject: str, bundle: str) -> str:
    """The tag that keeps a bundle from a registry's garbage collection."""
    return bundle_tags(subject) + bundle.removeprefix("sha256:")[:12]


def bundle_tags(subject: str) -> str:
    """How the tags of all bundles of a manifest begin."""
    return f"cert-{subject.removeprefix('sha256:')[:12]}-"


def legacy_layer(store: Store, envelope: Envelope) -> Descriptor:
    """The layer of one envelope in the legacy form."""
    blob = write_small_blob(store, DSSE_LAYER, envelope.body)
    annotations = {**REQUIRED_ANNOTATION, "predicateType": envelope.statement.predicate_type}
    return Descriptor(media_type=DSSE_LAYER, digest=blob.digest, size=blob.size, annotations=annotations)


def legacy_manifest(store: Store, layers: Iterable[Descriptor]) -> Manifest:
    """The manifest of layers in the legacy form; cosign demands a config that lists their digests."""
    unique = {layer.digest: layer for layer in layers}
    config = {
        "architecture": "",
        "os": "",
        "created": "0001-01-01T00:00:00Z",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": list(unique)},
        "history": [{"created": "0001-01-01T00:00:00Z"}] * len(unique),
    }
    document = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": write_small_blob(store, IMAGE_CONFIG, compact_json(config)).as_json(),
        "layers": [layer.as_json() for layer in unique.values()],
    }
    return Manifest(media_type=OCI_MANIFEST, body=compact_json(document))


def bundle(
    store: Store, subject: Manifest, envelope: Envelope, public_key: Pinned, created: dt.datetime
) -> Manifest:
    """The manifest of one bundle. Its blobs are written to the store, the manifest is not yet."""
    signed = json.loads(envelope.body)
    signed["signatures"] = [{"sig": item["sig"]} for item in signed["signatures"]]
    body = {
        "mediaType": BUNDLE,
        "verificationMaterial": {"publicKey": {"hint": envelope.signer or keyring.hints(public_key)[0]}},
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


def bundle_entry(manifest: Manifest) -> Descriptor:
    """A bundle in the fallback index: the specification wants its artifact type and annotations repeated."""
    said = manifest.document.get("annotations") or {}
    return manifest.as_descriptor(artifact_type=BUNDLE, annotations=said if isinstance(said, dict) else {})


def fallback_index(entries: Iterable[Descriptor]) -> Manifest:
    """The index under the fallback tag."""
    document = {
        "schemaVersion": 2,
        "mediaType": OCI_INDEX,
        "manifests": [entry.as_json() for entry in entries],
    }
    return Manifest(media_type=OCI_INDEX, body=compact_json(document))


def is_bundle(manifest: Manifest) -> bool:
    """Whether a manifest holds a bundle. The layers decide: cosign writes wrong artifact types."""
    return any(layer.media_type == BUNDLE for layer in manifest.descriptors("layers"))
