"""Base root file systems made from distribution packages, where no image registry can be reached.

In: a suite, a list of packages, the host's own apt sources. Out: `build/bases/<key>.tar`, the same bytes on
every machine that sees the same archive, with nothing of the host in it, and `<key>.json` with its digest and
the version of every package.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from stackcheck.engine import apt, host_setup
from stackcheck.errors import BuildError, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# Times in bases and layers (2026-01-01). One value for all builds, or equal inputs would differ.
SOURCE_DATE_EPOCH = 1767225600
TIMEOUT_S = 900.0
SUITES = frozenset({"bookworm", "trixie", "forky"})
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+(=[A-Za-z0-9.+:~-]+)?")

# Manual pages and translations, which the official slim images leave out too; copyright files stay.
EXCLUDED = (
    "/usr/share/man/*",
    "/usr/share/locale/*",
    "/usr/share/doc/*",
    "/usr/share/info/*",
    "/usr/share/lintian/*",
)
INCLUDED = ("/usr/share/locale/locale.alias", "/usr/share/doc/*/copyright")

# Runs last, in the host's shell with the root as "$1": what would differ between hosts or days goes.
CLEAN = r"""
set -eu
rm -rf "$1"/etc/apt/sources.list "$1"/etc/apt/sources.list.d/* "$1"/etc/apt/apt.conf.d/*stackcheck*
rm -rf "$1"/etc/apt/apt.conf.d/99mmdebstrap "$1"/var/lib/apt/lists "$1"/var/cache/apt "$1"/var/cache/ldconfig
mkdir -p "$1"/var/lib/apt/lists/partial "$1"/var/cache/apt/archives/partial
rm -f "$1"/var/cache/debconf/*-old "$1"/var/lib/dpkg/*-old "$1"/etc/machine-id "$1"/var/lib/dbus/machine-id
find "$1"/var/log -type f -delete
echo localhost > "$1"/etc/hostname
: > "$1"/etc/resolv.conf
""".strip()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selected:
    """Which files of packages a base goes without, as dpkg's patterns: `included` are kept of `excluded`."""

    excluded: tuple[str, ...] = ()
    included: tuple[str, ...] = ()


NOTHING_SELECTED = Selected()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RootFs:
    """A root file system on disk.

    Attributes:
        path: The tar.
        digest: sha256 of the tar, "sha256:…".
        packages: Version of each installed package.
        reused: Whether it existed already.
    """

    path: Path
    digest: str
    packages: Mapping[str, str]
    reused: bool


def key(suite: str, packages: Sequence[str], selected: Selected = NOTHING_SELECTED) -> str:
    """The content hash of everything this module decides about a base."""
    recipe = [suite, sorted(packages), EXCLUDED, INCLUDED, CLEAN, SOURCE_DATE_EPOCH]
    if selected != NOTHING_SELECTED:
        recipe.append(dataclasses.astuple(selected))
    return hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:16]


def bootstrap(
    suite: str,
    packages: Sequence[str],
    folder: Path,
    *,
    selected: Selected = NOTHING_SELECTED,
    report: Callable[[str], None] = print,
) -> RootFs:
    """Make a base, or return the one that was made from the same recipe.

    Raises:
        ConfigurationError: The name of a suite or package is invalid.
        EngineError: mmdebstrap is missing and may not be installed.
        BuildError: The archive could not be reached or a package does not exist.
    """
    _check_names(suite, packages)
    name = key(suite, packages, selected)
    made = load(folder / f"{name}.json", reused=True)
    if made is not None:
        return made
    _need_mmdebstrap(report)
    folder.mkdir(parents=True, exist_ok=True)
    report(f"bootstrapping a {suite} base from this host's package archive")
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=folder) as scratch:
        tar = Path(scratch) / "rootfs.tar"
        _run(_command(suite, packages, selected, tar, Path(scratch)))
        facts = {"suite": suite, "digest": _digest(tar), "packages": installed_packages(tar)}
        tar.rename(folder / f"{name}.tar")
        description = Path(scratch) / "description.json"
        description.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        description.rename(folder / f"{name}.json")  # last: a base without it was not finished
    finished = load(folder / f"{name}.json", reused=False)
    assert finished is not None
    return finished


def load(description: Path, *, reused: bool) -> RootFs | None:
    """The base that a description file is about, or None when either file is not there."""
    tar = description.with_suffix(".tar")
    if not (description.exists() and tar.exists()):
        return None
    facts = json.loads(description.read_text(encoding="utf-8"))
    return RootFs(path=tar, digest=facts["digest"], packages=facts["packages"], reused=reused)


def installed_packages(tar: Path) -> dict[str, str]:
    """Name and version of each installed package, from the tar's own dpkg database."""
    with tarfile.open(tar) as archive:
        status = archive.extractfile("./var/lib/dpkg/status")
        text = status.read().decode("utf-8") if status else ""
    pairs = re.findall(r"^Package: (\S+)$.*?^Version: (\S+)$", text, flags=re.MULTILINE | re.DOTALL)
    return dict(sorted(pairs))


def _check_names(suite: str, packages: Sequence[str]) -> None:
    wrong = [] if suite in SUITES else [suite]
    wrong += [package for package in packages if not _PACKAGE.fullmatch(package)]
    if wrong:
        raise ConfigurationError(
            "invalid name of a suite or package for a bootstrapped base",
            got=", ".join(repr(name) for name in wrong),
            expected=f"a suite of {', '.join(sorted(SUITES))}, and package names or name=version",
            next_step="correct `systems` or `system_packages` in matrix.yaml",
        )


def _need_mmdebstrap(report: Callable[[str], None]) -> None:
    if not shutil.which("mmdebstrap"):
        host_setup.install_packages(["mmdebstrap"], report, why="it makes base images from packages")


def _command(suite: str, packages: Sequence[str], selected: Selected, tar: Path, scratch: Path) -> list[str]:
    """The sources and settings of the host serve the run only: CLEAN removes them from the root."""
    conf = scratch / "90stackcheck"
    conf.write_text("".join(f"{line}\n" for line in apt.options()), encoding="utf-8")
    sources = scratch / "stackcheck.sources"
    sources.write_text(_sources_text(suite), encoding="utf-8")
    return [
        *("mmdebstrap", "--variant=minbase", f"--include={','.join(sorted(packages))}"),
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in (*EXCLUDED, *selected.excluded)),
        *(f"--dpkgopt=path-include={pattern}" for pattern in (*INCLUDED, *selected.included)),
        f'--setup-hook=mkdir -p "$1"/etc/apt/apt.conf.d && cp {conf} "$1"/etc/apt/apt.conf.d/90stackcheck',
        f"--customize-hook={CLEAN}",
        *("--skip=cleanup/apt/lists,cleanup/apt/cache", suite, str(tar), str(sources)),
    ]


def _sources_text(suite: str) -> str:
    """The archive for this suite with its updates, and the security archive where the host has one."""
    main = apt.for_suite(suite)
    stanzas = [dataclasses.replace(main, suites=(suite, f"{suite}-updates")).text()]
    own = apt.host_release().get("VERSION_CODENAME", "")
    for source in apt.sources():
        if f"{own}-security" in source.suites:
            security = dataclasses.replace(source, suites=(f"{suite}-security",), components=("main",))
            stanzas.append(security.text())
    return "\n".join(stanzas)


def _run(command: list[str]) -> None:
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(SOURCE_DATE_EPOCH), "LC_ALL": "C.UTF-8"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError("the base image could not be bootstrapped", got=str(error)) from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if not line.startswith("I:")][-12:]
        raise BuildError(
            "the base image could not be bootstrapped",
            where=f"mmdebstrap, exit code {done.returncode}",
            got="\n    ".join(lines),
            expected="a package archive that has this suite and these packages",
            next_step="check this host's sources in /etc/apt with: apt-get update",
        )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
