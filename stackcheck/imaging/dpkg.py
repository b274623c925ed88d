"""What dpkg says of this host: which packages are installed, what they need, which files they own.

In: dpkg's own database (`/var/lib/dpkg`). Out: a `Database`; the closure of named packages; the files of
one package with the MD5 sums that dpkg keeps. Formats: deb-control(5), dpkg-divert(1),
update-alternatives(1).
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from stackcheck.errors import BuildError
from stackcheck.files import dpkg_status

ADMIN = Path("/var/lib/dpkg")


@dataclasses.dataclass(frozen=True, kw_only=True)
class InstalledPackage:
    """One installed package."""

    name: str
    version: str
    key: str  # how dpkg names its files: `NAME`, or `NAME:ARCHITECTURE` where it may have several of one name
    stanza: str  # its part of dpkg's status file, as it is there
    essential: bool
    provides: tuple[str, ...]
    needs: tuple[tuple[str, ...], ...]  # one entry for each dependency: the names of its alternatives
    conffiles: Mapping[str, str]  # path -> MD5 sum of each configuration file


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alternative:
    """A name that several packages offer a program for: what `update-alternatives` made of it.

    Attributes:
        choices: Path -> its priority, and the slaves' paths by name.
    """

    name: str
    link: str  # the path that programs use
    slaves: Mapping[str, str]  # name -> link of what follows the choice
    choices: Mapping[str, tuple[int, Mapping[str, str]]]


class Database:
    """dpkg's database."""

    def __init__(self, admin: Path = ADMIN) -> None:
        self.admin = admin

    @cached_property
    def packages(self) -> Mapping[str, InstalledPackage]:
        """The installed packages of this host's architecture, by name.

        Raises:
            BuildError: This host has no dpkg.
        """
        path = self.admin / "status"
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise BuildError(
                "this host has no packages that a base could be cut from",
                where=str(path),
                got=error.strerror,
                expected="the database of dpkg, on Debian or Ubuntu",
                next_step="use a base from a registry, or one of another host (docs/guides/building.md)",
            ) from error
        found: dict[str, InstalledPackage] = {}
        native = _native(text)
        for fields, stanza in dpkg_status.installed(text):
            if fields["Architecture"] in {native, "all"}:
                found[fields["Package"]] = self._package(fields, stanza)
        return found

    def _package(self, fields: Mapping[str, str], stanza: str) -> InstalledPackage:
        name = fields["Package"]
        key = f"{name}:{fields['Architecture']}"
        return InstalledPackage(
            name=name,
            version=fields["Version"],
            key=key if (self.admin / "info" / f"{key}.list").is_file() else name,
            stanza=stanza,
            essential="yes" in {fields.get("Essential"), fields.get("Protected")},
            provides=tuple(names[0] for names in _relations(fields.get("Provides", ""))),
            needs=_relations(", ".join(filter(None, (fields.get("Pre-Depends"), fields.get("Depends"))))),
            conffiles=dict(_conffiles(fields.get("Conffiles", ""))),
        )

    def closure(self, names: Sequence[str]) -> tuple[InstalledPackage, ...]:
        """The named packages, the essential ones, and what they need; sorted by name.

        Raises:
            BuildError: One is not installed.
        """
        essential = [name for name, package in self.packages.items() if package.essential]
        chosen: dict[str, InstalledPackage] = {}
        queue: list[tuple[tuple[str, ...], str]] = [((name,), "the stack") for name in names]
        queue += [((name,), "dpkg") for name in essential]
        absent = []
        while queue:
            alternatives, asker = queue.pop(0)
            package = self._installed(alternatives, chosen)
            if package is None:
                absent.append(f"{' or '.join(alternatives)}, which {asker} needs")
            elif package.name not in chosen:
                chosen[package.name] = package
                queue += [(need, package.name) for need in package.needs]
        if absent:
            names = sorted({line.split()[0].strip(",") for line in absent})
            raise BuildError(
                "this host lacks packages of the base",
                where=str(self.admin),
                got="\n    ".join(["not installed:", *sorted(set(absent))]),
                expected="each of them installed",
                next_step=f"apt-get install {' '.join(names)}",
            )
        return tuple(chosen[name] for name in sorted(chosen))

    def _installed(
        self, alternatives: Sequence[str], chosen: Mapping[str, InstalledPackage]
    ) -> InstalledPackage | None:
        """The package that satisfies a dependency: one of the base, else the first that is installed."""
        offers = [package for name in alternatives for package in self._offering(name)]
        return next((package for package in offers if package.name in chosen), offers[0] if offers else None)

    def _offering(self, name: str) -> list[InstalledPackage]:
        own = [self.packages[name]] if name in self.packages else []
        return own + self._providers.get(name, [])

    @cached_property
    def _providers(self) -> Mapping[str, list[InstalledPackage]]:
        found: dict[str, list[InstalledPackage]] = {}
        for _, package in sorted(self.packages.items()):
            for name in package.provides:
                found.setdefault(name, []).append(package)
        return found

    def files(self, package: InstalledPackage) -> tuple[str, ...]:
        """Every path of a package: folders, files and links.

        Raises:
            BuildError: dpkg's list of it is missing.
        """
        path = self.admin / "info" / f"{package.key}.list"
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise BuildError(
                "dpkg has no list of a package's files",
                where=str(path),
                got=error.strerror,
                next_step=f"apt-get install --reinstall {package.name}",
            ) from error
        return tuple(line for line in lines if line not in {"/.", ""})

    def md5sums(self, package: InstalledPackage) -> Mapping[str, str]:
        """Path -> MD5 sum, of the files that are not for configuration, and of those that are."""
        path = self.admin / "info" / f"{package.key}.md5sums"
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        pairs = (line.split(None, 1) for line in lines)
        return {f"/{name}": digest for digest, name in pairs} | dict(package.conffiles)

    def info(self, package: InstalledPackage) -> tuple[Path, ...]:
        """Dpkg's own files about a package."""
        return tuple(sorted((self.admin / "info").glob(f"{package.key}.*")))

    @cached_property
    def diversions(self) -> Mapping[str, tuple[str, str]]:
        """Path -> where it is instead, and the package whose own file has the path."""
        path = self.admin / "diversions"
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        triples = zip(lines[::3], lines[1::3], lines[2::3], strict=True)
        return {source: (target, package) for source, target, package in triples}

    @cached_property
    def alternatives(self) -> tuple[Alternative, ...]:
        """The names that `update-alternatives` knows."""
        folder = self.admin / "alternatives"
        paths = sorted(folder.iterdir()) if folder.is_dir() else []
        return tuple(_alternative(path.name, path.read_text(encoding="utf-8")) for path in paths)


