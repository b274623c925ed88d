"""A base cut from the packages that this host itself has: `stackcheck base --from-host`.

In: package names, dpkg's database. Out: `build/bases/host-<key>.tar` with the files of those packages, of
the essential ones and of all that they need, and nothing else of the host; the same bytes from any host
with these packages. Every file is compared with dpkg's MD5 sum. What packages make when they are installed is
made here from their own data: users, choices among alternatives, the file of trusted certificates; the
loader's cache and Python's byte code are made by the Dockerfile.
"""

import dataclasses
import fnmatch
import hashlib
import io
import re
import stat
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from stackcheck.errors import BuildError
from stackcheck.files.atomic import require_room, unfinished
from stackcheck.files.digest import sha256_of
from stackcheck.imaging.bootstrap import EXCLUDED, INCLUDED, SOURCE_DATE_EPOCH, RootFs
from stackcheck.imaging.dpkg import Database, InstalledPackage
from stackcheck.matrix.stack import Stack

# What a bootstrapped base and the distributions' own images have beside the essential packages; torch needs
# libstdc++6, which comes with it.
FOUNDATION = ("apt",)
# Links of the merged /usr, which no package has as files of its own.
MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
# Folders that a container needs, if no package names them; with their modes.
FOLDERS = {
    "dev": 0o755,
    "proc": 0o555,
    "root": 0o700,
    "run": 0o755,
    "sys": 0o555,
    "tmp": 0o1777,
    "var/tmp": 0o1777,
}
# What base-passwd and libc-bin copy when they are installed: source -> place.
COPIED = {
    "usr/share/base-passwd/passwd.master": "etc/passwd",
    "usr/share/base-passwd/group.master": "etc/group",
    "usr/share/libc-bin/nsswitch.conf": "etc/nsswitch.conf",
    "usr/share/base-files/nsswitch.conf": "etc/nsswitch.conf",
}
CERTIFICATES = ("usr/share/ca-certificates/", "etc/ssl/certs/ca-certificates.crt")
# dpkg's notes about a package that a base keeps; scripts are kept too: the base may be upgraded.
_SHOWN = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """A base that was cut.

    Attributes:
        left_out: Configuration files that the host's administrator removed; the base lacks them too.
        changed: Configuration files that differ from their packages, where the user said to keep them.
    """

    path: Path
    digest: str  # sha256 of the tar, "sha256:…"
    packages: Mapping[str, str]  # version of each package in it
    asked: tuple[str, ...]  # the packages that were named
    system: str  # what the host calls its release
    left_out: tuple[str, ...]
    changed: tuple[str, ...]
    size_bytes: int

    def facts(self) -> dict[str, object]:
        """What `base.json` says of it; two hosts with the same packages write the same."""
        listed = dataclasses.asdict(self)
        del listed["path"]
        return {"schema": 1, "from": "host", **listed}


@dataclasses.dataclass
class _Tree:
    """What goes into the tar: path without the first slash -> where it comes from.

    Attributes:
        problems: What is wrong with files of the host, one line each.
    """

    sources: dict[str, Path] = dataclasses.field(default_factory=dict)
    links: dict[str, str] = dataclasses.field(default_factory=dict)
    texts: dict[str, bytes] = dataclasses.field(default_factory=dict)  # bytes of a file that is made here
    problems: list[str] = dataclasses.field(default_factory=list)
    broken: set[str] = dataclasses.field(default_factory=set)
    left_out: list[str] = dataclasses.field(default_factory=list)
    changed: list[str] = dataclasses.field(default_factory=list)

    def has(self, path: str) -> bool:
        name = path.lstrip("/")
        return name in self.sources or name in self.links or name in self.texts


def cut(
    packages: Sequence[str], folder: Path, *, system: str, keep_changed: bool = False, root: Path = Path("/")
) -> Cut:
    """Cut a base from a host: the named packages, apt, the essential ones and all dependencies.

    `keep_changed` takes configuration files that the administrator changed as they are.

    Raises:
        BuildError: A package is not installed, or a file of one is missing or changed.
        FileError: The disk is full, or the folder cannot be written.
    """
    database = Database(root / "var/lib/dpkg")
    chosen = database.closure([*packages, *FOUNDATION])
    tree = _Tree()
    for package in chosen:
        _take(tree, package, database, root, keep_changed=keep_changed)
    _refuse(tree, root)
    _make(tree, chosen, database, root)
    path = _write(tree, folder, root)
    return Cut(
        path=path,
        digest=f"sha256:{sha256_of(path)}",
        packages={package.name: package.version for package in chosen},
        asked=tuple(sorted(packages)),
        system=system,
        left_out=tuple(sorted(tree.left_out)),
        changed=tuple(sorted(tree.changed)),
        size_bytes=path.stat().st_size,
    )


