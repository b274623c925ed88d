"""The host's own package archive: where it is, which keyring verifies it, which proxy reaches it.

In: `/etc/apt` (deb822 `.sources` and one-line `.list` files) and `apt-config dump`. Out: `Source` values
and texts that a bootstrapped base, a build or a second pinned source can use. No archive's address is
written in this tool: a mirror or an air-gapped copy that the host uses is used for everything.
"""

from __future__ import annotations

import dataclasses
import platform
import re
import subprocess
from pathlib import Path

from stackcheck.errors import EngineError

APT = Path("/etc/apt")
# Files that this tool writes itself, so that they never count as the host's own.
OWN_PREFIX = "stackcheck-"
_ONE_LINE = re.compile(
    r"^deb\s+(?:\[(?P<options>[^]]*)\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)\s*(?P<components>.*)$"
)
_OPTION = re.compile(r"^(Acquire::(?:https?::(?:Proxy|CaInfo)|[Cc]heck-[Vv]alid-[Uu]ntil|Check-Date))\b.*$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """One archive: addresses, suites, components and the keyring (a path, or a key written out)."""

    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str | None = None

    def text(self) -> str:
        """The source as a deb822 stanza."""
        fields = {
            "Types": "deb",
            "URIs": " ".join(self.uris),
            "Suites": " ".join(self.suites),
            "Components": " ".join(self.components),
            "Signed-By": self.signed_by,
        }
        return "".join(f"{name}: {value}\n" for name, value in fields.items() if value)


def host_release() -> dict[str, str]:
    """`/etc/os-release`: ID, VERSION_ID, VERSION_CODENAME and the rest."""
    try:
        return platform.freedesktop_os_release()
    except OSError:
        return {}


def sources(folder: Path = APT) -> tuple[Source, ...]:
    """Every enabled binary source of the host, in apt's reading order."""
    found: list[Source] = []
    for path in [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*"))]:
        if not path.is_file() or path.name.startswith(OWN_PREFIX):
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".list":
            found += _one_line_sources(text)
        elif path.suffix == ".sources":
            found += _stanzas(text)
    return tuple(found)


def for_suite(suite: str, *, folder: Path = APT, release: str | None = None) -> Source:
    """The host's main archive, asked for another suite (Debian 13's from Debian 12's address and keyring).

    Raises:
        EngineError: The host has no source for its own release, so there is nothing to derive from.
    """
    own = main_archive(folder=folder, release=release)
    return dataclasses.replace(own, suites=(suite,), components=("main",))


def main_archive(*, folder: Path = APT, release: str | None = None) -> Source:
    """The source that gives the host its own release.

    Raises:
        EngineError: The host has no such source.
    """
    codename = release or host_release().get("VERSION_CODENAME", "")
    for source in sources(folder):
        if codename in source.suites and "main" in source.components:
            return source
    raise EngineError(
        "no package archive of this host's own release is configured",
        where=str(folder),
        got=", ".join(" ".join(source.suites) for source in sources(folder)) or "no source",
        expected=f"a source with the suite {codename or 'of this release'} and the component main",
        next_step=f"write one to {folder}/sources.list.d/ and run: apt-get update",
    )


def options() -> tuple[str, ...]:
    """The host's apt settings that decide whether an archive is reached: proxies, CA file, date checks."""
    try:
        dump = subprocess.run(
            ["apt-config", "dump"], capture_output=True, text=True, check=True, timeout=30
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line for line in dump.splitlines() if _OPTION.match(line) and not line.endswith('"";'))


def _one_line_sources(text: str) -> list[Source]:
    found = []
    for line in text.splitlines():
        match = _ONE_LINE.match(line.split("#", 1)[0].strip())
        if match is None:
            continue
        settings = dict(item.split("=", 1) for item in (match["options"] or "").split() if "=" in item)
        found.append(
            Source(
                uris=(match["uri"],),
                suites=(match["suite"],),
                components=tuple(match["components"].split()),
                signed_by=settings.get("signed-by"),
            )
        )
    return found


def _stanzas(text: str) -> list[Source]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = []
    for stanza in re.split(r"\n[ \t]*\n", "\n".join(lines)):
        fields = _fields(stanza)
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() == "no":
            continue
        found.append(
            Source(
                uris=tuple(fields.get("uris", "").split()),
                suites=tuple(fields.get("suites", "").split()),
                components=tuple(fields.get("components", "").split()),
                signed_by=fields.get("signed-by"),
            )
        )
    return found


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
