"""The running and the installed driver module, by the real depmod and modinfo on modules compiled here."""

import platform
import subprocess
from pathlib import Path

import pytest

from stackcheck.vendors import kernel_module
from stackcheck.vendors.kernel_module import ModuleVersion

pytestmark = pytest.mark.integration

SOURCE = """
#define INFO(name, text) static const char name[] __attribute__((section(".modinfo"), used)) = text
INFO(license, "license=GPL and additional rights");
INFO(version, "version={version}");
INFO(srcversion, "srcversion={srcversion}");
INFO(vermagic, "vermagic={kernel} SMP mod_unload");
INFO(name, "name=amdgpu");
"""


class Machine:
    """A folder like / with one module in it, and its sysfs."""

    def __init__(self, folder: Path, depmod: Path) -> None:
        self.base = folder / "base"
        self.sys = folder / "sys"
        self.depmod = depmod
        self.folder = self.base / "lib/modules" / platform.release()
        (self.folder / "updates/dkms").mkdir(parents=True)
        (self.sys / "amdgpu").mkdir(parents=True)

    def install(self, version: str, srcversion: str) -> None:
        """As DKMS does: the module's file, then depmod."""
        source = self.base / "amdgpu.c"
        source.write_text(SOURCE.format(version=version, srcversion=srcversion, kernel=platform.release()))
        module = self.folder / "updates/dkms/amdgpu.ko"
        subprocess.run(["gcc", "-c", "-o", module, source], check=True)
        subprocess.run([self.depmod, "-b", self.base, platform.release()], check=True)

    def load(self, version: str, srcversion: str) -> None:
        (self.sys / "amdgpu/version").write_text(version + "\n")
        (self.sys / "amdgpu/srcversion").write_text(srcversion + "\n")


@pytest.fixture
def machine(tmp_path, kmod: Path, monkeypatch) -> Machine:
    made = Machine(tmp_path, kmod / "depmod")
    monkeypatch.setattr(kernel_module, "BASE", made.base)
    monkeypatch.setattr(kernel_module, "SYS_MODULES", made.sys)
    return made


def test_the_installed_module_is_the_one_that_depmod_lists(machine):
    machine.install("6.16.6", "0B0B0B0B")
    machine.load("6.16.6", "0B0B0B0B")
    found = kernel_module.read("amdgpu")
    assert found.installed == ModuleVersion(version="6.16.6", srcversion="0B0B0B0B")
    assert (found.loaded, found.unknown, found.reboot_pending) == (found.installed, "", False)


def test_a_module_that_was_installed_since_the_boot_waits_for_a_reboot(machine):
    machine.install("6.14.5", "0A0A0A0A")
    machine.load("6.14.5", "0A0A0A0A")
    before = (machine.folder / "modules.dep").stat().st_mtime_ns
    assert not kernel_module.read("amdgpu").reboot_pending
    machine.install("6.16.6", "0B0B0B0B")
    assert kernel_module.read("amdgpu").reboot_pending
    # What the path unit of `stackcheck nightly install --systemd` watches.
    assert (machine.folder / "modules.dep").stat().st_mtime_ns > before


def test_a_module_that_is_not_installed_is_not_known_and_says_why(machine):
    machine.install("6.14.5", "0A0A0A0A")
    found = kernel_module.read("nvidia")
    assert (found.installed, found.reboot_pending) == (None, False)
    assert "nvidia not found" in found.unknown
