"""A layout on disk that holds one image, and the one tar that engines load and save.

In: a layout folder with one manifest, or a tar as `docker save` writes it. Out: the other. The tar serves
both formats at once (`index.json` for OCI, `manifest.json` for older readers), so that docker, podman and
Apptainer take it. Every blob that is read is compared with its digest.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import tarfile
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from stackcheck.errors import ConfigurationError, EngineError
from stackcheck.files.atomic import write_atomically
from stackcheck.files.digest import sha256_of
from stackcheck.oci.documents import (
    CHUNK_BYTES,
    DOCKER_INDEX,
    OCI_INDEX,
    OCI_MANIFEST,
    REF_NAME,
    SMALL_BLOB_LIMIT_BYTES,
    Descriptor,
    IntegrityError,
    Manifest,
    RegistryError,
    checked,
    compact_json,
    json_object,
    sha256,
)
from stackcheck.oci.layout import LAYOUT_FILE, OciLayout

OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar"
EPOCH = 0
ANNOTATION = "org.opencontainers.image."


class ImageLayout(OciLayout):
    """A layout with one image, as the builder and `unpack` write it under `build/`."""

    def image(self) -> Manifest:
        """The one manifest of the layout; `ConfigurationError` if it is damaged or has several."""
        with self._naming_damage():
            return self.only_manifest()

    def json(self, digest: str) -> dict[str, Any]:
        """A blob that is a JSON object; `ConfigurationError` if it is not."""
        with self._naming_damage():
            path = str(self.blob_path(digest))
            chunks = checked(self._chunks(digest), digest, path, limit=SMALL_BLOB_LIMIT_BYTES)
            return json_object(b"".join(chunks), path)

    def config(self) -> dict[str, Any]:
        """The config of the image: its platform, labels and history."""
        return self.json(self.blobs()[1].digest)

    def blobs(self) -> tuple[Descriptor, ...]:
        """The blobs of the image: manifest, config and layers."""
        manifest = self.image()
        with self._naming_damage():
            (config,) = manifest.descriptors("config")
            return (manifest.as_descriptor(), config, *manifest.descriptors("layers"))

    def size_bytes(self) -> int:
        """How large config and layers are: the tar is a few kilobytes more."""
        return sum(blob.size for blob in self.blobs()[1:])

    def write_tar(self, reference: str, file: IO[bytes]) -> None:
        """Write the tar of the image; equal images under equal names give equal bytes."""
        manifest, *blobs = self.blobs()
        paths = [f"blobs/{blob.digest.replace(':', '/')}" for blob in blobs]
        with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as tar:
            _add_bytes(tar, "oci-layout", compact_json(LAYOUT_FILE))
            _add_bytes(tar, "index.json", _index(manifest, reference))
            old = [{"Config": paths[0], "RepoTags": [reference], "Layers": paths[1:]}]
            _add_bytes(tar, "manifest.json", json.dumps(old).encode())
            for digest in dict.fromkeys(blob.digest for blob in (manifest, *blobs)):
                self._add_blob(tar, digest)

    @contextlib.contextmanager
    def stream(self, reference: str) -> Iterator[IO[bytes]]:
        """The same tar as a pipe to read from, so that no second copy is written to disk.

        Raises:
            RegistryError: A blob is missing or is not what its digest names; the reader got a tar cut short.
        """
        read_end, write_end = os.pipe()
        failed: list[OSError | RegistryError | ConfigurationError] = []

        def fill() -> None:
            try:
                # The reader may stop early (an engine that refuses): that is its error, not ours.
                with contextlib.suppress(BrokenPipeError), os.fdopen(write_end, "wb") as sink:
                    self.write_tar(reference, sink)
            except (OSError, RegistryError, ConfigurationError) as error:
                failed.append(error)

        thread = threading.Thread(target=fill, daemon=True)
        thread.start()
        try:
            with os.fdopen(read_end, "rb") as source:
                yield source
        finally:
            thread.join(timeout=10)
            if failed and isinstance(failed[0], OSError):
                raise IntegrityError(
                    "the layout is incomplete",
                    where=str(failed[0].filename or self.root),
                    got=failed[0].strerror,
                ) from failed[0]
            if failed:
                raise failed[0]

    def export(self, reference: str, path: Path) -> None:
        """Write the image as one tar for docker, podman and Apptainer, whole or not at all.

        Raises:
            RegistryError: A blob of the layout is missing or is not what its digest names.
            FileError: The disk is full or the folder is not writable; no partial file is left.
        """
        write_atomically(path, self._streamed(reference))

    def keep_only(self, digest: str) -> None:
        """Reduce the layout to one manifest and what it names."""
        manifest = Manifest(media_type=OCI_MANIFEST, body=self._manifest_body(digest))
        entry = Descriptor(
            media_type=manifest.document.get("mediaType", OCI_MANIFEST),
            digest=digest,
            size=len(manifest.body),
        )
        named = (*manifest.descriptors("config"), *manifest.descriptors("layers"))
        needed = {digest, *(blob.digest for blob in named)}
        for path in self.root.glob("blobs/*/*"):
            if f"{path.parent.name}:{path.name}" not in needed:
                path.unlink()
        for path in self.root.iterdir():
            if path.name not in {"blobs", "oci-layout", "index.json"}:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        (self.root / "oci-layout").write_bytes(compact_json(LAYOUT_FILE))
        (self.root / "index.json").write_bytes(_index(entry, None))

    def annotate(self) -> None:
        """Repeat the image's own OCI labels and its date in its manifest, where registries look for them."""
        config, manifest = self.config(), self.image().document
        labels = (config.get("config") or {}).get("Labels") or {}
        stated = {
            name: text for name, text in labels.items() if name.startswith(ANNOTATION) and name != REF_NAME
        }
        if created := config.get("created"):
            stated[f"{ANNOTATION}created"] = created
        body = compact_json(manifest | {"annotations": (manifest.get("annotations") or {}) | stated})
        write_atomically(self.blob_path(sha256(body)), (body,))
        self.keep_only(sha256(body))

    def move_to(self, place: Path) -> None:
        """Put the finished folder in another's place by renames alone."""
        old = place.with_name(place.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        if place.exists():
            place.rename(old)
        self.root.rename(place)
        shutil.rmtree(old, ignore_errors=True)

    def _streamed(self, reference: str) -> Iterator[bytes]:
        with self.stream(reference) as source:
            yield from iter(lambda: source.read(CHUNK_BYTES), b"")

    def _add_blob(self, tar: tarfile.TarFile, digest: str) -> None:
        """Add a blob, and raise `IntegrityError` before the tar is whole if it is not what it is named."""
        path = self.blob_path(digest)
        with path.open("rb") as file:
            hashed = _Hashed(file)
            name = f"blobs/{digest.replace(':', '/')}"
            tar.addfile(_header(name, os.fstat(file.fileno()).st_size), cast("IO[bytes]", hashed))
        if (got := f"sha256:{hashed.sha.hexdigest()}") != digest:
            raise IntegrityError(
                "a blob of the layout is not what it is named", where=str(path), got=got, expected=digest
            )

    @contextlib.contextmanager
    def _naming_damage(self) -> Iterator[None]:
        try:
            yield
        except RegistryError as error:
            raise ConfigurationError(
                "the layout is damaged",
                where=error.where or str(self.root),
                got=str(error),
                next_step=f"remove {self.root}, then build or certify its image again",
            ) from error


class _Hashed:
    """A file that is hashed while it is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.sha = hashlib.sha256()

    def read(self, size: int) -> bytes:
        """Up to `size` bytes."""
        data = self.file.read(size)
        self.sha.update(data)
        return data


def unpack(chunks: Iterable[bytes], place: Path, *, architecture: str, image_id: str) -> str:
    """Make a layout from a saved tar, whole or not at all, and return the manifest's digest.

    `image_id` is the engine's: the digest of the config, of the manifest, or of an index above it.

    Raises:
        EngineError: The tar does not hold the image with this id, or has no image for this architecture.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=place.parent) as scratch:
        saved, fresh = Path(scratch) / "saved.tar", ImageLayout(Path(scratch) / "layout")
        with saved.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
        with tarfile.open(saved) as tar:
            tar.extractall(fresh.root, filter="data")
        saved.unlink()
        index = fresh.root / "index.json"
        named = (
            _choose(fresh, json.loads(index.read_bytes()), architecture)
            if index.exists()
            else (_from_docker(fresh.root),)
        )
        digest = named[-1]
        config = fresh.json(digest)["config"]["digest"]
        if image_id not in {*named, config}:
            raise EngineError(
                "the engine saved another image than the one that was asked for",
                where=str(place),
                got=f"manifest {digest}, config {config}",
                expected=image_id,
                next_step="run the same command again; if it fails again, restart the engine",
            )
        fresh.keep_only(digest)
        fresh.move_to(place)
    return digest


