"""References and stores: where an image and its attestations live, whatever the place is.

In: `oci:DIR[:TAG|@DIGEST]` or `HOST/REPO[:TAG|@DIGEST]`. Out: a `Reference`; and the `Store`
protocol, which reads and writes blobs, manifests and tags. What is read is checked against its digest first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from stackcheck.errors import ConfigurationError
from stackcheck.oci.addresses import is_port
from stackcheck.oci.documents import (
    SMALL_BLOB_LIMIT_BYTES,
    Descriptor,
    Manifest,
    RegistryError,
    checked,
    is_digest,
    sha256,
)

# The part of an address that may hold a password: all up to the last @ that no digest follows.
_USER = re.compile(r".*@(?!sha256:[0-9A-Fa-f]*$)", re.DOTALL)
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_HOST = re.compile(
    r"(?:[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+|localhost|[A-Za-z0-9-]+(?=:)|\[[0-9a-fA-F:]+\])"
    r"(?::(?P<port>[0-9]{1,5}))?"
)
_REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*")


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Where an image is: a target (`oci:DIR` or `HOST/REPO`) and a tag or a digest in it."""

    target: str
    tag: str | None = None
    digest: str | None = None

    def __str__(self) -> str:
        """The spelling that `parse_reference` reads."""
        tag = f":{self.tag}" if self.tag else ""
        return self.target + tag + (f"@{self.digest}" if self.digest else "")

    @property
    def name(self) -> str:
        """What the store looks up: the digest when there is one, else the tag.

        Raises:
            ConfigurationError: The reference names a target only.
        """
        found = self.digest or self.tag
        if found is None:
            raise ConfigurationError(
                "the reference names no image", got=self.target, expected=f"{self.target}:TAG or @sha256:…"
            )
        return found


class Store(Protocol):
    """A place for images: one repository of a registry, or an OCI image layout on disk."""

    target: str

    def has_blob(self, digest: str) -> bool:
        """Whether the blob is there."""

    def read_blob(self, digest: str) -> Iterator[bytes]:
        """The blob's bytes; after the last, `IntegrityError` if they are not what the digest names."""

    def write_blob(self, blob: Descriptor, chunks: Callable[[], Iterable[bytes]]) -> None:
        """Store a blob, checked on the way; `chunks` is called again when it has to start over."""

    def mount_blob(self, digest: str, source: Store) -> bool:  # the protocol's signature
        """Use a blob of another store without moving its bytes; False when that is not possible."""

    def read_manifest(self, name: str) -> Manifest:
        """The manifest of a tag or digest; raises `MissingError`, `IntegrityError`."""

    def write_manifest(self, manifest: Manifest, name: str) -> bool:
        """Store a manifest under a tag or its digest; True when the store itself lists it as a referrer."""

    def referrers(self, digest: str) -> tuple[Descriptor, ...] | None:
        """What the store itself lists as referring to a manifest; None when it keeps no such list."""

    def tags(self) -> tuple[str, ...]:
        """Every tag."""

    def delete_tag(self, tag: str) -> bool:  # the protocol's signature
        """Remove a tag; False where a store can only delete its manifest."""

    def delete_manifest(self, digest: str) -> bool:
        """Delete a manifest; False where the store does not do that."""

    def writing(self, report: Callable[[str], None]) -> AbstractContextManager[None]:
        """Hold the store for writing; `report` gets a line if it has to wait for another writer."""

    def tidied(self) -> AbstractContextManager[None]:
        """At the end remove what the body replaced, where the store does not do that itself."""


def parse_reference(text: str) -> Reference:
    """Read a reference.

    Raises:
        ConfigurationError: It is neither `oci:DIR[:TAG][@DIGEST]` nor `HOST/REPO[:TAG][@DIGEST]`.
    """
    if "://" in text:
        raise _unreadable(text, "leave the scheme out, and log in with docker login")
    rest, at, digest = text.partition("@")
    if at and not is_digest(digest):
        raise _unreadable(text, "the digest is not sha256: and 64 hexadecimal digits")
    target, colon, tag = rest.rpartition(":")
    if not colon or "/" in tag or target in {"", "oci"}:
        target, tag = rest, ""
    elif not is_tag(tag):
        raise _unreadable(text, f"{tag!r} is not a valid tag")
    return Reference(target=_target(target, text), tag=tag or None, digest=digest or None)


def parse_target(text: str) -> str:
    """Read where images are published to.

    Raises:
        ConfigurationError: It is neither `oci:DIR` nor `HOST/REPO`, or names a tag or digest as well.
    """
    found = parse_reference(text)
    if found.tag or found.digest:
        raise ConfigurationError(
            "a publish target must not have a tag or a digest", got=text, expected=found.target
        )
    return found.target


def is_tag(text: str) -> bool:
    """Whether a registry takes this as a tag."""
    return _TAG.fullmatch(text) is not None


def read_small_blob(store: Store, blob: Descriptor) -> bytes:
    """A whole blob in memory, checked; for configs and attestations."""
    if blob.size > SMALL_BLOB_LIMIT_BYTES:
        raise RegistryError("a blob is too large for an attestation or config", where=blob.digest)
    return b"".join(checked(store.read_blob(blob.digest), blob.digest, store.target, blob.size))


def copy_blob(blob: Descriptor, source: Store, store: Store, report: Callable[[str], None]) -> None:
    """Copy a blob; if `report` has a method `copying(chunks, size_bytes)`, the bytes pass through it."""
    watched = getattr(report, "copying", lambda chunks, _size: chunks)
    store.write_blob(blob, lambda: watched(source.read_blob(blob.digest), blob.size))


def write_small_blob(store: Store, media_type: str, body: bytes) -> Descriptor:
    """Store some bytes and return their descriptor."""
    blob = Descriptor(media_type=media_type, digest=sha256(body), size=len(body))
    if not store.has_blob(blob.digest):
        store.write_blob(blob, lambda: (body,))
    return blob


def _target(target: str, text: str) -> str:
    if target.startswith("oci:"):
        if not target.removeprefix("oci:"):
            raise _unreadable(text, "the folder is missing")
        return target
    host, slash, repository = target.partition("/")
    named = _HOST.fullmatch(host)
    if not slash or not named or not _REPOSITORY.fullmatch(repository):
        raise _unreadable(text, "it does not have the form HOST/REPO")
    if named["port"] and not is_port(int(named["port"])):
        raise _unreadable(text, f"{named['port']} is not a valid port")
    return target


def _unreadable(text: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"this is not a reference: {why}",
        got=_USER.sub("…@", text),
        expected="oci:DIR:TAG, HOST/REPO:TAG, or either with @sha256:…",
    )
