"""A published image without its layers, as docs/results keeps it, in a registry that serves it.

In: an OCI layout of which only the small files are left, and the folder of a registry's data. Out: that
registry's own files, so that it serves manifests, configuration and statements. No client could upload
them: a registry asks for every layer.
"""

import json
from pathlib import Path

from stackcheck.oci.documents import REF_NAME


def serve_from(data: Path, layout: Path, repository: str) -> None:
    """Write what is in `layout` as Debian's docker-registry keeps `repository` below `data`."""
    top = data / "docker" / "registry" / "v2"
    held = top / "repositories" / repository
    blobs = layout / "blobs" / "sha256"
    for blob in blobs.iterdir():
        _write(top / "blobs" / "sha256" / blob.name[:2] / blob.name / "data", blob.read_bytes())
        link = f"sha256:{blob.name}".encode()
        _write(held / "_layers" / "sha256" / blob.name / "link", link)
    for entry in json.loads((layout / "index.json").read_text())["manifests"]:
        digest = entry["digest"]
        _write(held / "_manifests" / "revisions" / digest.replace(":", "/") / "link", digest.encode())
        name = entry.get("annotations", {}).get(REF_NAME)
        if name:
            tag = held / "_manifests" / "tags" / name
            _write(tag / "current" / "link", digest.encode())
            _write(tag / "index" / digest.replace(":", "/") / "link", digest.encode())


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
