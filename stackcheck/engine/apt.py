"""The host's own package archive: where it is, which keyring verifies it, which proxy reaches it.

In: `/etc/apt` (deb822 `.sources` and one-line `.list` files) and `apt-config dump`. Out: `AptSource` values
and texts that a bootstrapped base, a build or a second pinned source can use. No archive's address is
written in this tool: a mirror or an air-gapped copy that the host uses is used wherever it has the suite.

For one package of an archive apt gets folders of its own, so the host's lists and installed packages do not
change; its proxies, certificates and logins (`/etc/apt/auth.conf.d`) are the host's.
"""

import contextlib
import dataclasses
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from stackcheck.errors import EngineError

APT = Path("/etc/apt")
# Files that this tool writes itself, so that they never count as the host's own.
OWN_PREFIX = "stackcheck-"
_ONE_LINE = re.compile(
    r"^deb\s+(?:\[(?P<options>[^]]*)\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)\s*(?P<components>.*)$"
)
# How an archive is reached and how old its index may be. What lets apt take an unsigned archive stays behind.
_OPTION = re.compile(
    r"^Acquire::(?:(?:https?|ftp|tor|Retries|ForceIPv[46]|Check-Date)\b|(?:Check|Max|Min)-Valid(?:-Until|Time)\b)",
    re.IGNORECASE,
)
# What a source says of itself beside its keyring: an unsigned local mirror, a snapshot of another day.
_OWN_SETTINGS = ("trusted", "check-valid-until", "check-date")
_NO = frozenset({"no", "false", "without", "off", "disable", "0"})  # apt-pkg/contrib/strutl.cc, StringToBool
# Not an archive that can be asked for another suite.
_MEDIA = ("cdrom:",)
# As dpkg names them (`apt-config` may be absent where sources are only read).
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AptSource:
    """One archive: addresses, suites, components and the keyring (a path, or a key written out).

    Attributes:
        settings: What it says of itself beside that, as in a deb822 stanza: `("trusted", "yes")`.
    """

    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str | None = None
    settings: tuple[tuple[str, str], ...] = ()

    def text(self) -> str:
        """The source as a deb822 stanza."""
        fields = {
            "Types": "deb",
            "URIs": " ".join(self.uris),
            "Suites": " ".join(self.suites),
            "Components": " ".join(self.components),
            "Signed-By": self.signed_by,
            **{name.title(): value for name, value in self.settings},
        }
        return "".join(f"{name}: {value}\n" for name, value in fields.items() if value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distribution:
    """A distribution whose releases a base can be of."""

    name: str
    releases: frozenset[str]  # code names that a base may have
    names: frozenset[str]  # every name of a suite of its main archive
    keyring: Path  # where its keyring package puts its keys, and the package
    keyring_package: str
    signers: frozenset[str]  # primary keys, of which at least one signs each of `releases`
    keyring_since: str  # the first version of the keyring package that has one of them


_DEBIAN_RELEASES = frozenset({"bookworm", "trixie", "forky"})
DEBIAN = Distribution(
    name="debian",
    releases=_DEBIAN_RELEASES,
    names=_DEBIAN_RELEASES
    | {"bullseye", "duke", "sid", "unstable", "testing", "stable", "oldstable", "oldoldstable"},
    keyring=Path("/usr/share/keyrings/debian-archive-keyring.gpg"),
    keyring_package="debian-archive-keyring",
    # The automatic signing keys of Debian 12 and 13: `gpg --show-keys` of the keyring package.
    signers=frozenset(
        {
            "B8B80B5B623EAB6AD8775C45B7C5D7D6350947F8",  # Debian 12
            "04B54C3CDCA79751B16BC6B5225629DF75B188BD",  # Debian 13
        }
    ),
    keyring_since="2023.1",
)


def host_release() -> dict[str, str]:
    """`/etc/os-release`: ID, VERSION_ID, VERSION_CODENAME and the rest."""
    try:
        return platform.freedesktop_os_release()
    except (OSError, ValueError):  # absent, or not UTF-8
        return {}


def sources(folder: Path = APT) -> tuple[AptSource, ...]:
    """Every enabled binary source of the host, in apt's reading order."""
    found: list[AptSource] = []
    for path in [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*"))]:
        if not path.is_file() or path.name.startswith(OWN_PREFIX):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.suffix == ".list":
            found += one_line_sources(text)
        elif path.suffix == ".sources":
            found += _stanzas(text)
    return tuple(found)


def archive(of: Distribution, suite: str, found: Iterable[AptSource]) -> tuple[AptSource, ...]:
    """A distribution's archive asked for a suite and its updates, and its security archive; else empty.

    Other publishers use the names of suites too (`bookworm main`), but have no updates of them, and a keyring
    of their own.
    """
    usable = [source for source in found if not all(uri.startswith(_MEDIA) for uri in source.uris)]
    main = [source for source in usable if "main" in source.components and of.names & {*source.suites}]
    if not main:
        return ()
    updated = {
        uri.rstrip("/")
        for source in usable
        if any(f"{name}-updates" in source.suites for name in of.names)
        for uri in source.uris
    }

    def unlikely(source: AptSource) -> tuple[bool, bool]:
        own = Path(source.signed_by or "").name.startswith(f"{of.name}-archive")
        return not updated & {uri.rstrip("/") for uri in source.uris}, not own

    best = min(main, key=unlikely)
    security = [
        dataclasses.replace(source, suites=(f"{suite}-security",), components=("main",))
        for source in usable
        if any(f"{name}-security" in source.suites for name in of.names)
    ]
    whole = dataclasses.replace(best, suites=(suite, f"{suite}-updates"), components=("main",))
    return (whole, *dict.fromkeys(security))


def for_suite(suite: str, *, folder: Path = APT) -> AptSource:
    """The host's main archive of Debian, asked for another suite (Debian 13's from Debian 12's address).

    Raises:
        EngineError: The host has no source of Debian, so there is nothing to derive from.
    """
    found = sources(folder)
    asked = archive(DEBIAN, suite, found)
    if asked:
        return dataclasses.replace(asked[0], suites=(suite,))
    raise EngineError(
        "no package archive of this host's own release is configured",
        where=str(folder),
        got=", ".join(" ".join(source.suites) for source in found) or "no source",
        expected="a source with a suite of Debian and the component main",
        next_step=f"write one to {folder}/sources.list.d/ and run: apt-get update",
    )


def options() -> tuple[str, ...]:
    """The host's apt settings that decide whether an archive is reached: proxies, CA file, date checks."""
    try:
        dump = subprocess.run(
            ["apt-config", "dump"], capture_output=True, errors="replace", check=True, timeout=30
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return reach_options(dump.splitlines())


def reach_options(dump: Iterable[str]) -> tuple[str, ...]:
    """The lines of `apt-config dump` that decide whether an archive is reached."""
    return tuple(line for line in dump if _OPTION.match(line) and not line.endswith('"";'))


def logins(folder: Path = APT) -> tuple[str, ...]:
    """Apt's options that name the host's logins for archives, for an apt with folders of its own."""
    return tuple(
        f'{option} "{folder / name}";'
        for option, name in (("Dir::Etc::netrc", "auth.conf"), ("Dir::Etc::netrcparts", "auth.conf.d"))
        if (folder / name).exists()
    )


def without_login(text: str) -> str:
    """A text for a message, without the user and password of an address."""
    return re.sub(r"://[^/@\s]*@", "://", text)


def one_line_sources(text: str) -> list[AptSource]:
    """The sources of a `.list` file for this architecture."""
    found = []
    for line in text.splitlines():
        match = _ONE_LINE.match(line.split("#", 1)[0].strip())
        if match is None:
            continue
        settings = {
            name.lower(): value.strip('"')
            for name, value in (
                item.split("=", 1) for item in (match["options"] or "").split() if "=" in item
            )
        }
        if _is_for_here(settings.get("arch", "").split(",")):
            found.append(_source(match["uri"], match["suite"], match["components"], settings))
    return found


def _stanzas(text: str) -> list[AptSource]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = []
    for stanza in re.split(r"\n[ \t]*\n", "\n".join(lines)):
        fields = _fields(stanza)
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() in _NO:
            continue
        if _is_for_here(fields.get("architectures", "").split()):
            found.append(
                _source(
                    fields.get("uris", ""), fields.get("suites", ""), fields.get("components", ""), fields
                )
            )
    return found


def _source(uris: str, suites: str, components: str, settings: Mapping[str, str]) -> AptSource:
    return AptSource(
        uris=tuple(uris.split()),
        suites=tuple(suites.split()),
        components=tuple(components.split()),
        signed_by=settings.get("signed-by"),
        settings=tuple((name, settings[name]) for name in _OWN_SETTINGS if settings.get(name)),
    )


def _is_for_here(architectures: Iterable[str]) -> bool:
    named = {name for name in architectures if name}
    return not named or _ARCHITECTURES.get(platform.machine(), platform.machine()) in named


def _fields(stanza: str) -> dict[str, str]:
    """One deb822 stanza; an indented line continues the field above it, as an embedded key does."""
    fields: dict[str, str] = {}
    name = ""
    for line in stanza.splitlines():
        if line[:1] in {" ", "\t"} and name:
            fields[name] += "\n" + line
        elif ":" in line:
            name, _, value = line.partition(":")
            name = name.strip().lower()
            fields[name] = value.strip()
    return fields


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
    """Download a version of a package into a folder; apt checks it against the signed index.

    Raises:
        EngineError: As `find`.
    """
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
            got="\n    ".join(map(without_login, told[:6])) or done.stderr[-300:],
            next_step="check the address and its key (Signed-By), then run the command again",
        )
    return done.stdout


def _where(source: AptSource) -> str:
    return without_login(" ".join((*source.uris, *source.suites, *source.components)))
