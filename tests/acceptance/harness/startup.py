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
# virtualenv, and uv until 0.11, write these two files into each environment that they make, and list them
# nowhere. The .pth file imports the module, which corrects distutils inside an environment. The digests are
# of the module in 15 releases of virtualenv and 9 of uv; a release between them may have one more:
# https://github.com/pypa/virtualenv/blob/main/src/virtualenv/create/via_global_ref/_virtualenv.py,
# https://github.com/astral-sh/uv/blob/0.9.7/crates/uv-virtualenv/src/_virtualenv.py
HOOK, HOOK_MODULE = "_virtualenv.pth", "_virtualenv.py"
HOOK_BODY = b"import _virtualenv"
HOOK_DIGESTS = (
    "684b8c07932ba4a84ac2e5ae9afe49ef04e92bac3d8d4191d455cf09d093e5fc",  # virtualenv 20.4 to 20.13
    "ce57d5e0d9b5d7356cb42da7450ba8f9359bdf693e335f4c921626943c77e64d",  # 20.16
    "c9199315871b11b12df226f890a38e66e63191e1adbfb11a66e6861151b33fca",  # 20.17 to 20.21
    "f4dfaeb9efc1614890cfa94ed15bbe9b2ee15fbe76d569ef5e435e93e4987dc7",  # 20.23
    "0aeb86546345c1d0fada097536e35525714d5cdbcc2d8eb3f9912a955044fcff",  # 20.24 and 20.25
    "0f20351ea7e90039c46d3fabdef991f28b1e3ff33eb13ee6f0d5cd21ea0e8b14",  # 20.26 to 20.35
    "bec6155ff7bfc88f8e79e481f27fd7ee0a3b40eeca9bfeb41f4c4b997b2f8100",  # 20.36
    "07584d2a5d13e0811eb567d78ed2aca0fb60e7defff59a01ca7a48d907bdea51",  # 21.15
    "ee52b2e2e720a40885a6b4b90c40e28e5c70e550af74d5efd169eaa5db2a6f6f",  # uv 0.2
    "6cf30c56faf2a55228914dbbd17f8088ed371ebb08f5e7fa6fd931f913fcaf1d",  # uv 0.4 to 0.11
)
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
    if not known[path] and path.name == HOOK:
        return _hook_problem(path)
    if not known[path]:
        return f"{path}: no installed package owns it, and Python runs it at every start"
    body = path.read_bytes()
    # As RECORD has it (packaging.python.org, "Recording installed projects").
    recorded = base64.urlsafe_b64encode(hashlib.sha256(body).digest()).rstrip(b"=").decode()
    digests = {f"sha256={recorded}", f"md5={hashlib.md5(body, usedforsecurity=False).hexdigest()}"}
    claims = {owner for place in (path, path.resolve()) for owner in known[place]}
    if any(owner.digest in digests for owner in claims):
        return None
    names = ", ".join(sorted({owner.name for owner in claims}))
    return f"{path}: it is not as {names} installed it, and Python runs it at every start"


def _hook_problem(path: Path) -> str | None:
    """What is wrong with the hook that virtualenv and uv write; None: it has the bytes of one of them."""
    module = path.with_name(HOOK_MODULE)
    body = module.read_bytes() if module.is_file() else b""
    if path.read_bytes().strip() == HOOK_BODY and hashlib.sha256(body).hexdigest() in HOOK_DIGESTS:
        return None
    return (
        f"{path}: Python runs it at every start, no installed package owns it, and no known virtualenv or uv"
        f" wrote these bytes. Only distutils needs it: rm {path} {module}"
    )


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
        ours = (line for line in lines if line.endswith((".pth", ".zip")) or any(n in line for n in MODULES))
        for path in wanted.intersection(map(Path, ours)):
            digest = _md5(path, listing.with_suffix(".md5sums"))
            yield path, Owner(listing.stem, f"md5={digest}" if digest else "")


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
