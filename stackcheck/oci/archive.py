"""Between an OCI image layout on disk and the one tar that engines load and save.

In: a layout folder with one manifest, or a tar as `docker save` writes it. Out: the other. The tar serves
both formats at once (`index.json` for OCI, `manifest.json` for older readers), so that docker, podman and
Apptainer take it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import tarfile
import tempfile
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from stackcheck.errors import ConfigurationError, EngineError
from stackcheck.files.atomic import write_atomically
from stackcheck.oci.documents import (
    CHUNK_BYTES,
    DOCKER_INDEX,
    OCI_INDEX,
    OCI_MANIFEST,
    IntegrityError,
    RegistryError,
    checked,
    compact_json,
    json_object,
    sha256,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar"
EPOCH = 0
ANNOTATION = "org.opencontainers.image."
REF_NAME = f"{ANNOTATION}ref.name"  # of an entry in an index


def blob(layout: Path, digest: str) -> Path:
    """The file of a blob."""
    algorithm, _, value = digest.partition(":")
    return layout / "blobs" / algorithm / value


def read_json(layout: Path, digest: str) -> dict[str, Any]:
    """A blob that is a JSON object; `ConfigurationError` if it is not."""
    return _object(blob(layout, digest), layout)


def manifest_digest(layout: Path) -> str:
    """The digest of the one manifest of a layout.

    Raises:
        EngineError: It has no manifest, or several.
        ConfigurationError: The layout is damaged.
    """
    entries = _object(layout / "index.json", layout).get("manifests") or []
    if len(entries) != 1:
        raise EngineError(
            "the layout does not have exactly one manifest", where=str(layout), got=str(len(entries))
        )
    return str(entries[0]["digest"])


def write(layout: Path, reference: str, file: IO[bytes]) -> None:
    """Write the tar of a layout's image; equal images under equal names give equal bytes."""
    digest = manifest_digest(layout)
    manifest = read_json(layout, digest)
    paths = [f"blobs/{name.replace(':', '/')}" for name in blobs_of(layout, digest)]
    with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        _add_bytes(tar, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add_bytes(tar, "index.json", _index(layout, digest, manifest, reference))
        old = [{"Config": paths[1], "RepoTags": [reference], "Layers": paths[2:]}]
        _add_bytes(tar, "manifest.json", json.dumps(old).encode())
        for path in dict.fromkeys(paths):
            with (layout / path).open("rb") as source:
                tar.addfile(_header(path, (layout / path).stat().st_size), source)


def _object(path: Path, layout: Path) -> dict[str, Any]:
    try:
        return json_object(path.read_bytes(), str(path))
    except (OSError, RegistryError) as error:
        raise ConfigurationError(
            "the layout is damaged",
            where=str(path),
            got=str(error),
            next_step=f"remove {layout}, then build or certify its image again",
        ) from error


def blobs_of(layout: Path, digest: str) -> list[str]:
    """Digests of an image: manifest, config and layers."""
    manifest = read_json(layout, digest)
    return [digest, manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"])]


@contextlib.contextmanager
def stream(layout: Path, reference: str) -> Iterator[IO[bytes]]:
    """The same tar as a pipe to read from, so that no second copy is written to disk."""
    read_end, write_end = os.pipe()
    failed: list[OSError] = []

    def fill() -> None:
        try:
            # The reader may stop early (an engine that refuses): that is its error, not ours.
            with contextlib.suppress(BrokenPipeError), os.fdopen(write_end, "wb") as sink:
                write(layout, reference, sink)
        except OSError as error:  # a blob is missing: the reader got an incomplete tar
            failed.append(error)

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    with os.fdopen(read_end, "rb") as source:
        yield source
    thread.join(timeout=10)
    if failed:
        raise EngineError(
            "the layout is incomplete", where=str(failed[0].filename or layout), got=failed[0].strerror
        ) from failed[0]


def unpack(chunks: Iterable[bytes], layout: Path, *, architecture: str, image_id: str) -> str:
    """Make a layout from a saved tar, whole or not at all.

    Args:
        chunks: The tar.
        layout: Where it goes; what was there is replaced.
        architecture: Which image of an index is taken.
        image_id: The engine's id: the digest of the config, of the manifest, or of an index above it.

    Returns:
        The manifest's digest.

    Raises:
        EngineError: The tar does not hold the image with this id, or has no image for this architecture.
    """
    layout.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=layout.parent) as scratch:
        saved, fresh = Path(scratch) / "saved.tar", Path(scratch) / "layout"
        with saved.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
        with tarfile.open(saved) as tar:
            tar.extractall(fresh, filter="data")
        saved.unlink()
        if (fresh / "index.json").exists():
            named = _choose(fresh, json.loads((fresh / "index.json").read_bytes()), architecture)
        else:
            named = (_from_docker(fresh),)
        digest = named[-1]
        config = read_json(fresh, digest)["config"]["digest"]
        if image_id not in {*named, config}:
            raise EngineError(
                "the engine saved another image than the one that was asked for",
                where=str(layout),
                got=f"manifest {digest}, config {config}",
                expected=image_id,
                next_step="run the same command again; if it fails again, restart the engine",
            )
        keep_only(fresh, digest)
        replace(fresh, layout)
    return digest


def keep_only(layout: Path, digest: str) -> None:
    """Reduce a layout to one manifest and what it names."""
    manifest = read_json(layout, digest)
    needed = set(blobs_of(layout, digest))
    for path in layout.glob("blobs/*/*"):
        if f"{path.parent.name}:{path.name}" not in needed:
            path.unlink()
    for path in layout.iterdir():
        if path.name not in {"blobs", "oci-layout", "index.json"}:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (layout / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}', encoding="utf-8")
    (layout / "index.json").write_bytes(_index(layout, digest, manifest, None))


def annotate(layout: Path) -> None:
    """Repeat the image's own OCI labels and its date in its manifest, where registries look for them."""
    manifest = read_json(layout, manifest_digest(layout))
    config = read_json(layout, manifest["config"]["digest"])
    labels = (config.get("config") or {}).get("Labels") or {}
    stated = {name: text for name, text in labels.items() if name.startswith(ANNOTATION) and name != REF_NAME}
    if created := config.get("created"):
        stated[f"{ANNOTATION}created"] = created
    body = compact_json(manifest | {"annotations": (manifest.get("annotations") or {}) | stated})
    write_atomically(blob(layout, sha256(body)), (body,))
    keep_only(layout, sha256(body))


def replace(fresh: Path, place: Path) -> None:
    """Put a finished folder in another's place by renames alone."""
    old = place.with_name(place.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    fresh.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def _index(layout: Path, digest: str, manifest: dict[str, Any], reference: str | None) -> bytes:
    entry: dict[str, Any] = {
        "mediaType": manifest.get("mediaType", OCI_MANIFEST),
        "digest": digest,
        "size": blob(layout, digest).stat().st_size,
    }
    if reference:
        name = reference if "/" in reference and "." in reference.split("/")[0] else f"docker.io/{reference}"
        tag = reference.rpartition(":")[2]
        entry["annotations"] = {
            "io.containerd.image.name": name,
            REF_NAME: tag,
        }
    return json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry]}).encode()


