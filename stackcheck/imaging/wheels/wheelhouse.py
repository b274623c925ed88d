"""The local wheels that a lock names, as one folder for a build.

In: locked packages, folders of wheels and local simple indexes (PEP 503), a wheel cache. Out: a flat folder
of only those files, by hash where the lock has hashes: gigabytes of other wheels never go to the builder;
and the packages that are missing for a target.
"""

import dataclasses
import html.parser
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlparse

from stackcheck.files.digest import sha256_of
from stackcheck.files.requirements import Locked
from stackcheck.imaging.platforms import InstallTarget
from stackcheck.imaging.wheels.host_settings import HostSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundWheels:
    """The local files of a lock."""

    files: dict[Locked, tuple[Path, ...]]  # the files of each locked package that has any
    cached: frozenset[Path]

    def missing(self, wanted: Sequence[Locked], target: InstallTarget) -> tuple[Locked, ...]:
        """The packages of which no file installs on a target."""
        return tuple(
            package
            for package in wanted
            if not any(target.takes(path.name) for path in self.files.get(package, ()))
        )

    def lay_out(self, folder: Path) -> tuple[str, ...]:
        """Make a fresh folder of the files; their names, sorted.

        A file that is not the cache's is copied: a link to it would change its inode, and uv unpacks a local
        wheel once more when its inode's time has changed (torch: 700 MB in uv's cache for each build).
        """
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        named = {path.name: path for paths in self.files.values() for path in reversed(paths)}
        for name, path in named.items():
            (_link if path in self.cached else shutil.copyfile)(path, folder / name)
        return tuple(sorted(named))


def look(wanted: Sequence[Locked], settings: HostSettings, cached: Mapping[str, Path]) -> FoundWheels:
    """The local files of locked packages; files of a package without hashes are taken by name and version."""
    files: dict[Locked, tuple[Path, ...]] = {}
    for package in wanted:
        held = (cached[digest] for digest in sorted(package.hashes) if digest in cached)
        paths = {path.name: path for path in held}
        for path, digest in _candidates(package, settings):
            if path.name not in paths and (
                not package.hashes or (digest or sha256_of(path)) in package.hashes
            ):
                paths[path.name] = path
        if paths:
            files[package] = tuple(paths.values())
    return FoundWheels(files=files, cached=frozenset(cached.values()))


def _candidates(package: Locked, settings: HostSettings) -> Iterator[tuple[Path, str | None]]:
    """Local files of the right name and version, with the hash if an index states it."""
    for folder in settings.folders:
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if package.is_of(path.name):
                yield path, None
    for index in settings.indexes:
        page = index / package.name / "index.html"
        if page.is_file():
            yield from _page_files(page, package)


def _page_files(page: Path, package: Locked) -> Iterator[tuple[Path, str | None]]:
    reader = _Links()
    reader.feed(page.read_text(encoding="utf-8"))
    for link in reader.links:
        address, fragment = urldefrag(urljoin(page.as_uri(), link))
        path = Path(unquote(urlparse(address).path))
        if address.startswith("file:") and path.is_file() and package.is_of(path.name):
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


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or a read-only cache
        shutil.copyfile(source, target)
