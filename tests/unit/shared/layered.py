"""Images made of layers that a test writes out. In: a dictionary of paths for each. Out: a layout."""

import dataclasses
import gzip
import hashlib
import io
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from small_images import put_image
from stackcheck.oci.documents import sha256
from stackcheck.oci.layout import OciLayout

ELF = b"\x7fELF a library"
LINK, HARD, FOLDER, DEVICE = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE


@dataclasses.dataclass(frozen=True)
class Member:
    """A member of a layer's tar that is more than a plain file."""

    body: bytes = b""
    mode: int = 0o755
    kind: bytes = tarfile.REGTYPE
    target: str = ""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


Layer = dict[str, "bytes | str | Member"]


def tar_of(layer: Layer) -> bytes:
    """The tar of a layer; a text is a symbolic link."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, item in layer.items():
            member = (
                item if isinstance(item, Member) else Member(body=item if isinstance(item, bytes) else b"")
            )
            entry = tarfile.TarInfo(name.lstrip("/"))
            entry.mode, entry.type, entry.linkname = member.mode, member.kind, member.target
            entry.pax_headers = dict(member.headers)
            if isinstance(item, str):
                entry.type, entry.linkname = LINK, item
            entry.size = len(member.body)
            tar.addfile(entry, io.BytesIO(member.body))
    return buffer.getvalue()


def make(
    folder: Path,
    *layers: Layer | bytes,
    env: Mapping[str, str] | None = None,
    packed: str = "",
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """A layout with an image of these layers; the digest of its manifest."""
    tars = [tar_of(layer) if isinstance(layer, dict) else layer for layer in layers]
    config = {"config": {"Env": [f"{name}={value}" for name, value in (env or {}).items()], **settings}}
    diff_ids = [sha256(tar) for tar in tars]
    return put_image(OciLayout(folder), config, [pack(tar, packed) for tar in tars], diff_ids=diff_ids).digest


def pack(body: bytes, program: str) -> bytes:
    """A layer as a builder compresses it."""
    if program == "gzip":
        return gzip.compress(body)
    return (
        subprocess.run(["zstd", "-c"], input=body, capture_output=True, check=True).stdout
        if program
        else body
    )


def md5(body: bytes) -> str:
    return hashlib.md5(body, usedforsecurity=False).hexdigest()
