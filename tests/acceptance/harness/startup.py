"""Files that Python runs at every start without being asked, and who installed them.

In: the folders that a new Python of the image imports from. Out: each such file that no installed package
owns with its present content, in words. They are .pth files and the modules sitecustomize and usercustomize:
https://docs.python.org/3/library/site.html.
"""

import base64
import hashlib
import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MODULES = ("sitecustomize", "usercustomize")
DPKG = Path("/var/lib/dpkg")


@dataclass(frozen=True)
class Owner:
    """A package that installed a file, and the digest that it recorded: "sha256=…", "md5=…", or ""."""

    name: str
    digest: str


def problems(folders: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The files, and what is wrong with each that no package owns or that was changed."""
    found = files(folders)
    known = owners(found, folders)
    return found, [problem for path in found if (problem := _problem(path, known))]


def files(folders: Iterable[str]) -> list[Path]:
    """Every file on the import path that runs by itself. An archive on the path counts: it may hold some."""
    found = set()
    for folder in map(Path, folders):
        if folder.is_file():
            found.add(folder)
        elif folder.is_dir():
            found |= {path for entry in folder.iterdir() for path in _running(entry)}
    return sorted(_settled(path) for path in found)


def owners(paths: Iterable[Path], folders: Sequence[str]) -> Mapping[Path, list[Owner]]:
    """The packages that list these files, or the files that they link to."""
    wanted = {place for path in paths for place in (path, path.resolve())}
    found: dict[Path, list[Owner]] = {path: [] for path in wanted}
    for path, owner in (*_of_python(wanted, folders), *_of_debian(wanted)):
        found[path].append(owner)
    return found


def _problem(path: Path, known: Mapping[Path, list[Owner]]) -> str | None:
    if not known[path]:
        return f"{path}: no installed package owns it, and Python runs it at every start"
    body = path.read_bytes()
    digests = {f"sha256={_urlsafe(body)}", f"md5={hashlib.md5(body, usedforsecurity=False).hexdigest()}"}
    claims = {owner for place in (path, path.resolve()) for owner in known[place]}
    if any(owner.digest in digests for owner in claims):
        return None
    names = ", ".join(sorted({owner.name for owner in claims}))
    return f"{path}: it is not as {names} installed it, and Python runs it at every start"


def _running(entry: Path) -> Iterator[Path]:
    """The files at an entry of a folder that run at a start."""
    if entry.name.endswith(".pth"):
        yield entry
    if entry.name.partition(".")[0] in MODULES:
        yield from (path for path in entry.rglob("*.py")) if entry.is_dir() else (entry,)


def _settled(path: Path) -> Path:
    """The path with the links of its folder followed: lib64 is lib. A link in the file's place stays one."""
    return path.parent.resolve() / path.name


def _of_python(wanted: set[Path], folders: Sequence[str]) -> Iterator[tuple[Path, Owner]]:
    names = {path.name for path in wanted}
    for distribution in importlib.metadata.distributions(path=list(folders)):
        for file in distribution.files or ():
            path = _settled(Path(str(distribution.locate_file(file)))) if file.name in names else None
            if path in wanted:
                digest = f"{file.hash.mode}={file.hash.value}" if file.hash else ""
                yield path, Owner(f"{distribution.metadata['Name']} {distribution.version}", digest)


def _of_debian(wanted: set[Path]) -> Iterator[tuple[Path, Owner]]:
    """Files in dpkg's lists. Digests of settings are in its status file, all others in lists of their own."""
    for listing in sorted(DPKG.glob("info/*.list")):
        lines = listing.read_text(errors="replace").splitlines()
        for path in wanted.intersection(map(Path, (line for line in lines if _may_be(line)))):
            digest = _md5(path, listing.with_suffix(".md5sums"))
            yield path, Owner(listing.stem, f"md5={digest}" if digest else "")


def _may_be(line: str) -> bool:
    return line.endswith((".pth", ".zip")) or any(name in line for name in MODULES)


def _md5(path: Path, sums: Path) -> str:
    for line in sums.read_text(errors="replace").splitlines() if sums.exists() else ():
        digest, _, name = line.partition("  ")
        if f"/{name}" == str(path):
            return digest
    for line in (DPKG / "status").read_text(errors="replace").splitlines():
        words = line.split()
        if line.startswith(" /") and words[0] == str(path) and "obsolete" not in words:
            return words[1]
    return ""


def _urlsafe(body: bytes) -> str:
    """As RECORD has it: https://packaging.python.org/en/latest/specifications/recording-installed-packages/."""
    return base64.urlsafe_b64encode(hashlib.sha256(body).digest()).rstrip(b"=").decode()
