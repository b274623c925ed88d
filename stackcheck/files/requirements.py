"""The packages that a lock, or an instruction of a Dockerfile, pins by hash, and options that name places.

In: text, options. Out: one `Locked` for each package; the places, apart from the other options.
"""

import dataclasses
import re
from collections.abc import Iterable

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

_ENTRY = re.compile(
    r"(?:^|['\"\s])(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^]]*\])?==(?P<version>[^\s;\\'\"]+)"
    r"(?P<rest>(?:\s*;[^\n\\]*)?(?:[\s\\]*--hash=sha256:[0-9a-f]{64})*)"
)
PLACES = ("--index-url", "--extra-index-url", "--find-links")  # options whose value is an address
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Locked:
    """A package at one version."""

    name: str  # normalized (PEP 503)
    version: str
    hashes: frozenset[str]  # sha256 of each file that may be installed; empty if the text gives no hash

    def __str__(self) -> str:
        """The requirement in pip's form."""
        return f"{self.name}=={self.version}"

    @property
    def requirement(self) -> str:
        """One line of a requirements file."""
        return " ".join([str(self), *(f"--hash=sha256:{value}" for value in sorted(self.hashes))])

    def is_of(self, filename: str) -> bool:
        """Whether a wheel or source archive has this name and version."""
        stem = re.sub(r"\.(whl|tar\.gz|zip)$", "", filename)
        if stem == filename:
            return False
        wheel = filename.endswith(".whl")
        name, version = stem.split("-")[:2] if wheel and "-" in stem else stem.rpartition("-")[::2]
        return canonicalize_name(name) == self.name and _same_version(self.version, version)


def read_packages(text: str) -> tuple[Locked, ...]:
    """The packages that a text pins, in its order."""
    found = {}
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for match in _ENTRY.finditer("\n".join(lines)):
        name = canonicalize_name(match["name"])
        found[name] = Locked(
            name=name, version=match["version"], hashes=frozenset(_HASH.findall(match["rest"]))
        )
    return tuple(found.values())


def split_places(options: Iterable[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Options that name a place (`index-url` -> addresses), and all others.

    An address may hold a password, and every user of a machine reads the arguments of every process. So
    places reach a program by its environment or by a file that the tool writes, never as arguments.
    """
    places: dict[str, list[str]] = {}
    others = []
    for option in options:
        name, _, value = option.partition("=")
        if name in PLACES:
            places.setdefault(name.removeprefix("--"), []).append(value)
        else:
            others.append(option)
    return places, others


def _same_version(locked: str, version: str) -> bool:
    try:
        found = Version(version.replace("_", "+", 1))
        # As pip has it, a pin without a local part (`+cu128`) takes any; the hashes say which.
        return Version(locked) in {found, Version(found.public)}
    except InvalidVersion:
        return locked == version
