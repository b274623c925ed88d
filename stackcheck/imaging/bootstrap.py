"""Base root file systems made from distribution packages, where no image registry can be reached.

In: a suite, a list of packages, the ways to get them (`base_sources`). Out: `build/bases/<key>.tar`, the same
bytes on every machine that sees the same archive, with nothing of the host in it, and `<key>.json` with its
digest, the version of every package and where they came from.
"""

import dataclasses
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stackcheck.engine import apt, host_setup
from stackcheck.errors import BuildError, ConfigurationError, EngineError
from stackcheck.files import dpkg_status, users
from stackcheck.files.digest import sha256_of
from stackcheck.imaging import base_sources
from stackcheck.imaging.base_sources import Way

# Times in bases and layers (2026-01-01). One value for all builds, or equal inputs would differ.
SOURCE_DATE_EPOCH = 1767225600
TIMEOUT_S = 900.0
SUBORDINATE_IDS = Path("/etc/subuid")
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
# mmdebstrap copies hostname and resolv.conf with the modes that they have on the host: here one mode for all
# hosts, the one that certified bases have.
CLEAN = r"""
set -eu
umask 022
rm -rf "$1"/etc/apt/sources.list "$1"/etc/apt/sources.list.d/* "$1"/etc/apt/apt.conf.d/*stackcheck*
rm -rf "$1"/etc/apt/apt.conf.d/99mmdebstrap "$1"/var/lib/apt/lists "$1"/var/cache/apt "$1"/var/cache/ldconfig
mkdir -p "$1"/var/lib/apt/lists/partial "$1"/var/cache/apt/archives/partial
rm -f "$1"/var/cache/debconf/*-old "$1"/var/lib/dpkg/*-old "$1"/etc/machine-id "$1"/var/lib/dbus/machine-id
find "$1"/var/log -type f -delete
echo localhost > "$1"/etc/hostname
: > "$1"/etc/resolv.conf
chmod 755 "$1"/etc/hostname "$1"/etc/resolv.conf
""".strip()

# What of the user's environment reaches the packages' scripts: else a base would differ from host to host.
PASSED_ON = (
    *("PATH", "HOME", "TMPDIR", "USER", "LOGNAME"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "all_proxy"),
)
FIXED = {
    "SOURCE_DATE_EPOCH": str(SOURCE_DATE_EPOCH),
    "LC_ALL": "C.UTF-8",
    # Python would write byte code with times while packages are set up, beside what they compile themselves.
    "PYTHONDONTWRITEBYTECODE": "1",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selected:
    """Which files of packages a base goes without, as dpkg's patterns: `included` are kept of `excluded`."""

    excluded: tuple[str, ...] = ()
    included: tuple[str, ...] = ()


NOTHING_SELECTED = Selected()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RootFs:
    """A root file system on disk."""

    path: Path
    digest: str  # sha256 of the tar, "sha256:…"
    packages: Mapping[str, str]  # version of each installed package
    reused: bool  # whether it existed already
    way: str = ""  # where the packages came from; empty for a base that an older release made


def key(suite: str, packages: Sequence[str], selected: Selected = NOTHING_SELECTED) -> str:
    """The content hash of everything this module decides about a base."""
    recipe = [suite, sorted(packages), EXCLUDED, INCLUDED, CLEAN, FIXED]
    if selected != NOTHING_SELECTED:
        recipe.append(dataclasses.astuple(selected))
    return hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:16]


def bootstrap(
    suite: str,
    packages: Sequence[str],
    folder: Path,
    *,
    os_name: str = "",
    mirror: Sequence[str] = (),
    selected: Selected = NOTHING_SELECTED,
    report: Callable[[str], None] = print,
) -> RootFs:
    """Make a base, or return the one that was made from the same recipe, without the `selected` files.

    `mirror` is what the site's mirrors file has for the system, one line a source.

    Raises:
        ConfigurationError: The name of a suite or package is invalid, or no archive is known here.
        EngineError: mmdebstrap or a part of it is missing and may not be installed.
        BuildError: No archive gave the base, or a package does not exist.
    """
    _check_names(packages)
    name = key(suite, packages, selected)
    made = load_root_fs(folder / f"{name}.json", reused=True)
    if made is not None:
        return made
    found = ready(suite, os_name, mirror)
    if not shutil.which("mmdebstrap"):
        host_setup.install_packages(["mmdebstrap"], report, why="it makes base images from packages")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=folder) as scratch:
        tar = Path(scratch) / "rootfs.tar"
        way = _make(found, lambda way: _command(suite, packages, selected, tar, way), report)
        facts = {
            "suite": suite,
            "digest": "sha256:" + sha256_of(tar),
            "packages": installed_packages(tar),
            "way": way.name,
        }
        tar.rename(folder / f"{name}.tar")
        description = Path(scratch) / "description.json"
        description.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        description.rename(folder / f"{name}.json")  # last: a base without it was not finished
    finished = load_root_fs(folder / f"{name}.json", reused=False)
    assert finished is not None
    return finished