def load_host_base(stack: Stack, folder: Path) -> RootFs:
    """The base that a stack's pins name, as it was cut on this host or copied to it.

    Raises:
        BuildError: It is not here.
    """
    digest = str(stack.base.digest)
    path = folder / f"host-{digest.removeprefix('sha256:')[:16]}.tar"
    if not path.is_file() or f"sha256:{sha256_of(path)}" != digest:
        raise BuildError(
            "the base that was cut from a host is not here",
            where=str(path),
            got="another file" if path.is_file() else "no such file",
            expected=digest,
            next_step=f"on a host of {stack.base.suite}: stackcheck base --from-host {stack.id}",
        )
    return RootFs(path=path, digest=digest, packages={}, reused=True)


def _take(
    tree: _Tree, package: InstalledPackage, database: Database, root: Path, *, keep_changed: bool
) -> None:
    """Add a package's files, each compared with dpkg's MD5 sum."""
    sums = database.md5sums(package)
    for listed in database.files(package):
        if _left_out(listed):
            continue
        diverted, owner = database.diversions.get(listed, ("", package.name))
        name = diverted if diverted and owner != package.name else listed
        place = _merged(tree, name.lstrip("/"), root)
        path = root / place
        try:
            status = path.lstat()
        except FileNotFoundError:
            if listed in package.conffiles:
                tree.left_out.append(listed)
            else:
                _problem(tree, package, f"{listed} of {package.name} is missing")
            continue
        if stat.S_ISLNK(status.st_mode):
            tree.links[place] = str(path.readlink())
        elif stat.S_ISREG(status.st_mode) and not _is_as_shipped(path, sums.get(listed)):
            if keep_changed and listed in package.conffiles:
                tree.changed.append(listed)
                tree.sources[place] = path
            else:
                _problem(tree, package, f"{listed} of {package.name} is not the package's file")
        elif stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
            tree.sources[place] = path
        else:
            _problem(tree, package, f"{listed} of {package.name} is neither file, folder nor link")


def _problem(tree: _Tree, package: InstalledPackage, text: str) -> None:
    tree.problems.append(text)
    tree.broken.add(package.name)


def _is_as_shipped(path: Path, expected: str | None) -> bool:
    """Whether a file has dpkg's sum; of a few files dpkg keeps none, and these are accepted."""
    if expected is None:
        return True
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest() == expected


def _left_out(path: str) -> bool:
    """Manual pages and translations, as in bootstrapped bases."""
    if any(fnmatch.fnmatchcase(path, pattern) for pattern in INCLUDED):
        return False
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in EXCLUDED)


def _merged(tree: _Tree, name: str, root: Path) -> str:
    """Where a path is in a merged /usr; the link itself is added."""
    first, _, rest = name.partition("/")
    link = root / first
    if first not in MERGED or not link.is_symlink():
        return name
    target = str(link.readlink())
    tree.links[first] = target
    return f"{target.strip('/')}/{rest}" if rest else first


def _refuse(tree: _Tree, root: Path) -> None:
    if not tree.problems:
        return
    lines = sorted(tree.problems)[:_SHOWN]
    more = len(tree.problems) - len(lines)
    raise BuildError(
        f"{len(tree.problems)} files of this host are not as their packages have them",
        where=str(root),
        got="\n    ".join([*lines, *([f"and {more} more"] if more else [])]),
        expected="files with the MD5 sums that dpkg keeps",
        next_step=f"apt-get install --reinstall {' '.join(sorted(tree.broken)[:_SHOWN])}; "
        "or, for configuration files that were changed on purpose: --keep-changed",
    )


def _make(tree: _Tree, chosen: Sequence[InstalledPackage], database: Database, root: Path) -> None:
    """What the packages' own scripts make when they are installed."""
    for source, place in COPIED.items():
        if source in tree.sources and not tree.has(place):
            tree.texts[place] = (root / source).read_bytes()
    folder, bundle = CERTIFICATES
    parts = [
        root / name for name in sorted(tree.sources) if name.startswith(folder) and name.endswith(".crt")
    ]
    if parts:
        tree.texts[bundle] = b"".join(part.read_bytes().rstrip(b"\n") + b"\n" for part in parts)
    # Of each name's programs the best that the base has.
    for one in database.alternatives:
        here = {
            path: choice
            for path, choice in one.choices.items()
            if tree.has(_merged(tree, path.lstrip("/"), root))
        }
        if not here:
            continue
        best = max(sorted(here), key=lambda path: here[path][0])
        _link(tree, one.name, one.link, best, root)
        for slave, target in here[best][1].items():
            if tree.has(_merged(tree, target.lstrip("/"), root)):
                _link(tree, slave, one.slaves[slave], target, root)
    _copy_database(tree, chosen, database)
    tree.texts.setdefault("etc/hostname", b"localhost\n")
    tree.texts.setdefault("etc/resolv.conf", b"")


