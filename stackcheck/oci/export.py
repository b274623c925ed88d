"""An image as one file: a tar for docker, podman and Apptainer.

In: the layout of an image that was built or tested here. Out: the tar, whole or not at all, with exactly the
blobs that the layout's manifest names.
"""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

from stackcheck.files.atomic import write_atomically
from stackcheck.oci import archive
from stackcheck.oci.documents import CHUNK_BYTES, IntegrityError, checked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def export(layout: Path, reference: str, path: Path) -> None:
    """Write an image as one tar for docker, podman and Apptainer, whole or not at all.

    Raises:
        IntegrityError: A blob of the layout is not what its digest names.
        ConfigurationError: The disk is full or the folder is not writable; no partial file is left.
    """
    for digest in archive.blobs_of(layout, archive.manifest_digest(layout)):
        stored = archive.blob(layout, digest)
        if not stored.exists():
            raise IntegrityError("the layout is incomplete", where=str(stored), got="no such file")
        with stored.open("rb") as file:
            for _ in checked(_chunks(file), digest, str(stored)):
                pass
    write_atomically(path, _streamed(layout, reference))


def size_bytes(layout: Path) -> int:
    """How large the blobs of a layout's image are: the tar is a few kilobytes more."""
    manifest = archive.read_json(layout, archive.manifest_digest(layout))
    return sum(int(entry["size"]) for entry in (manifest["config"], *manifest["layers"]))


def _streamed(layout: Path, reference: str) -> Iterator[bytes]:
    with archive.stream(layout, reference) as source:
        yield from _chunks(source)


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    return iter(lambda: file.read(CHUNK_BYTES), b"")
