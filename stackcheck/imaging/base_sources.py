"""Where the packages of a bootstrapped base can come from on this host, best first.

In: a suite, the host's apt sources, the site's mirrors. Out: `Way`s; without any, an error with each reason
and the lines to write. Only files are read here: whether an archive answers shows when it is asked.
"""

import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from stackcheck import mirrors
from stackcheck.engine import apt, host_setup
from stackcheck.engine.apt import AptSource, Distribution
from stackcheck.errors import ConfigurationError
from stackcheck.files import openpgp

DISTRIBUTIONS = (apt.DEBIAN,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """One way to get a base's packages.

    Attributes:
        sources: apt's sources; "" for the archive that mmdebstrap itself knows as the distribution's own.
    """

    name: str  # as messages and the provenance name it
    sources: str = ""
    keyring: Path | None = None  # what verifies the packages, where the sources do not say it
    needs: str | None = None  # a package of this host that has to be installed first


def distribution_of(suite: str) -> Distribution:
    """The distribution that has this release.

    Raises:
        ConfigurationError: None that a base can be made of.
    """
    for one in DISTRIBUTIONS:
        if suite in one.releases:
            return one
    known = sorted(name for one in DISTRIBUTIONS for name in one.releases)
    raise ConfigurationError(
        "no base can be made of this suite",
        got=repr(suite),
        expected=f"one of {', '.join(known)}",
        next_step="correct `systems` in matrix.yaml",
    )


def ways(suite: str, os_name: str, mirror: Sequence[str]) -> tuple[Way, ...]:
    """The ways that can work here, in the order in which they are tried.

    Args:
        suite: `bookworm`.
        os_name: As the matrix names the system: `debian12`.
        mirror: What the site's mirrors file has for it, one line a source.

    Raises:
        ConfigurationError: No way can work; the message has each reason, and what to type or write.
    """
    of = distribution_of(suite)
    asked = (_host(of, suite), _mirror(suite, os_name, mirror), _public(of))
    found = tuple(one for one in asked if isinstance(one, Way))
    if found:
        return found
    raise ConfigurationError(
        f"this host has no package archive for a base of {of.name} {suite}",
        where=os_name,
        got="\n    ".join(str(one) for one in asked),
        expected="one of these three",
        next_step=advice(of, suite, os_name),
    )


def prepare(way: Way, report: Callable[[str], None]) -> str | None:
    """Install what a way needs; why it cannot be used after all, or None."""
    if way.needs:
        host_setup.install_packages([way.needs], report, why=f"its keys verify {way.name}")
    if way.keyring and not is_current(way.keyring):
        return f"{way.keyring} has no key that signs its releases today"
    return None


def advice(of: Distribution, suite: str, os_name: str) -> str:
    """What to type, or to write into the mirrors file."""
    file = os.environ.get(mirrors.VARIABLE) or mirrors.default_file()
    keys = f"sudo apt-get install -y {of.keyring_package}"
    if _candidate_too_old(of):  # Ubuntu 22.04: its release has none that knows Debian's keys of today
        keys = f"install {of.keyring_package} {of.keyring_since} or newer, from {of.name}, with dpkg -i"
    parts = (of.name, suite), (of.name, f"{suite}-updates"), (f"{of.name}-security", f"{suite}-security")
    lines = [
        f'          - "deb [signed-by=KEYRING] https://MIRROR/{place} {name} main"' for place, name in parts
    ]
    head = f"{keys}; or name a mirror, in {file}:\n      schema: 1\n      apt:\n        {os_name}:"
    return "\n".join((head, *lines))


def _host(of: Distribution, suite: str) -> Way | str:
    found = apt.archive(of, suite, apt.sources())
    if found:
        return Way(name=_named(f"this host's archive of {of.name}", suite, found), sources=_text(found))
    own = apt.host_release().get("PRETTY_NAME", "an unknown distribution")
    return f"this host's archive: {own}, with no source of {of.name} in {apt.APT}"


def _mirror(suite: str, os_name: str, mirror: Sequence[str]) -> Way | str:
    if not mirror:
        return f"a mirror: none under `apt: {os_name}` of the mirrors file"
    found = apt.one_line_sources("".join(f"{line}\n" for line in mirror))
    if any(suite in source.suites and "main" in source.components for source in found):
        return Way(name=_named("the site's mirror", suite, found), sources=_text(found))
    return f"a mirror: the lines under `apt: {os_name}` have no `{suite} main` for this processor"


def _named(name: str, suite: str, found: Sequence[AptSource]) -> str:
    """The name, which says where a base would lack the fixes of its distribution; the provenance has it."""
    if any(f"{suite}-security" in one.suites and "main" in one.components for one in found):
        return name
    return f"{name}, without security updates"


def _public(of: Distribution) -> Way | str:
    name = f"the public archive of {of.name}"
    if not shutil.which("apt-get"):
        return f"{name}: this host has no apt, with which packages are verified"
    if not of.keyring.is_file():
        too_old = _candidate_too_old(of)
        if too_old:
            return f"{name}: {too_old}"
        if os.geteuid() != 0:
            return f"{name}: {of.keyring} is not there, and only root may install {of.keyring_package}"
        return Way(name=name, keyring=of.keyring, needs=of.keyring_package)
    if not is_current(of.keyring):
        return f"{name}: {of.keyring} is too old: it has no key that signs {of.name} today"
    return Way(name=name, keyring=of.keyring)


def is_current(keyring: Path) -> bool:
    """Whether a keyring has a key that signs a distribution's releases today."""
    try:
        held = openpgp.fingerprints(keyring.read_bytes())
    except (OSError, ValueError):
        return False
    return any(of.keyring == keyring and held & of.signers for of in DISTRIBUTIONS)


def _candidate_too_old(of: Distribution) -> str:
    """Why the keyring package that this host could install would not do; empty if it may do."""
    try:
        shown = subprocess.run(
            ["apt-cache", "show", "--no-all-versions", of.keyring_package],
            capture_output=True,
            errors="replace",
            check=False,
            timeout=30,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    for line in shown.splitlines():
        if line.startswith("Version: ") and _release_of(line) < _release_of(of.keyring_since):
            version = line.removeprefix("Version: ")
            return f"{of.keyring_package} {version} is too old, {of.keyring_since} is needed"
    return ""


def _release_of(text: str) -> tuple[int, ...]:
    """`2021.1` of `Version: 2021.1.1ubuntu2`: the keyring's versions begin with the year."""
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def _text(found: Sequence[AptSource]) -> str:
    return "\n".join(source.text() for source in found)
