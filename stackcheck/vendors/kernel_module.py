"""A driver's kernel module: the one that runs, and the one that is installed for the next boot or reload.

In: a module's name, sysfs, and modinfo (from kmod), which reads what depmod has written. Out: `DriverModule`.

A package manager replaces the module's file at once, and the kernel runs the old one until it is loaded
again. A test in between would be about the old driver, although the packages say the new one.
"""

import dataclasses
import os
import platform
import shutil
import subprocess
from pathlib import Path

SYS_MODULES = Path("/sys/module")
BASE = Path("/")  # below it is lib/modules/<kernel>
TIMEOUT_S = 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleVersion:
    """Which build of a module: those of a kernel's own tree have no version, only a hash of their source."""

    version: str | None
    srcversion: str | None

    def __str__(self) -> str:
        """The module's name and version in words."""
        return " ".join(
            part for part in (self.version, self.srcversion and f"(srcversion {self.srcversion})") if part
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DriverModule:
    """A driver's module on this host."""

    name: str  # amdgpu, nvidia
    loaded: ModuleVersion | None  # what the kernel runs; None if the module is not loaded
    installed: ModuleVersion | None  # what the next boot or reload takes; None if that cannot be read
    unknown: str = ""  # why `installed` cannot be read; empty if it can

    @property
    def reboot_pending(self) -> bool:
        """Whether a different build is installed than the one that runs."""
        if self.loaded is None or self.installed is None:
            return False
        pairs = (
            (self.loaded.srcversion, self.installed.srcversion),
            (self.loaded.version, self.installed.version),
        )
        return any(runs != waits for runs, waits in pairs if runs and waits)


def read(name: str) -> DriverModule:
    """The state of one module on this host."""
    installed, unknown = _installed(name, platform.release())
    return DriverModule(name=name, loaded=_loaded(name), installed=installed, unknown=unknown)


def _loaded(name: str) -> ModuleVersion | None:
    folder = SYS_MODULES / name
    if not folder.is_dir():
        return None
    return ModuleVersion(version=text(folder / "version"), srcversion=text(folder / "srcversion"))


def _installed(name: str, kernel: str) -> tuple[ModuleVersion | None, str]:
    """What modinfo says of the file that modprobe would load, or why it says nothing."""
    program = shutil.which("modinfo", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if program is None:
        return None, "modinfo is not installed (Debian and Ubuntu: apt-get install kmod)"
    done = subprocess.run(
        [program, "-b", str(BASE), "-k", kernel, name],
        capture_output=True,
        errors="replace",
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        return None, (done.stderr.strip() or f"modinfo ended with {done.returncode}").splitlines()[0]
    pairs = (line.partition(":") for line in done.stdout.splitlines())
    fields = {key.strip(): value.strip() for key, _, value in pairs}
    found = ModuleVersion(version=fields.get("version"), srcversion=fields.get("srcversion"))
    return found, "" if str(found) else f"{name} has neither version nor srcversion"


def text(path: Path) -> str | None:
    """What a file of the kernel holds, without the white space around it; None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
