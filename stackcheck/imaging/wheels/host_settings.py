"""The host's settings of pip, certificates and apt for a build: as secrets, and as a folder of wheels.

In: `pip config list`, `PIP_*`, the CA bundle, apt's sources, a lock. Out: texts for BuildKit secrets, which
no layer keeps, and a folder with those local wheels that the lock names. A path of the host means nothing in
a build, so local folders and `file://` indexes become that folder.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlparse

from stackcheck.engine import apt
from stackcheck.errors import ConfigurationError
from stackcheck.files import origins
from stackcheck.files.pip_settings import CERTIFICATES, asks_no_index, certificates, pip_settings

INSIDE = "/stackcheck-wheelhouse"
SECRET_LIMIT_BYTES = 500 * 1024  # BuildKit's own: session/secrets/secrets.go, MaxSecretSize
# Settings that decide where packages come from. Others (colours, caches) are the host's business.
PASSED_ON = ("index-url", "trusted-host", "proxy", "timeout", "default-timeout", "retries", "no-index", "pre")
# A distribution's release name by the `os` of a stack; apt sources only pass between equal distributions.
RELEASES = {
    "debian12": ("debian", "bookworm"),
    "debian13": ("debian", "trixie"),
    "ubuntu22.04": ("ubuntu", "jammy"),
    "ubuntu24.04": ("ubuntu", "noble"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostSettings:
    """Where the host's pip gets packages."""

    pip: Mapping[str, tuple[str, ...]]  # pip's settings that matter, name -> values
    folders: tuple[Path, ...]
    indexes: tuple[Path, ...]
    ca: Path | None  # the CA bundle, or None where the host has none
    alone: bool = False  # whether a setting makes the host's pip ask no index (`no-index`)

    def pip_conf(
        self, *, wheelhouse: bool, closed: bool = False, also: Sequence[tuple[str, str]] = ()
    ) -> str:
        """A pip.conf for inside the build.

        Args:
            wheelhouse: Whether the stage has a folder of wheels.
            closed: All is in that folder, so no index is asked.
            also: Places to ask beside the host's own: pip's option and an address.
        """
        if closed:
            return f"[global]\nno-index = true\nfind-links = {INSIDE}\n"
        settings = dict(self.pip)
        for option, place in also:
            name = option.removeprefix("--")
            # The host has its main index in a folder, which is handed over: no index but this one is asked.
            if name == "extra-index-url" and "no-index" in settings:
                del settings["no-index"]
                name = "index-url"
            settings[name] = (*settings.get(name, ()), place)
        links = settings.pop("find-links", ())
        links = (INSIDE, *links) if wheelhouse else links
        settings |= {"find-links": links} if links else {}
        lines = [f"{name} = {' '.join(values)}" for name, values in settings.items()]
        if self.ca:
            lines.append(f"cert = {CERTIFICATES}")
        return "\n".join(["[global]", *lines]) + "\n" if lines else ""


def only(folder: Path) -> HostSettings:
    """One folder of wheels, and no index at all: `--wheelhouse`."""
    origins.require_folder(folder)
    return HostSettings(pip={}, folders=(folder,), indexes=(), ca=None)


def host_settings() -> HostSettings:
    """Read the host's settings."""
    settings = pip_settings()
    local, remote = _split(settings.get("find-links", ()))
    local_indexes, remote_indexes = _split(settings.get("extra-index-url", ()))
    main_local, main_remote = _split(settings.get("index-url", ()))
    passed = {name: settings[name] for name in PASSED_ON if name in settings}
    passed.pop("index-url", None)
    if main_remote:
        passed["index-url"] = main_remote
    elif main_local:
        passed["no-index"] = ("true",)  # the host uses its local index only
    if remote_indexes:
        passed["extra-index-url"] = remote_indexes
    if remote:
        passed["find-links"] = remote
    return HostSettings(
        pip=passed,
        folders=local,
        indexes=(*main_local, *local_indexes),
        ca=ca_bundle(settings),
        alone=asks_no_index(settings),
    )


def ca_bundle(settings: Mapping[str, tuple[str, ...]]) -> Path | None:
    """The file of trusted certificates that the host's clients use.

    Raises:
        ConfigurationError: It is larger than a build secret may be.
    """
    path = certificates(settings)
    if path and path.stat().st_size > SECRET_LIMIT_BYTES:
        raise ConfigurationError(
            "the CA bundle is too large for a build secret",
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
