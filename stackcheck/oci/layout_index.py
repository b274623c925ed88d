"""The index.json of an OCI image layout. In: its bytes. Out: its entries, found by digest and by tag."""

import dataclasses
import functools

from stackcheck.oci.documents import (
    Descriptor,
    IntegrityError,
    Manifest,
    RegistryError,
    descriptor,
    json_object,
)

REF_NAME = "org.opencontainers.image.ref.name"
INDEX_LIMIT_BYTES = 32 * 2**20  # a tag takes some 300 bytes


@dataclasses.dataclass(frozen=True)
class Index:
    """The entries of an index.json, and the first of each digest and tag."""

    entries: tuple[Descriptor, ...]

    @functools.cached_property
    def by_digest(self) -> dict[str, Descriptor]:
        """The first entry of each digest."""
        return {entry.digest: entry for entry in reversed(self.entries)}

    @functools.cached_property
    def by_name(self) -> dict[str, Descriptor]:
        """The first entry of each tag."""
        named = [entry for entry in reversed(self.entries) if REF_NAME in entry.annotations]
        return {entry.annotations[REF_NAME]: entry for entry in named}


def parse_index(body: bytes, where: str) -> Index:
    """Read an index.json; raises `RegistryError` where it is malformed or too long."""
    if len(body) > INDEX_LIMIT_BYTES:
        raise RegistryError(
            "index.json is too long", where=where, expected=f"at most {INDEX_LIMIT_BYTES} bytes"
        )
    found = json_object(body, where).get("manifests")
    if not isinstance(found, list):
        raise RegistryError("index.json lists no manifests", where=where)
    return Index(tuple(descriptor(item, where) for item in found))


def agree(entry: Descriptor, manifest: Manifest, where: str) -> None:
    """Raise `IntegrityError` unless an entry has the size and media type of the manifest that it names."""
    stated = manifest.document.get("mediaType", entry.media_type)
    if entry.size != len(manifest.body) or entry.media_type != stated:
        raise IntegrityError(
            "the index does not describe the manifest that it names",
            where=where,
            got=f"{entry.media_type}, {entry.size} bytes",
            expected=f"{stated}, {len(manifest.body)} bytes",
        )