def _link(tree: _Tree, name: str, link: str, target: str, root: Path) -> None:
    tree.links[_merged(tree, link.lstrip("/"), root)] = f"/etc/alternatives/{name}"
    tree.links[f"etc/alternatives/{name}"] = target


def _copy_database(tree: _Tree, chosen: Sequence[InstalledPackage], database: Database) -> None:
    """Dpkg's entries of these packages alone, so that dpkg, apt and an SBOM know what is there."""
    admin = "var/lib/dpkg"
    tree.texts[f"{admin}/status"] = "".join(f"{package.stanza}\n\n" for package in chosen).encode()
    tree.texts[f"{admin}/available"] = b""
    names = {package.name for package in chosen}
    kept = [
        f"{source}\n{target}\n{package}\n"
        for source, (target, package) in sorted(database.diversions.items())
        if package in names
    ]
    tree.texts[f"{admin}/diversions"] = "".join(kept).encode()
    tree.texts[f"{admin}/statoverride"] = b""
    tree.texts[f"{admin}/info/format"] = b"1\n"
    for package in chosen:
        for path in database.info(package):
            tree.sources[f"{admin}/info/{path.name}"] = path


def _write(tree: _Tree, folder: Path, root: Path) -> Path:
    """Write the tar; it is named by its content once it is whole."""
    with unfinished(folder / "host.tar") as temporary:
        needed = sum(path.lstat().st_size for path in tree.sources.values() if not path.is_dir())
        require_room(folder, needed, "the base")
        with tarfile.open(temporary, "x", format=tarfile.PAX_FORMAT) as archive:
            for entry, data in _entries(tree, root):
                if data is None:
                    archive.addfile(entry)
                elif isinstance(data, bytes):
                    archive.addfile(entry, io.BytesIO(data))
                else:
                    with data.open("rb") as file:
                        archive.addfile(entry, file)
        target = folder / f"host-{sha256_of(temporary)[:16]}.tar"
        temporary.chmod(0o644)
        temporary.replace(target)
    return target


def _entries(tree: _Tree, root: Path) -> Iterator[tuple[tarfile.TarInfo, Path | bytes | None]]:
    """Every entry, a folder before what is in it, in the order of the paths."""
    folders = {str(parent) for name in _names(tree) for parent in Path(name).parents if str(parent) != "."}
    folders -= set(tree.links)
    for name in sorted({*folders, *_names(tree), *FOLDERS} - {""}):
        entry = tarfile.TarInfo(f"./{name}")
        entry.mtime = SOURCE_DATE_EPOCH
        if name in tree.links:
            entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, tree.links[name], 0o777
            yield entry, None
        elif name in tree.texts:
            entry.mode, entry.size = 0o644, len(tree.texts[name])
            yield entry, tree.texts[name]
        else:
            yield _from_host(entry, name, tree.sources.get(name, root / name))


def _names(tree: _Tree) -> list[str]:
    return [*tree.sources, *tree.links, *tree.texts]


def _from_host(entry: tarfile.TarInfo, name: str, path: Path) -> tuple[tarfile.TarInfo, Path | None]:
    status = path.lstat() if path.exists() else None
    if status and stat.S_ISREG(status.st_mode):
        entry.mode, entry.size = stat.S_IMODE(status.st_mode), status.st_size
        entry.uid, entry.gid = status.st_uid, status.st_gid
        return entry, path
    entry.type = tarfile.DIRTYPE
    entry.mode = FOLDERS.get(name, stat.S_IMODE(status.st_mode) if status else 0o755)
    if status and name not in FOLDERS:
        entry.uid, entry.gid = status.st_uid, status.st_gid
    return entry, None


def release_words(release: Mapping[str, str]) -> str:
    """What os-release calls the distribution, without characters that a label may not have."""
    return re.sub(r"[^A-Za-z0-9 ._()/-]", "", release.get("PRETTY_NAME", "unknown"))
