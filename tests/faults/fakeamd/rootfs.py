"""Debian root file systems that carry AMD's SMI library, and the shim compiled against their headers.

In: a `Library` and the host's own apt sources. Out: a folder below build/fakeamd/, made once, then only read.
"""

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
CACHE = HERE.parents[2] / "build" / "fakeamd"
ARCHIVE_VARIABLE = "FAKEAMD_ARCHIVE"
MOUNT_POINT = "stackcheck"  # the folder in the root file system below which folders of the host are bound
PACKAGES = ("amd-smi", "base-files", "coreutils", "libdrm-dev", "python3", "python3-pytest", "util-linux")


class FakeAmdError(Exception):
    """This machine cannot make or enter a fabricated host; the message has the next command."""


@dataclass(frozen=True, kw_only=True)
class Library:
    """One generation of libamd_smi, as a Debian release packages it."""

    release: str  # AMD's number
    suite: str
    python_path: str  # where its Python module lies, when it is not on Python's own path
    metrics_revision: int  # the newest gpu_metrics v1.N that it reads

    @property
    def folder(self) -> Path:
        return CACHE / self.suite


LIBRARIES = (
    Library(release="6.1.2", suite="trixie", python_path="/usr/share/amd_smi", metrics_revision=5),
    Library(release="10.1", suite="forky", python_path="", metrics_revision=8),
)


def library(release: str) -> Library:
    """The generation with AMD's release number `release`."""
    for candidate in LIBRARIES:
        if candidate.release == release:
            return candidate
    raise FakeAmdError(
        f"unknown library {release!r}: expected one of {', '.join(one.release for one in LIBRARIES)}"
    )


def ensure(wanted: Library) -> Path:
    """The root file system of that generation, bootstrapped in seconds when it is not cached."""
    with _locked(wanted.suite):
        if _stamp(wanted.folder) != PACKAGES:
            _bootstrap(wanted)
    return wanted.folder


def shim(wanted: Library) -> Path:
    """The preloaded answers for DRM ioctls, compiled when shim.c is newer."""
    built, source = CACHE / f"shim-{wanted.suite}.so", HERE / "shim.c"
    with _locked(wanted.suite):
        if not built.exists() or built.stat().st_mtime < source.stat().st_mtime:
            headers = wanted.folder / "usr/include/libdrm"
            _run(
                [
                    "gcc",
                    "-shared",
                    "-fPIC",
                    "-O2",
                    "-Wall",
                    "-Wextra",
                    "-Werror",
                    f"-I{headers}",
                    "-o",
                    built,
                    source,
                ]
            )
    return built


def byte_code(wanted: Library) -> Path:
    """A folder in which every run in that generation's root may keep byte code, and finds that of others.

    Python compares it with its source at each start. Whoever runs inside writes there, also another user.
    """
    folder = CACHE / f"bytecode-{wanted.suite}"
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o777)
    return folder


def archive() -> str:
    """The Debian archive that this host's own apt uses, unless $FAKEAMD_ARCHIVE names another."""
    if os.environ.get(ARCHIVE_VARIABLE):
        return os.environ[ARCHIVE_VARIABLE]
    listing = _run(
        ["apt-get", "indextargets", "--format", "$(ORIGIN) $(SUITE) $(SITE)", "Created-By: Packages"]
    )
    for line in listing.splitlines():
        origin, suite, site = line.split(" ", 2)
        if origin == "Debian" and "-" not in suite:  # not …-security, not …-updates
            return site
    raise FakeAmdError(
        f"no Debian archive in this host's apt sources: set {ARCHIVE_VARIABLE} to the address of one"
    )


def _bootstrap(wanted: Library) -> None:
    """Unpack the packages without their maintainer scripts: nothing here needs a configured system."""
    fresh = wanted.folder.with_suffix(".new")
    shutil.rmtree(fresh, ignore_errors=True)
    # Indexes of mirrors and snapshots of testing are often past their expiry date.
    stale = '--aptopt=Acquire::Check-Valid-Until "false"'
    include = f"--include={','.join(PACKAGES)}"
    _run(
        [
            "mmdebstrap",
            "--variant=extract",
            "--format=directory",
            stale,
            include,
            wanted.suite,
            fresh,
            archive(),
        ]
    )
    (fresh / MOUNT_POINT).mkdir()
    _compile_modules(fresh, wanted)
    (fresh / "packages").write_text("\n".join(PACKAGES), encoding="utf-8")
    shutil.rmtree(wanted.folder, ignore_errors=True)
    fresh.rename(wanted.folder)


def _compile_modules(root: Path, wanted: Library) -> None:
    """Python's bytecode for what the suites import: halves the start of every process in there."""
    imports = "import pytest, _pytest.junitxml, amdsmi, json, pickle, uuid, platform, importlib.metadata"
    # A clean environment: the caller's may forbid Python to write bytecode.
    python = ["chroot", root, "env", "-i", f"PYTHONPATH={wanted.python_path}", "/usr/bin/python3"]
    if wanted.python_path:
        _run([*python, "-m", "compileall", "-q", wanted.python_path])
    _run([*python, "-c", imports])


def _stamp(folder: Path) -> tuple[str, ...]:
    stamp = folder / "packages"
    return tuple(stamp.read_text(encoding="utf-8").split()) if stamp.exists() else ()


@contextmanager
def _locked(name: str) -> Iterator[None]:
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(command: list[str | Path]) -> str:
    program = str(command[0])
    if shutil.which(program) is None:
        raise FakeAmdError(f"{program} is not installed; on Debian: apt-get install mmdebstrap gcc")
    done = subprocess.run([str(part) for part in command], check=False, capture_output=True, text=True)
    if done.returncode:
        raise FakeAmdError(f"{program} failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout
