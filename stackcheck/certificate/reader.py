"""The envelopes of trusted keys about one manifest, read from the blobs that hold them.

In: a store, a manifest's digest, the pinned keys. Out: envelopes whose signatures hold, and how many others
name a pinned key and were changed.
"""

import functools
import json
from collections.abc import Collection, Iterable

from stackcheck.certificate import keyring
from stackcheck.certificate.keyring import Pinned
from stackcheck.certificate.statement import (
    Envelope,
    MalformedSummaryError,
    RetiredKeyError,
    open_envelope,
    subject_digests,
)
from stackcheck.certificate.storage_forms import BUNDLE, DSSE_LAYER
from stackcheck.errors import CertificateError
from stackcheck.oci.documents import DanglingError, Descriptor, Manifest, MissingError, RegistryError
from stackcheck.oci.store import Store, read_small_blob

# A renewal adds three statements: this is years of several hosts. More would make `verify` slow.
MOST_LAYERS = 4096
MOST_BYTES = 2**29


class Reader:
    """Opens the envelopes of one signer about one manifest; no blob is fetched or checked twice."""

    def __init__(self, store: Store, digest: str, public_key: Pinned) -> None:
        self.store, self.digest, self.public_key = store, digest, public_key
        self.changed = 0  # bundles that name this key, and that it did not sign as they are
        self.retired: RetiredKeyError | None = None  # why a certificate of a trusted key does not count
        self._opened: dict[tuple[str, str], Envelope | None] = {}
        self._bytes = 0
        self._manifests: dict[str, Manifest] = {}

    def manifest(self, digest: str) -> tuple[Manifest, ...]:
        """The manifest of a digest, fetched once; none if it is gone."""
        if digest not in self._manifests:
            self._manifests.update((item.digest, item) for item in optional(self.store, digest))
        return (self._manifests[digest],) if digest in self._manifests else ()

    def envelopes(self, holders: Iterable[Manifest]) -> dict[str, Envelope]:
        """The envelopes in some manifests, by the digest of their statement."""
        layers = (layer for manifest in holders for layer in manifest.descriptors("layers"))
        found = (envelope for layer in layers if (envelope := self.open(layer)))
        return {envelope.statement.digest: envelope for envelope in found}

    def open(self, layer: Descriptor) -> Envelope | None:
        """The envelope in a layer; None if a different key signed it, or it is about a different image."""
        if layer.media_type not in {DSSE_LAYER, BUNDLE}:
            return None
        name = (layer.media_type, layer.digest)
        if name not in self._opened:
            self._bytes += layer.size
            if len(self._opened) >= MOST_LAYERS or self._bytes > MOST_BYTES:
                raise too_many(
                    self.store, self.digest, f"at most {MOST_LAYERS} attestations, {MOST_BYTES} bytes"
                )
            self._opened[name] = self._read(layer)
        return self._opened[name]

    def _read(self, layer: Descriptor) -> Envelope | None:
        body = read_small_blob(self.store, layer)
        named = False
        try:
            signed, named = self._envelope(body) if layer.media_type == BUNDLE else (body, False)
            envelope = open_envelope(signed, self.public_key)
        except MalformedSummaryError:
            raise
        except RetiredKeyError as error:
            self.retired = error
            return None
        except (CertificateError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.changed += named
            return None
        return envelope if self.digest in subject_digests(envelope.statement) else None

    @functools.cached_property
    def _hints(self) -> Collection[str]:
        return keyring.hints(self.public_key)

    def _envelope(self, body: bytes) -> tuple[bytes, bool]:
        """The envelope in a bundle, and whether the bundle names our key."""
        document = json.loads(body)
        material = document.get("verificationMaterial")
        public = material.get("publicKey") if isinstance(material, dict) else None
        named = isinstance(public, dict) and public.get("hint") in self._hints
        return json.dumps(document["dsseEnvelope"]).encode(), named


def optional(store: Store, name: str) -> tuple[Manifest, ...]:
    """The manifest of a tag or digest; none if it is not there. A tag without its manifest is an error."""
    try:
        return (store.read_manifest(name),)
    except DanglingError:
        raise
    except MissingError:
        return ()


def too_many(store: Store, digest: str, expected: str) -> RegistryError:
    """The error for more attestations than are read."""
    return RegistryError(
        "the image has too many attestations",
        where=f"{store.target}@{digest}",
        expected=expected,
        next_step="certify the image again under a new digest, or remove old attestations",
    )
