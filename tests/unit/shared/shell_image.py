"""A real image of a few megabytes: a shell and programs of this host, with the libraries that they link."""

import io
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from small_images import CONFIG_TYPE, LAYER_TYPE, put, quiet
from stackcheck.oci.documents import OCI_MANIFEST, Manifest, compact_json, sha256
from stackcheck.oci.layout import OciLayout


def of_host(programs: Sequence[str]) -> dict[str, bytes]:
    """Programs of this host and the libraries that they link, by their absolute path; a shell too."""
    paths = [Path(shutil.which(name) or name) for name in programs]
    found = {str(path): path for path in paths}
    for program in paths:
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        found |= {word: Path(word) for word in listed.split() if word.startswith("/")}
    inside = {name: path.resolve().read_bytes() for name, path in found.items()}
    inside["/bin/bash"] = Path(shutil.which("bash") or "").resolve().read_bytes()
    return inside


def layer(programs: Sequence[str], files: Mapping[str, bytes]) -> bytes:
    """The tar of one layer: programs of this host, and files by their absolute path."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, body in sorted((of_host(programs) | dict(files)).items()):
            entry = tarfile.TarInfo(name.lstrip("/"))
            entry.size, entry.mode = len(body), 0o755
            tar.addfile(entry, io.BytesIO(body))
    return buffer.getvalue()


def make_layout(
    folder: Path,
    *,
    programs: Sequence[str] = ("bash",),
    files: Mapping[str, bytes] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> str:
    """Write a layout with one image of one layer, with `settings` in its config; the manifest's digest."""
    layout, body = OciLayout(folder), layer(programs, files or {})
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/usr/bin:/bin"], **(settings or {})},
        "rootfs": {"type": "layers", "diff_ids": [sha256(body)]},
        "history": [{"created_by": "a test"}],
    }
    with layout.writing(quiet):
        document = {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": put(layout, CONFIG_TYPE, compact_json(config)),
            "layers": [put(layout, LAYER_TYPE, body)],
        }
        manifest = Manifest(media_type=OCI_MANIFEST, body=compact_json(document))
        layout.write_manifest(manifest, "candidate")
    return manifest.digest