def _index(entry: Descriptor, reference: str | None) -> bytes:
    """An index.json with one image; with a name, as engines read it."""
    document = entry.as_json()
    if reference:
        name = reference if "/" in reference and "." in reference.split("/")[0] else f"docker.io/{reference}"
        tag = reference.rpartition(":")[2]
        document["annotations"] = {"io.containerd.image.name": name, REF_NAME: tag}
    return json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [document]}).encode()


def _choose(layout: ImageLayout, index: dict[str, Any], architecture: str) -> tuple[str, ...]:
    """The image manifest for an architecture, after the indexes that lead to it; attestations have none."""
    for entry in index["manifests"]:
        digest = str(entry["digest"])
        platform = entry.get("platform", {}).get("architecture", architecture)
        if platform != architecture or not layout.blob_path(digest).exists():
            continue
        if entry["mediaType"] in {OCI_INDEX, DOCKER_INDEX}:
            return (digest, *_choose(layout, layout.json(digest), architecture))
        return (digest,)
    raise EngineError("the saved image has no manifest for this architecture", got=architecture)


def _from_docker(folder: Path) -> str:
    """Blobs and a manifest from the classic format: manifest.json, a config and plain tars."""
    saved = json.loads((folder / "manifest.json").read_bytes())[0]
    config = _store(folder, folder / saved["Config"], OCI_CONFIG)
    layers = [_store(folder, folder / name, OCI_LAYER) for name in saved["Layers"]]
    document = {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": config, "layers": layers}
    path = folder / "oci-manifest.json"
    path.write_bytes(json.dumps(document, separators=(",", ":")).encode())
    return str(_store(folder, path, OCI_MANIFEST)["digest"])


def _store(folder: Path, path: Path, media_type: str) -> dict[str, Any]:
    digest = sha256_of(path)
    target = folder / "blobs" / "sha256" / digest
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.copyfile(path, target)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": target.stat().st_size}


def _header(name: str, size: int) -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.size, header.mtime, header.mode = size, EPOCH, 0o644
    return header


def _add_bytes(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    tar.addfile(_header(name, len(data)), io.BytesIO(data))
