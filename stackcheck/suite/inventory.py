"""A program that runs inside an image and lists its Python distributions and Debian packages.

In: the root file system. Out: one JSON record for each line on stdout. The last record (`end`) has the number
of folders that were read and the names of those that could not be; without it the list is incomplete. Nothing
imports this file: `stackcheck.suite.sbom` mounts it and runs it with the image's Python in isolated mode.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

DPKG = Path("/var/lib/dpkg")
DOCUMENTS = Path("/usr/share/doc")
RELEASE = Path("/etc/os-release")
LICENCE_FIELD = "License:"  # https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/


def main() -> None:
    """Print all records, in an order that is the same on every machine."""
    count, unread = python(Path("/"))
    if RELEASE.exists():
        line(kind="release", text=text(RELEASE))
    if (DPKG / "status").exists():
        debian()
    line(kind="end", folders=count, unread=sorted(unread))


def python(root: Path) -> tuple[int, list[str]]:
    """Print the Python distributions of one file system.

    Returns:
        The number of folders that were read, and the folders that could not be read.
    """
    count, unread = 0, []
    device = root.stat().st_dev
    waiting = [str(root)]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(folder) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            unread.append(folder)
            continue
        count += 1
        for entry in found:
            if entry.name.endswith((".dist-info", ".egg-info")):
                distribution(Path(entry.path))
            if entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_dev == device:
                waiting.append(entry.path)
    return count, unread


def distribution(place: Path) -> None:
    """Print one distribution: its metadata, the digest of its list of files, and its origin."""
    candidates = (place / "METADATA", place / "PKG-INFO", place)  # the last: an old egg is one file
    path = next((item for item in candidates if item.is_file()), None)
    if path is None:
        return
    origin = place / "direct_url.json"
    line(
        kind="python",
        place=str(place),
        head=text(path).split("\n\n", 1)[0],  # the description follows the first empty line
        files=digest(place / "RECORD"),
        origin=text(origin) if origin.is_file() else None,
    )


def debian() -> None:
    """Print dpkg's database, and each package's licences and the digest of its list of files."""
    line(kind="dpkg", text=text(DPKG / "status"))
    for path in sorted(DPKG.glob("info/*.md5sums")):
        line(kind="files", package=path.name[: -len(".md5sums")], digest=digest(path))
    for path in sorted(DOCUMENTS.glob("*/copyright")):
        if path.is_file():
            rows = (row[len(LICENCE_FIELD) :].strip() for row in text(path).splitlines() if is_licence(row))
            line(kind="licences", package=path.parent.name, stated=sorted(set(rows) - {""}))


def is_licence(row: str) -> bool:
    """Whether a line of a copyright file names a licence."""
    return row.startswith(LICENCE_FIELD)


def text(path: Path) -> str:
    """The content of a file as text; bytes that are not UTF-8 are replaced."""
    return path.read_text(encoding="utf-8", errors="replace")


def digest(path: Path) -> str | None:
    """The SHA-256 of a file in hex; None if there is no such file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def line(**values: object) -> None:
    """Print one record."""
    sys.stdout.write(json.dumps(values, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
