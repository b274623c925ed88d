"""Find and identify the Python of an image. In: an image of the engine. Out: which it is, or an error.

The engine reads the files, so nothing in the image runs for this. The program that PATH names first is
accepted only if a package of the image owns it with this very content: Debian's packages, or conda's. Where
none does (python:3.12, uv), the person who certifies names the digests that they accept, and the certificate
says so. This does not stop an attacker who also forges the package database; docs/guides/certificates.md
says what remains.
"""

import hashlib
import json
import posixpath
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from stackcheck.engine.client import Engine
from stackcheck.engine.image_files import ImageFiles
from stackcheck.errors import ChecksFailedError
from stackcheck.files import dpkg_status
from stackcheck.oci.documents import sha256
from stackcheck.suite.results import ReportedInterpreter

NAME = "python3"
# What an engine uses for an image that sets no PATH.
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NEXT_STEP = "install Python in the image from its distribution's packages (or conda's), then run this again"
OPTION = "--accept-python"


class UnownedPythonError(ChecksFailedError):
    """No package owns the image's Python, and not all of its files are accepted by their digests."""

    def __init__(self, reference: str, of_file: Mapping[str, str], accepted: Collection[str]) -> None:
        others = sorted(set(accepted).difference(of_file.values()))
        super().__init__(
            f"the image's {NAME} belongs to no package",
            where=f"{reference}: {', '.join(of_file)}",
            got=f"{' and '.join(of_file.values())}, which no installed package has at this path"
            + (f"; accepted is {' and '.join(others)}, which is none of its files" if others else ""),
            expected="a file that dpkg or conda installed, unchanged; or one that you accept by its digest",
            next_step=_way_out(of_file),
        )
        self.of_file = of_file


def find(reference: str, engine: Engine, accepted: Collection[str] = ()) -> ReportedInterpreter:
    """The Python that an image's PATH names, identified.

    Raises:
        UnownedPythonError: No package owns it, and its digest is not accepted.
        ChecksFailedError: There is no Python, it is a script, it takes its library from somewhere else, or
            the image loads a library into every program.
    """
    env = engine.inspect(reference).env
    with engine.files(reference) as files:
        path, file = _first_on(env.get("PATH") or DEFAULT_PATH, files, reference)
        _require_own_library(path, file, files, reference)
        # The loader obeys this file as it obeys LD_PRELOAD, which no run gets.
        named = (files.read(PRELOAD) or b"").split()
        if named:
            raise ChecksFailedError(
                "the image loads a library into every program before it starts",
                where=f"{reference}: {PRELOAD}",
                got=b" ".join(named)[:200].decode(errors="replace"),
                expected="no such file: the library could change what the suites report",
                next_step="remove the file from the image; users who want the library can set LD_PRELOAD",
            )
        body = files.read(file) or b""
        owner = debian_owner(file, body, files) or conda_owner(file, body, files)
        found = ReportedInterpreter(
            path=path,
            file=file,
            sha256=sha256(body),
            package=owner,
            libraries={} if owner else shared_libraries(file, body, env, files),
        )
    if owner is None:
        _require_accepted(found, body, accepted, reference)
    return found


def announced(
    reference: str, engine: Engine, accepted: Collection[str], report: Callable[[str], None]
) -> ReportedInterpreter:
    """Find the image's Python as `find` does, and report digests that were accepted in vain."""
    found = find(reference, engine, accepted)
    for sentence in _unneeded(found, accepted):
        report(f"{reference}: {sentence}")
    return found


def _unneeded(found: ReportedInterpreter, accepted: Collection[str]) -> Iterator[str]:
    """Why accepted digests change nothing for an identified Python: one sentence each."""
    if found.package and accepted:
        yield f"{OPTION} is not needed: {found.package} owns the image's Python, {found.file}"
        return
    for digest in sorted(set(accepted).difference({found.sha256, *found.libraries.values()})):
        yield f"{OPTION} {digest} is not needed: no file of the image's Python has this digest"


