"""Runs inside an image: says which Python distributions and Debian packages lie in its file system.

In: the root file system that this program finds itself in. Out: one JSON object a line on stdout; the last
says how many folders were read and which could not be, and without it the list was cut short. Nothing imports
it: `stackcheck.suite.sbom` mounts it and runs it in isolated mode, so that of the image only its Python runs.
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
    """Write what is there, in an order that is the same on every machine."""
    count, unread = python(Path("/"))
    if RELEASE.exists():
        line(kind="release", text=text(RELEASE))
    if (DPKG / "status").exists():
        debian()
    line(kind="end", folders=count, unread=sorted(unread))


def python(root: Path) -> tuple[int, list[str]]:
    """Walk one file system for Python distributions; how many folders were read, and which could not be."""
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
    """One distribution: the fields of its metadata, its list of files as a digest, and where it came from."""
    candidates = (place / "METADATA", place / "PKG-INFO", place)  # the last: an old egg is one file
    path = next((item for item in candidates if item.is_file()), None)
    if path is None:
        return
    origin = place / "direct_url.json"
    line(
        kind="python",
        place=str(place),
        head=text(path).split("\n\n", 1)[0],  # after the first empty line comes the description
        files=digest(place / "RECORD"),
        origin=text(origin) if origin.is_file() else None,
    )


def debian() -> None:
    """The package database, and of each package its licences and its list of files as a digest."""
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
    """A file as text, whatever bytes are in it."""
    return path.read_text(encoding="utf-8", errors="replace")


def digest(path: Path) -> str | None:
    """The SHA-256 of a file; None where there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def line(**values: object) -> None:
    """One record."""
    sys.stdout.write(json.dumps(values, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