def _native(status: str) -> str:
    """The architecture of dpkg itself."""
    found = re.search(r"^Package: dpkg\n(?:.+\n)*?Architecture: (\S+)$", status, re.MULTILINE)
    return found[1] if found else "amd64"


def _relations(text: str) -> tuple[tuple[str, ...], ...]:
    """`a (>= 1) | b:any, c` -> ((a, b), (c,)). Versions are left out: dpkg checked them at installation."""
    entries = [entry for entry in re.split(r"\s*,\s*", text.strip()) if entry]
    return tuple(
        tuple(re.split(r"[\s(:]", choice.strip(), maxsplit=1)[0] for choice in entry.split("|"))
        for entry in entries
    )


def _conffiles(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        words = line.split()
        # `obsolete` and `remove-on-upgrade` follow the sum of what the package no longer has.
        if len(words) == 2 and words[1] != "newconffile":
            yield words[0], words[1]


def _alternative(name: str, text: str) -> Alternative:
    lines = iter(text.splitlines())
    next(lines)  # auto or manual: the base takes the best of its own, whatever this host prefers
    link = next(lines)
    slaves = {}
    for line in lines:
        if not line:
            break
        slaves[line] = next(lines)
    choices = {}
    for path in lines:
        if not path:
            break
        priority = int(next(lines))
        followed = {slave: next(lines) for slave in slaves}
        choices[path] = (priority, {slave: target for slave, target in followed.items() if target})
    return Alternative(name=name, link=link, slaves=slaves, choices=choices)