def require_listed(found: ReportedInterpreter, document: dict[str, Any]) -> None:
    """Refuse an interpreter whose Debian package is not in the image's SBOM.

    Raises:
        ChecksFailedError: The SBOM has no such package and version.
    """
    kind, _, named = (found.package or "").partition(":")
    listed = {
        f"{item['name']} {item.get('version')}"
        for item in document["components"]
        if str(item.get("purl", "")).startswith("pkg:deb/")
    }
    if kind == "deb" and named not in listed:
        raise ChecksFailedError(
            "the SBOM does not list the package of the image's Python",
            where=found.file,
            got=f"no {named} among {len(listed)} Debian packages",
            expected="the package that owns the file",
            next_step=NEXT_STEP,
        )


def _first_on(search: str, files: ImageFiles, reference: str) -> tuple[str, str]:
    """The path of the first Python on PATH, and its file.

    A folder that is not absolute means the working directory, which is the tool's and empty.
    """
    for folder in filter(posixpath.isabs, search.split(":")):
        path = posixpath.join(folder, NAME)
        entry = files.entry(path)
        file = (entry.target or path) if entry else path
        real = files.entry(file)
        if real and real.executable and not real.is_folder:
            return path, file
    raise ChecksFailedError(
        f"the image has no {NAME}",
        where=reference,
        got=f"none on its PATH: {search}",
        expected=f"an executable file {NAME} on PATH",
        next_step=NEXT_STEP,
    )


def _require_own_library(path: str, file: str, files: ImageFiles, reference: str) -> None:
    """A pyvenv.cfg may name any folder as the home of Python: it must be the one of this very file."""
    folder = posixpath.dirname(path)
    for place in (folder, posixpath.dirname(folder)):
        text = files.read(posixpath.join(place, "pyvenv.cfg"))
        if text is None:
            continue
        home = _home(text.decode(errors="replace"))
        own = posixpath.join(_resolved(home, files), posixpath.basename(file)) if home else None
        entry = files.entry(own) if own else None
        if entry is None or (entry.target or posixpath.normpath(entry.path)) != file:
            raise ChecksFailedError(
                "the virtual environment of the image's Python belongs to another Python",
                where=f"{reference}: {posixpath.join(place, 'pyvenv.cfg')}",
                got=f"home = {home}",
                expected=f"the folder of {file}",
                next_step="make the virtual environment anew with this Python",
            )


def _home(text: str) -> str:
    """The `home` of a pyvenv.cfg; empty if it is not one absolute folder."""
    pairs = [line.partition("=") for line in text.splitlines() if "=" in line]
    homes = [value.strip() for key, _, value in pairs if key.strip().lower() == "home"]
    return homes[0] if len(set(homes)) == 1 and posixpath.isabs(homes[0]) else ""


def _resolved(folder: str, files: ImageFiles) -> str:
    """A folder with the links on the way to it followed: uv has one for each minor version of Python."""
    place = "/"
    for part in filter(None, folder.split("/")):
        entry = files.entry(posixpath.join(place, part))
        place = (entry.target or posixpath.join(place, part)) if entry else posixpath.join(place, part)
    return posixpath.normpath(place)


def _require_accepted(
    found: ReportedInterpreter, body: bytes, accepted: Collection[str], reference: str
) -> None:
    """Refuse a Python that no package owns unless the digest of each of its files is in `accepted`."""
    of_file = {found.file: found.sha256, **found.libraries}
    is_program = body.startswith(ELF)
    if is_program and set(of_file.values()) <= set(accepted):
        return
    if is_program:
        raise UnownedPythonError(reference, of_file, accepted)
    raise ChecksFailedError(
        f"the image's {NAME} belongs to no package",
        where=f"{reference}: {found.file}",
        got=f"{found.sha256}, which no installed package has at this path",
        expected="a program that dpkg or conda installed, unchanged; a script cannot be accepted",
        next_step=NEXT_STEP,
    )


def _way_out(of_file: Mapping[str, str]) -> str:
    options = " ".join(f"{OPTION} {digest}" for digest in of_file.values())
    return (
        "see if an image that you trust has the same, such as the official one that this is made from: "
        f"docker run --rm --entrypoint sha256sum IMAGE {' '.join(of_file)}; if so, add {options}"
    )


