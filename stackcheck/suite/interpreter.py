"""Find and identify the Python of an image. In: an image of the engine. Out: an `Interpreter`, or an error.

The engine reads the files, so nothing in the image runs for this. The program that PATH names first is
accepted only if a package of the image owns it with this very content: Debian's packages, or conda's. Whoever
forges the package database too is not stopped here; docs/certificates.md says what remains.
"""

from __future__ import annotations

import dataclasses
import hashlib
import posixpath
from typing import TYPE_CHECKING, Any

from stackcheck.errors import ChecksFailedError
from stackcheck.suite import owners

if TYPE_CHECKING:
    from stackcheck.engine.client import Engine
    from stackcheck.engine.image_files import ImageFiles

NAME = "python3"
# What an engine uses for an image that sets no PATH.
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NEXT_STEP = "install Python in the image from its distribution's packages (or conda's), then run this again"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interpreter:
    """The Python of an image.

    Attributes:
        path: As PATH names it; a virtual environment is found by this path.
        file: The file at the end of its links.
        sha256: Of that file.
        package: The package that owns the file, and its version.
    """

    path: str
    file: str
    sha256: str
    package: str

    def as_json(self) -> dict[str, str]:
        """The `interpreter` object of run.json and result.json."""
        return dataclasses.asdict(self)


def find(reference: str, engine: Engine) -> Interpreter:
    """The Python that an image's PATH names, identified.

    Raises:
        ChecksFailedError: There is none, no package owns it, or it takes its library from somewhere else.
        EngineError: The engine does not have the image.
    """
    search = engine.inspect(reference).env.get("PATH") or DEFAULT_PATH
    with engine.files(reference) as files:
        path, file = _first_on(search, files, reference)
        _require_own_library(path, file, files, reference)
        body = files.read(file) or b""
        return Interpreter(
            path=path,
            file=file,
            sha256="sha256:" + hashlib.sha256(body).hexdigest(),
            package=_owner(file, body, files, reference),
        )


def require_listed(found: Interpreter, document: dict[str, Any]) -> None:
    """Refuse an interpreter whose Debian package is not in the image's SBOM.

    Raises:
        ChecksFailedError: The SBOM has no such package and version.
    """
    kind, _, named = found.package.partition(":")
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
        entry = files.entry(posixpath.join(home, posixpath.basename(file))) if home else None
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


def _owner(file: str, body: bytes, files: ImageFiles, reference: str) -> str:
    owner = owners.debian(file, body, files) or owners.conda(file, body, files)
    if owner is None:
        raise ChecksFailedError(
            f"the image's {NAME} belongs to no package",
            where=f"{reference}: {file}",
            got=f"sha256 {hashlib.sha256(body).hexdigest()}, which no installed package has at this path",
            expected="a file that dpkg or conda installed, unchanged",
            next_step=NEXT_STEP,
        )
    return owner
