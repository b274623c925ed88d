"""What of the host's own pip, certificates and apt reaches a build: secrets and a folder of wheels.

In: `pip config list`, `PIP_*`, the CA bundle, apt's sources, a lock. Out: texts for BuildKit secrets, which
no layer keeps, and a folder with those local wheels that the lock names. A path of the host means nothing in
a build, so local folders and `file://` indexes become that folder.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import html.parser
import os
import re
import shutil
import ssl
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urldefrag, urljoin, urlparse

from stackcheck import apt
from stackcheck.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

INSIDE = "/stackcheck-wheelhouse"
CA_INSIDE = "/etc/ssl/certs/ca-certificates.crt"
SECRET_LIMIT_BYTES = 500 * 1024  # BuildKit's own: session/secrets/secrets.go, MaxSecretSize
CA_VARIABLES = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE")
# Settings that decide where packages come from. Others (colours, caches) are the host's business.
PASSED_ON = ("index-url", "trusted-host", "proxy", "timeout", "default-timeout", "retries", "no-index", "pre")
# A distribution's release name by the `os` of a stack; apt sources only pass between equal distributions.
RELEASES = {
    "debian12": ("debian", "bookworm"),
    "debian13": ("debian", "trixie"),
    "ubuntu22.04": ("ubuntu", "jammy"),
    "ubuntu24.04": ("ubuntu", "noble"),
}
_LOCKED = re.compile(
    r"^(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^]]*\])?==(?P<version>[^\s;\\]+)", re.MULTILINE
)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostSettings:
    """The host's way to packages.

    Attributes:
        pip: pip's settings that matter, name -> values.
        folders: Local folders of wheels.
        indexes: Local folders that hold a simple index.
        ca: The CA bundle, or None where the host has none.
    """

    pip: Mapping[str, tuple[str, ...]]
    folders: tuple[Path, ...]
    indexes: tuple[Path, ...]
    ca: Path | None

    def pip_conf(self, *, wheelhouse: bool) -> str:
        """A pip.conf for inside the build."""
        lines = [f"{name} = {' '.join(values)}" for name, values in self.pip.items()]
        links = self.pip.get("find-links", ())
        if wheelhouse:
            lines = [line for line in lines if not line.startswith("find-links")]
            lines.append(f"find-links = {' '.join((INSIDE, *links))}")
        if self.ca:
            lines.append(f"cert = {CA_INSIDE}")
        return "\n".join(["[global]", *lines]) + "\n" if lines else ""


def host_settings(extra: Sequence[Path] = ()) -> HostSettings:
    """Read the host's settings; `extra` folders of wheels come first (`--wheelhouse`)."""
    settings = pip_settings()
    local, remote = _split(settings.get("find-links", ()))
    local_indexes, remote_indexes = _split(settings.get("extra-index-url", ()))
    main_local, main_remote = _split(settings.get("index-url", ()))
    passed = {name: settings[name] for name in PASSED_ON if name in settings}
    passed.pop("index-url", None)
    if main_remote:
        passed["index-url"] = main_remote
    elif main_local:
        passed["no-index"] = ("true",)  # the host asks no other index than its local one
    if remote_indexes:
        passed["extra-index-url"] = remote_indexes
    if remote:
        passed["find-links"] = remote
    return HostSettings(
        pip=passed,
        folders=(*extra, *local),
        indexes=(*main_local, *local_indexes),
        ca=ca_bundle(settings),
    )


def pip_settings() -> dict[str, tuple[str, ...]]:
    """Pip's settings as `pip install` on this host would see them: environment over `install` over `global`.

    Raises:
        ConfigurationError: There is no pip to ask.
    """
    command = [sys.executable, "-m", "pip", "config", "list"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigurationError(
            "pip cannot be asked for its configuration",
            where=" ".join(command),
            got=str(error),
            next_step=f"{sys.executable} -m ensurepip",
        ) from error
    return parse_pip_settings(listed)


def parse_pip_settings(listed: str) -> dict[str, tuple[str, ...]]:
    """What `pip config list` printed, as name -> values."""
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in sections:
            sections[section][name] = str(ast.literal_eval(value))
    merged = sections["global"] | sections["install"] | sections[":env:"]
    return {name: tuple(value.split()) for name, value in merged.items()}


def ca_bundle(settings: Mapping[str, tuple[str, ...]]) -> Path | None:
    """The file of trusted certificates that the host's clients use.

    Raises:
        ConfigurationError: It is larger than a build secret may be.
    """
    named = [*settings.get("cert", ()), *(os.environ.get(name, "") for name in CA_VARIABLES)]
    default = ssl.get_default_verify_paths().cafile or ""
    path = next((Path(name) for name in [*named, CA_INSIDE, default] if name and Path(name).is_file()), None)
    if path and path.stat().st_size > SECRET_LIMIT_BYTES:
        raise ConfigurationError(
            "the CA bundle is too large to be given to a build",
            where=str(path),
            got=f"{path.stat().st_size} bytes",
            expected=f"at most {SECRET_LIMIT_BYTES} bytes",
            next_step="point PIP_CERT at a bundle with only the certificates that are needed",
        )
    return path


def apt_sources(os_name: str) -> str:
    """One-line apt sources for a base of the host's own distribution; empty for another one."""
    name, codename = RELEASES.get(os_name, ("", ""))
    release = apt.host_release()
    if not name or release.get("ID") != name:
        return ""
    lines = []
    for source in apt.sources():
        suites = [suite.replace(release["VERSION_CODENAME"], codename) for suite in source.suites]
        suites = [suite for suite in suites if suite.startswith(codename)]
        keyring = f"[signed-by={source.signed_by}] " if (source.signed_by or "").startswith("/") else ""
        lines += [
            f"deb {keyring}{uri} {suite} {' '.join(source.components)}"
            for uri in source.uris
            for suite in suites
        ]
    return "".join(f"{line}\n" for line in lines)


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


def _split(values: Iterable[str]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Local folders and remote addresses."""
    local, remote = [], []
    for value in values:
        parsed = urlparse(value)
        if parsed.scheme == "file":
            local.append(Path(unquote(parsed.path)))
        elif parsed.scheme in {"http", "https"}:
            remote.append(value)
        else:
            local.append(Path(value).expanduser())
    return tuple(local), tuple(remote)


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
