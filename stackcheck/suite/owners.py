"""Which package of an image owns a file. In: a path, its content, the image's files. Out: a name and version.

Only a file with the content that the package manager recorded counts. The same file may be listed as /bin/x
or /usr/bin/x: https://wiki.debian.org/UsrMerge.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from typing import TYPE_CHECKING, Any

from stackcheck.files import dpkg_status

if TYPE_CHECKING:
    from stackcheck.engine.image_files import ImageFiles

DPKG = "/var/lib/dpkg"
SUMS = ".md5sums"


def debian(file: str, body: bytes, files: ImageFiles) -> str | None:
    """The installed Debian package that owns a file with this content, as `deb:NAME VERSION`."""
    # dpkg records MD5 and nothing else. It finds a file that was exchanged; the SHA-256 goes into the result.
    digest = hashlib.md5(body, usedforsecurity=False).hexdigest()
    wanted = {f"{digest}  {name}".encode() for name in _spellings(file)}
    status = files.read(f"{DPKG}/status")
    if status is None:
        return None
    stanzas = (fields for fields, _ in dpkg_status.installed(status.decode(errors="replace")))
    installed = {fields["Package"]: fields.get("Version") for fields in stanzas}
    for name, text in files.folder(f"{DPKG}/info"):
        package = name.removesuffix(SUMS).partition(":")[0]
        if name.endswith(SUMS) and package in installed and wanted & set(text.splitlines()):
            return f"deb:{package} {installed[package]}"
    return None


def conda(file: str, body: bytes, files: ImageFiles) -> str | None:
    """The conda package that owns a file with this content, as `conda:NAME VERSION`.

    Its record has the digest of the file as it was installed, after conda wrote the prefix into it:
    https://docs.conda.io/projects/conda/en/stable/dev-guide/specs/
    """
    digest = hashlib.sha256(body).hexdigest()
    prefix = posixpath.dirname(posixpath.dirname(file))
    for name, text in files.folder(f"{prefix}/conda-meta"):
        record = _record(text) if name.startswith("python-") and name.endswith(".json") else {}
        for entry in record.get("paths_data", {}).get("paths", ()):
            recorded = entry.get("sha256_in_prefix") or entry.get("sha256")
            if (posixpath.join(prefix, str(entry.get("_path", ""))), recorded) == (file, digest):
                return f"conda:{record.get('name')} {record.get('version')}"
    return None


def _spellings(file: str) -> set[str]:
    """The names of a file in a list of dpkg: without the first slash, with and without usr/."""
    plain = file.lstrip("/")
    return {plain, plain.removeprefix("usr/")}


def _record(text: bytes) -> dict[str, Any]:
    """A record of conda; empty if it has another form."""
    try:
        found = json.loads(text)
        paths = found["paths_data"]["paths"]
        well_formed = all(isinstance(entry, dict) for entry in paths)
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return found if well_formed else {}
