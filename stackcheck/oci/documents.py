"""The documents of OCI: descriptors and manifests, their media types, and their digests.

In: bytes from a store, which are not trusted. Out: checked values, or an error that names what is wrong.
Source: https://github.com/opencontainers/image-spec and distribution-spec.
"""

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from stackcheck.errors import PublishError, StackcheckError

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
IMAGE_MANIFESTS = frozenset({OCI_MANIFEST, DOCKER_MANIFEST})

MANIFEST_LIMIT_BYTES = 4 * 2**20  # what registries accept at most
SMALL_BLOB_LIMIT_BYTES = 32 * 2**20  # configs and attestations; layers are streamed
TIMEOUT_S = (10.0, 60.0)  # to connect, and between two bytes of an answer
CHUNK_BYTES = 2**20

TAGS_SHOWN = 4  # in the error about a tag that does not exist

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_ATTACHMENT = re.compile(r"cert-[0-9a-f]{12}-[0-9a-f]{12}|sha256-[0-9a-f]{64}(\.[a-z]+)?")


class RegistryError(StackcheckError):
    """A store refused, did not answer, or sent an invalid answer: nothing is known of what it holds.

    No kind of `PublishError` or `CertificateError`, so code that handles those never takes it for an absence.
    """

    exit_code = PublishError.exit_code
    usual_step = "check the reference and the store that it names, then run the command again"


class MissingError(RegistryError):
    """The store has no such tag, manifest or blob."""


class DanglingError(MissingError):
    """The store has the tag, and lacks the manifest that it names: something was taken away."""


class IntegrityError(RegistryError):
    """The bytes are not the ones that the digest names."""


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """A pointer of OCI: media type, digest and size of some bytes, and what is said about them."""

    media_type: str
    digest: str
    size: int
    annotations: dict[str, str] = field(default_factory=dict)
    artifact_type: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The descriptor as OCI spells it."""
        document: dict[str, Any] = {"mediaType": self.media_type, "digest": self.digest, "size": self.size}
        if self.artifact_type:
            document["artifactType"] = self.artifact_type
        if self.annotations:
            document["annotations"] = self.annotations
        return document


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A manifest's bytes and what they were stored as."""

    media_type: str
    body: bytes

    @cached_property
    def digest(self) -> str:
        """The digest of the bytes."""
        return sha256(self.body)

    @cached_property
    def document(self) -> dict[str, Any]:
        """The bytes as JSON.

        Raises:
            RegistryError: They are not a JSON object.
        """
        return json_object(self.body, self.digest)

    def descriptors(self, key: str) -> tuple[Descriptor, ...]:
        """The descriptors of one member: `layers`, `manifests`, or the single `config` or `subject`."""
        if key not in self._descriptors:
            found = self.document.get(key) or []
            items = found if isinstance(found, list) else [found]
            self._descriptors[key] = tuple(descriptor(item, self.digest) for item in items)
        return self._descriptors[key]

    @cached_property
    def _descriptors(self) -> dict[str, tuple[Descriptor, ...]]:
        """What `descriptors` read so far: a manifest may have tens of thousands, and is asked often."""
        return {}

    def as_descriptor(self, **changes: Any) -> Descriptor:
        """The descriptor of this manifest."""
        return Descriptor(media_type=self.media_type, digest=self.digest, size=len(self.body), **changes)


def is_digest(text: str) -> bool:
    """Whether a name is a digest and not a tag."""
    return _DIGEST.fullmatch(text) is not None


def is_attachment(tag: str) -> bool:
    """Whether a tag leads to attestations, and not to an image."""
    return _ATTACHMENT.fullmatch(tag) is not None


def no_such_tag(name: str, where: str, tags: Sequence[str]) -> MissingError:
    """The error of a store whose tags, oldest first, lack a name; it shows the newest images."""
    newest = [tag for tag in reversed(tags) if not is_attachment(tag)][:TAGS_SHOWN]
    return MissingError(
        "there is no such tag",
        where=where,
        got=name,
        expected=", ".join(newest) or "the tag of an image; this store has no image",
        next_step="use one of these tags" if newest else "stackcheck images",
    )


def sha256(body: bytes) -> str:
    """The digest of some bytes, as OCI spells it."""
    return "sha256:" + hashlib.sha256(body).hexdigest()


def compact_json(document: object) -> bytes:
    """JSON with sorted keys and no spaces: the same document always has the same digest."""
    return json.dumps(document, separators=(",", ":"), sort_keys=True, allow_nan=False).encode()


def json_object(body: bytes, where: str) -> dict[str, Any]:
    """The bytes as a JSON object; raises `RegistryError` when they are not."""
    try:
        document: object = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RegistryError("a document of the store is not JSON", where=where, got=str(error)) from error
    if not isinstance(document, dict):
        raise RegistryError("a document of the store is not a JSON object", where=where)
    return dict(document)


def stored_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if it is missing or damaged, because it can be made again."""
    try:
        return json_object(path.read_bytes(), str(path))
    except (FileNotFoundError, RegistryError):
        return {}


def descriptor(document: object, where: str) -> Descriptor:
    """Read a descriptor; raises `RegistryError` when a field is missing or malformed."""
    match document:
        case {"mediaType": str(media_type), "digest": str(digest), "size": int(size), **rest} if is_digest(
            digest
        ):
            annotations, artifact_type = rest.get("annotations") or {}, rest.get("artifactType")
        case _:
            raise RegistryError("a descriptor is malformed", where=where, got=json.dumps(document)[:200])
    if not isinstance(annotations, dict):
        raise RegistryError("the annotations of a descriptor are malformed", where=where)
    return Descriptor(
        media_type=media_type,
        digest=digest,
        size=size,
        annotations={str(key): str(value) for key, value in annotations.items()},
        artifact_type=str(artifact_type) if artifact_type else None,
    )


def checked(
    chunks: Iterable[bytes], digest: str, where: str, size: int | None = None, *, limit: int | None = None
) -> Iterator[bytes]:
    """Pass bytes on and raise `IntegrityError` after the last if they are not what the digest names.

    Raised as soon as there are more than `size`, or `limit` if the size is not known: an endless answer is
    neither awaited nor stored.
    """
    sha = hashlib.sha256()
    count = 0
    most = limit if size is None else size
    for chunk in chunks:
        sha.update(chunk)
        count += len(chunk)
        if most is not None and count > most:
            raise IntegrityError(
                "the blob is larger than declared",
                where=where,
                got=f"{count} bytes and more",
                expected=f"{digest}, at most {most} bytes",
            )
        yield chunk
    got = "sha256:" + sha.hexdigest()
    if got != digest or size not in {None, count}:
        raise IntegrityError(
            "the stored bytes are not the ones that were certified",
            where=where,
            got=f"{got}, {count} bytes",
            expected=digest + (f", {size} bytes" if size is not None else ""),
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