def _choose(layout: Path, index: dict[str, Any], architecture: str) -> tuple[str, ...]:
    """The image manifest for an architecture, after the indexes that lead to it; attestations have none."""
    for entry in index["manifests"]:
        digest = str(entry["digest"])
        platform = entry.get("platform", {}).get("architecture", architecture)
        if platform != architecture or not blob(layout, digest).exists():
            continue
        if entry["mediaType"] in {OCI_INDEX, DOCKER_INDEX}:
            return (digest, *_choose(layout, read_json(layout, digest), architecture))
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
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
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


def export(layout: Path, reference: str, path: Path) -> None:
    """Write an image as one tar for docker, podman and Apptainer, whole or not at all.

    Raises:
        IntegrityError: A blob of the layout is not what its digest names.
        ConfigurationError: The disk is full or the folder is not writable; no partial file is left.
    """
    for digest in blobs_of(layout, manifest_digest(layout)):
        stored = blob(layout, digest)
        if not stored.exists():
            raise IntegrityError("the layout is incomplete", where=str(stored), got="no such file")
        with stored.open("rb") as file:
            for _ in checked(_chunks(file), digest, str(stored)):
                pass
    write_atomically(path, _streamed(layout, reference))


def size_bytes(layout: Path) -> int:
    """How large the blobs of a layout's image are: the tar is a few kilobytes more."""
    manifest = read_json(layout, manifest_digest(layout))
    return sum(int(entry["size"]) for entry in (manifest["config"], *manifest["layers"]))


def _streamed(layout: Path, reference: str) -> Iterator[bytes]:
    with stream(layout, reference) as source:
        yield from _chunks(source)


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    return iter(lambda: file.read(CHUNK_BYTES), b"")
