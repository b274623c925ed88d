"""Find and download one package of an apt archive, through the host's own apt.

In: a source (`apt.Source`), a package. Out: a `Deb` with the hash that the archive's signed index states; the
file. apt gets folders of its own, so the host's lists and installed packages do not change; its proxies,
certificates and logins (`/etc/apt/auth.conf.d`) are the host's, and no address of a login is kept.
"""

import contextlib
import dataclasses
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from stackcheck.engine import apt
from stackcheck.engine.apt import AptSource
from stackcheck.errors import EngineError

TIMEOUT_S = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deb:
    """A package in an archive."""

    name: str
    version: str
    path: str  # below the archive's address: `pool/main/a/…/NAME_VERSION_ARCH.deb`
    size_bytes: int
    sha256: str  # as the archive's signed index states it

    @property
    def file(self) -> str:
        """The file's name alone."""
        return self.path.rpartition("/")[2]


def find(source: AptSource, package: str) -> Deb:
    """The newest version of a package in an archive.

    Raises:
        EngineError: The host has no apt, or the archive does not answer, is not signed by the source's key,
            or has no such package.
    """
    with _opened(source) as options:
        shown = _run(["apt-cache", *options, "show", "--no-all-versions", package], source)
    fields = dict(re.findall(r"^(Version|Filename|Size|SHA256): (\S+)$", shown, re.MULTILINE))
    if {"Version", "Filename", "Size", "SHA256"} - {*fields}:
        raise EngineError(
            f"the archive's index has no complete entry for {package}", where=_where(source), got=shown[:300]
        )
    return Deb(
        name=package,
        version=fields["Version"],
        path=fields["Filename"],
        size_bytes=int(fields["Size"]),
        sha256=fields["SHA256"],
    )


def fetch(source: AptSource, package: str, version: str, folder: Path) -> Path:
    """Download a version of a package into a folder; apt checks it against the signed index."""
    with _opened(source) as options, tempfile.TemporaryDirectory() as scratch:
        _run(["apt-get", *options, "download", f"{package}={version}"], source, folder=Path(scratch))
        (found,) = Path(scratch).glob("*.deb")
        # apt writes an epoch's colon as %3a; the archive's own name has it, or has no epoch at all.
        return Path(shutil.move(found, folder / found.name))


@contextlib.contextmanager
def _opened(source: AptSource) -> Iterator[Sequence[str]]:
    """Apt's options for a source alone, after `apt-get update`."""
    if not shutil.which("apt-get"):
        raise EngineError(
            "this host has no apt, which reads AMD's package archive",
            where=_where(source),
            next_step="run the same command on Debian or Ubuntu",
        )
    with tempfile.TemporaryDirectory(prefix="stackcheck-apt-") as name:
        folder = Path(name)
        for part in ("lists/partial", "cache/archives/partial"):
            (folder / part).mkdir(parents=True)
        (folder / "own.sources").write_text(source.text(), encoding="utf-8")
        (folder / "status").touch()
        options = [item for option in _options(folder) for item in ("-o", option)]
        _run(["apt-get", *options, "update", "-q"], source)
        yield options


def _options(folder: Path) -> tuple[str, ...]:
    return (
        f"Dir::Etc::SourceList={folder / 'own.sources'}",
        "Dir::Etc::SourceParts=/dev/null",
        "Dir::Etc::Preferences=/dev/null",
        "Dir::Etc::PreferencesParts=/dev/null",
        f"Dir::State={folder}",
        f"Dir::State::Lists={folder / 'lists'}",
        f"Dir::State::Status={folder / 'status'}",
        f"Dir::Cache={folder / 'cache'}",
        "APT::Architecture=amd64",
        "APT::Architectures=amd64",
        "APT::Sandbox::User=",  # apt's own user (_apt) cannot read this user's folder
        "APT::Update::Error-Mode=any",
        "Acquire::Languages=none",
        "Acquire::Retries=2",
    )


def _run(command: Sequence[str], source: AptSource, folder: Path | None = None) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, errors="replace", check=False, timeout=TIMEOUT_S, cwd=folder
        )
    except subprocess.TimeoutExpired as error:
        raise EngineError("the archive did not answer in time", where=_where(source)) from error
    if done.returncode:
        told = [line for line in done.stderr.splitlines() if line.startswith(("E:", "W:"))]
        raise EngineError(
            "apt could not get a package from the archive",
            where=_where(source),
            got="\n    ".join(map(apt.without_login, told[:6])) or done.stderr[-300:],
            next_step="check the address and its key (Signed-By), then run the command again",
        )
    return done.stdout


def _where(source: AptSource) -> str:
    return apt.without_login(" ".join((*source.uris, *source.suites, *source.components)))
