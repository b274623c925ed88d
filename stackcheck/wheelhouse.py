"""The local wheels that a lock names, as one folder for a build.

In: a lock, folders of wheels and local simple indexes (PEP 503). Out: a flat folder of links to just those
files, by hash where the lock has hashes: gigabytes of other wheels never travel to the builder.
"""

from __future__ import annotations

import hashlib
import html.parser
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urldefrag, urljoin, urlparse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from stackcheck.wheels import HostSettings

_LOCKED = re.compile(
    r"^(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^]]*\])?==(?P<version>[^\s;\\]+)", re.MULTILINE
)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def gather(lock: str, settings: HostSettings, folder: Path) -> tuple[str, ...]:
    """Link the local wheels that a lock names into a fresh folder.

    Args:
        lock: Text of requirements.lock.
        settings: Where local wheels are.
        folder: Emptied first.

    Returns:
        The names of the files, sorted.
    """
    wanted = {_normal(match["name"]): match["version"] for match in _LOCKED.finditer(lock)}
    hashes = set(_HASH.findall(lock))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    found = set()
    for path, digest in _candidates(wanted, settings):
        if path.name not in found and (not hashes or (digest or _sha256(path)) in hashes):
            _link(path, folder / path.name)
            found.add(path.name)
    return tuple(sorted(found))


def _candidates(wanted: Mapping[str, str], settings: HostSettings) -> Iterator[tuple[Path, str | None]]:
    """Local files of the right name and version, with the hash where an index tells it."""
    for folder in settings.folders:
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if _is_wanted(path.name, wanted):
                yield path, None
    for index in settings.indexes:
        for name in wanted:
            page = index / name / "index.html"
            if page.is_file():
                yield from _page_files(page, wanted)


def _page_files(page: Path, wanted: Mapping[str, str]) -> Iterator[tuple[Path, str | None]]:
    reader = _Links()
    reader.feed(page.read_text(encoding="utf-8"))
    for link in reader.links:
        address, fragment = urldefrag(urljoin(page.as_uri(), link))
        path = Path(unquote(urlparse(address).path))
        if address.startswith("file:") and path.is_file() and _is_wanted(path.name, wanted):
            yield path, fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else None


class _Links(html.parser.HTMLParser):
    """The links of a simple index's page (PEP 503)."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note one link."""
        if tag == "a":
            self.links += [value for name, value in attrs if name == "href" and value]


def _is_wanted(filename: str, wanted: Mapping[str, str]) -> bool:
    """Whether a wheel or source archive has the name and version of a locked package."""
    stem = re.sub(r"\.(whl|tar\.gz|zip)$", "", filename)
    if stem == filename:
        return False
    name, _, rest = stem.partition("-")
    version = rest.split("-")[0] if filename.endswith(".whl") else stem.rpartition("-")[2]
    if not filename.endswith(".whl"):
        name = stem.rpartition("-")[0]
    return _same_version(wanted.get(_normal(name)), version)


def _same_version(locked: str | None, version: str) -> bool:
    from packaging.version import InvalidVersion, Version

    if locked is None:
        return False
    try:
        return Version(locked) == Version(version.replace("_", "+", 1))
    except InvalidVersion:
        return locked == version


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or a folder that one may only read
        shutil.copyfile(source, target)
