"""What the package managers of an image recorded about its files. In: a `Tree`. Out: `Records`.

dpkg keeps MD5 sums, of configuration files too: deb-md5sums(5), dpkg-divert(1). A wheel's RECORD and conda's
records have SHA-256: https://packaging.python.org/specifications/recording-installed-packages/. A record that
cannot be read vouches for nothing.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import csv
import dataclasses
import functools
import json
import posixpath
from collections.abc import Iterator
from typing import TYPE_CHECKING

from stackcheck.files import dpkg_status

if TYPE_CHECKING:
    from stackcheck.oci.filesystem import Tree

DPKG = "/var/lib/dpkg"
SUMS, LIST = ".md5sums", ".list"
RECORD = ".dist-info/RECORD"
CONDA = "/conda-meta/"


@dataclasses.dataclass(frozen=True)
class Owner:
    """One line of a record."""

    manager: str  # `dpkg`, `wheel` or `conda`
    package: str
    algorithm: str
    digest: str
    record: str


def is_record(path: str) -> bool:
    """Whether a file is a record, so that its content is needed."""
    if path.startswith(DPKG):
        return path.endswith((SUMS, LIST)) or path in {f"{DPKG}/status", f"{DPKG}/diversions"}
    return path.endswith(RECORD) or (CONDA in path and path.endswith(".json"))


def read(tree: Tree) -> dict[str, list[Owner]]:
    """Real path -> every line of a record about it."""
    found: dict[str, list[Owner]] = {}
    for name, owner in (*_dpkg(tree), *_wheels(tree), *_conda(tree)):
        try:
            found.setdefault(tree.real(name, last=False), []).append(owner)
        except ValueError:
            continue  # links in a circle: no file is there
    return found


def listed(tree: Tree) -> set[str]:
    """The real paths of all that dpkg unpacked, links too: it keeps no sum of these."""
    real = functools.cache(tree.real)
    found = set()
    for record, body in tree.bodies.items():
        if record.startswith(DPKG) and record.endswith(LIST):
            for line in body.decode(errors="surrogateescape").splitlines():
                folder, name = posixpath.split(line)
                with contextlib.suppress(ValueError):  # links in a circle: no file is there
                    found.add(posixpath.join(real(folder), name))
    return found


def _dpkg(tree: Tree) -> Iterator[tuple[str, Owner]]:
    status = tree.bodies.get(f"{DPKG}/status", b"").decode(errors="replace")
    # Path -> where a package's file is instead, and the package whose own file has the path.
    lines = tree.bodies.get(f"{DPKG}/diversions", b"").decode(errors="surrogateescape").splitlines()
    triples = zip(lines[::3], lines[1::3], lines[2::3], strict=False)
    moved = {source: (target, package) for source, target, package in triples}
    for fields, _ in dpkg_status.installed(status):
        package = fields["Package"]
        for key in (package, f"{package}:{fields.get('Architecture')}"):
            record = f"{DPKG}/info/{key}{SUMS}"
            for line in tree.bodies.get(record, b"").decode(errors="surrogateescape").splitlines():
                digest, _, name = line.partition("  ")
                place = moved.get(f"/{name}", (f"/{name}", package))
                yield (
                    f"/{name}" if place[1] == package else place[0],
                    Owner("dpkg", package, "md5", digest, record),
                )
        for line in fields.get("Conffiles", "").splitlines():
            name, _, digest = line.strip().partition(" ")
            if name:
                yield name, Owner("dpkg", package, "md5", digest.split(" ")[0], f"{DPKG}/status")


def _wheels(tree: Tree) -> Iterator[tuple[str, Owner]]:
    for record, body in tree.bodies.items():
        if not record.endswith(RECORD):
            continue
        site = posixpath.dirname(posixpath.dirname(record))
        package = posixpath.basename(posixpath.dirname(record)).removesuffix(".dist-info")
        for name, digest in rows(body):
            # `..` means the folder's own parent, as pip means it.
            place = posixpath.normpath(posixpath.join(site, name))
            yield place, Owner("wheel", package, "sha256", digest, record)


def rows(body: bytes) -> Iterator[tuple[str, str]]:
    """The files of a RECORD with their SHA-256; none if it cannot be read."""
    try:
        lines = [*csv.reader(body.decode().splitlines())]
    except (csv.Error, UnicodeDecodeError):
        return
    for line in lines:
        algorithm, _, text = line[1].partition("=") if len(line) > 1 else ("", "", "")
        if algorithm == "sha256" and (digest := _hexadecimal(text)):
            yield line[0], digest


def _hexadecimal(text: str) -> str:
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).hex()
    except (binascii.Error, ValueError):
        return ""


def _conda(tree: Tree) -> Iterator[tuple[str, Owner]]:
    for record, body in tree.bodies.items():
        if CONDA not in record:
            continue
        prefix = record.partition(CONDA)[0]
        try:
            document = json.loads(body)
            package = f"{document['name']}"
            paths = document["paths_data"]["paths"]
            sums = [
                (str(row["_path"]), str(row.get("sha256_in_prefix") or row.get("sha256"))) for row in paths
            ]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        for name, digest in sums:
            yield (
                posixpath.normpath(posixpath.join(prefix, name)),
                Owner("conda", package, "sha256", digest, record),
            )