# A Python that was built with --enable-shared is a program of some kilobytes, and its loader takes the
# interpreter from libpython3.X.so.1.0: ld.so(8). So the digest of the program alone says nothing.
ELF = b"\x7fELF"
CACHE = "/etc/ld.so.cache"
PRELOAD = "/etc/ld.so.preload"
_NAME = re.compile(rb"libpython3\.\d+[a-z]*\.so\.1\.0")
_ARCHITECTURES = ("x86_64-linux-gnu", "aarch64-linux-gnu")
_FOLDERS = tuple(
    f"{root}{name}"
    for root in ("", "/usr", "/usr/local")
    for name in ("/lib", "/lib64", *(f"/lib/{arch}" for arch in _ARCHITECTURES))
)
# The loader prefers libraries for newer processors, which lie in these folders below each of its folders.
_BELOW = ("", *(f"glibc-hwcaps/x86-64-v{level}" for level in (4, 3, 2)))


def shared_libraries(file: str, body: bytes, env: Mapping[str, str], files: ImageFiles) -> dict[str, str]:
    """The file -> digest of each library that the loader may choose for a program; none if it has all in it.

    Links in `file` are followed. Of the image's variables LD_LIBRARY_PATH reaches the run.
    """
    found = {}
    for name in sorted({match.decode() for match in _NAME.findall(body)}):
        for place in _places(name, file, env, files):
            entry = files.entry(place)
            content = files.read(place) if entry else None
            if entry and content is not None:
                found[entry.target or place] = sha256(content)
    return found


def _places(name: str, file: str, env: Mapping[str, str], files: ImageFiles) -> Iterator[str]:
    prefix = posixpath.dirname(posixpath.dirname(file))
    named = filter(posixpath.isabs, re.split("[:;]", env.get("LD_LIBRARY_PATH", "")))
    for folder in dict.fromkeys((f"{prefix}/lib", f"{prefix}/lib64", *named, *_FOLDERS)):
        yield from (posixpath.normpath(posixpath.join(folder, below, name)) for below in _BELOW)
    cache = files.read(CACHE) or b""
    for path in re.findall(rb"/[^\0]*" + re.escape(name.encode()), cache):
        yield path.decode(errors="replace")


DPKG = "/var/lib/dpkg"
SUMS = ".md5sums"


def debian_owner(file: str, body: bytes, files: ImageFiles) -> str | None:
    """The installed Debian package that owns a file with this content, as `deb:NAME VERSION`."""
    # dpkg records MD5 and nothing else. It finds a file that was exchanged; the SHA-256 goes into the result.
    digest = hashlib.md5(body, usedforsecurity=False).hexdigest()
    wanted = {f"{digest}  {name}".encode() for name in _spellings(file)}
    status = files.read(f"{DPKG}/status")
    if status is None:
        return None
    stanzas = (fields for fields, _ in dpkg_status.installed(status.decode(errors="replace")))
    installed = {fields["Package"]: fields.get("Version") for fields in stanzas}
    for name, text in files.folder(f"{DPKG}/info"):
        package = name.removesuffix(SUMS).partition(":")[0]
        if name.endswith(SUMS) and package in installed and wanted & set(text.splitlines()):
            return f"deb:{package} {installed[package]}"
    return None


def conda_owner(file: str, body: bytes, files: ImageFiles) -> str | None:
    """The conda package that owns a file with this content, as `conda:NAME VERSION`.

    Its record has the digest of the file as it was installed, after conda wrote the prefix into it:
    https://docs.conda.io/projects/conda/en/stable/dev-guide/specs/
    """
    digest = hashlib.sha256(body).hexdigest()
    prefix = posixpath.dirname(posixpath.dirname(file))
    for name, text in files.folder(f"{prefix}/conda-meta"):
        record = _record(text) if name.startswith("python-") and name.endswith(".json") else {}
        for entry in record.get("paths_data", {}).get("paths", ()):
            recorded = entry.get("sha256_in_prefix") or entry.get("sha256")
            if (posixpath.join(prefix, str(entry.get("_path", ""))), recorded) == (file, digest):
                return f"conda:{record.get('name')} {record.get('version')}"
    return None


def _spellings(file: str) -> set[str]:
    """The names of a file in a list of dpkg: without the first slash, and as before UsrMerge without usr/."""
    plain = file.lstrip("/")
    return {plain, plain.removeprefix("usr/")}


def _record(text: bytes) -> dict[str, Any]:
    """A record of conda; empty if it has another form."""
    try:
        found = json.loads(text)
        paths = found["paths_data"]["paths"]
        well_formed = all(isinstance(entry, dict) for entry in paths)
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return found if well_formed else {}