def ready(suite: str, os_name: str, mirror: Sequence[str]) -> tuple[Way, ...]:
    """The ways to make a base on this host; asks files only.

    Raises:
        EngineError: This user can neither run mmdebstrap nor install what it lacks.
    """
    found = base_sources.ways(suite, os_name, mirror)
    if os.geteuid() == 0:
        return found
    lacking = [
        package
        for program, package in (("mmdebstrap", "mmdebstrap"), ("newuidmap", "uidmap"))
        if not shutil.which(program)
    ]
    if lacking:
        raise EngineError(
            f"{' and '.join(lacking)} is not installed, and only root may install it",
            expected="what makes base images from packages, without root in a user namespace",
            next_step=f"sudo apt-get install -y {' '.join(lacking)}",
        )
    user = users.name()
    if not _has_subordinate_ids(user):
        raise EngineError(
            "this user has no subordinate ids, with which mmdebstrap works without root",
            where=str(SUBORDINATE_IDS),
            got=f"no line for {user}",
            next_step=f"sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {user}",
        )
    return found


def _has_subordinate_ids(user: str) -> bool:
    try:
        lines = SUBORDINATE_IDS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    return any(line.split(":")[0] in {user, str(os.geteuid())} for line in lines)


def _make(found: Sequence[Way], command: Callable[[Way], list[str]], report: Callable[[str], None]) -> Way:
    """Run the first way that gives the base; the way it was."""
    failed: list[str] = []
    for way in found:
        report(f"bootstrapping a base from {way.name}: usually 20 to 60 s")
        problem = base_sources.prepare(way, report) or _run(command(way))
        if problem is None:
            return way
        failed.append(f"{way.name}: {problem}")
        report(f"{way.name} did not give the base: {problem.splitlines()[-1].strip()}")
    raise BuildError(
        "the base image could not be bootstrapped",
        where="mmdebstrap",
        got="\n    ".join(failed),
        expected="a package archive that has this suite and these packages",
        next_step="check this host's sources in /etc/apt with: apt-get update; "
        "or name a mirror (docs/guides/building.md, “Hosts”)",
    )


def load_root_fs(description: Path, *, reused: bool) -> RootFs | None:
    """The base that a description file is about, or None when either file is not there, or another tar is."""
    tar = description.with_suffix(".tar")
    if not (description.exists() and tar.exists()):
        return None
    facts = json.loads(description.read_text(encoding="utf-8"))
    status = tar.stat()
    if facts["digest"] != _digest_once(tar, (status.st_ino, status.st_size, status.st_mtime_ns)):
        return None  # damaged or exchanged: it is made again
    return RootFs(
        path=tar, digest=facts["digest"], packages=facts["packages"], reused=reused, way=facts.get("way", "")
    )


def installed_packages(tar: Path) -> dict[str, str]:
    """Name and version of each installed package, from the tar's own dpkg database."""
    with tarfile.open(tar) as archive:
        status = archive.extractfile("./var/lib/dpkg/status")
        text = status.read().decode("utf-8") if status else ""
    return dict(sorted((fields["Package"], fields["Version"]) for fields, _ in dpkg_status.installed(text)))


def _check_names(packages: Sequence[str]) -> None:
    wrong = [package for package in packages if not _PACKAGE.fullmatch(package)]
    if wrong:
        raise ConfigurationError(
            "invalid name of a package for a bootstrapped base",
            got=", ".join(repr(name) for name in wrong),
            expected="package names or name=version",
            next_step="correct `system_packages` in matrix.yaml",
        )


def _command(suite: str, packages: Sequence[str], selected: Selected, tar: Path, way: Way) -> list[str]:
    """The sources and settings of the host serve the run only: CLEAN removes them from the root."""
    command = ["mmdebstrap", "--variant=minbase", f"--include={','.join(sorted(packages))}"]
    if os.geteuid() != 0:
        command.append("--mode=unshare")
    if way.keyring:
        command.append(f"--keyring={way.keyring}")
    command += [f"--dpkgopt=path-exclude={pattern}" for pattern in (*EXCLUDED, *selected.excluded)]
    command += [f"--dpkgopt=path-include={pattern}" for pattern in (*INCLUDED, *selected.included)]
    settings = tar.with_name("stackcheck.conf")  # in a file: a proxy's address may hold a password
    settings.write_text("".join(f"{line}\n" for line in (*apt.options(), *apt.logins())), encoding="utf-8")
    command.append(f"--aptopt={settings}")
    command += [f"--customize-hook={CLEAN}", "--skip=cleanup/apt/lists,cleanup/apt/cache", suite, str(tar)]
    if way.sources:
        sources = tar.with_name("stackcheck.sources")
        sources.write_text(way.sources, encoding="utf-8")
        command.append(str(sources))
    return command


def _run(command: list[str]) -> str | None:
    """Why it failed, or None."""
    environment = {**{name: os.environ[name] for name in PASSED_ON if name in os.environ}, **FIXED}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            errors="replace",
            check=False,
            env=environment,
            umask=0o022,
            timeout=TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if not done.returncode:
        return None
    lines = [line for line in done.stderr.splitlines() if not line.startswith("I:")][-12:]
    return "\n    ".join([f"exit code {done.returncode}", *map(apt.without_login, lines)])


@functools.lru_cache(maxsize=64)
def _digest_once(path: Path, _state: tuple[int, int, int]) -> str:
    """The digest of a file; many stacks of a build name one base."""
    return "sha256:" + sha256_of(path)
