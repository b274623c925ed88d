"""What a night sees of its host: a fingerprint, its changes in words, a driver that waits for a reboot."""

from typing import Any

import pytest

from stackcheck import vendors
from stackcheck.nightly import fingerprint
from stackcheck.nightly.fingerprint import Fingerprint
from stackcheck.vendors import kernel_module
from stackcheck.vendors.kernel_module import DriverModule, ModuleVersion


def version(text: str | None, srcversion: str | None) -> ModuleVersion:
    return ModuleVersion(version=text, srcversion=srcversion)


def module(loaded: ModuleVersion | None, installed: ModuleVersion | None) -> DriverModule:
    return DriverModule(name="amdgpu", loaded=loaded, installed=installed)


@pytest.mark.parametrize(
    ("loaded", "installed", "pending"),
    [
        (version("6.14", "A"), version("6.14", "A"), False),
        (version("6.14", "A"), version("6.16", "B"), True),
        (version("6.14", "A"), version("6.14", "B"), True),  # built again from other sources
        (version(None, "A"), version(None, "B"), True),  # a kernel's own module
        (version(None, "A"), version(None, "A"), False),
        (version("580.1", None), version("580.2", None), True),
        (version("6.14", "A"), version("6.14", None), False),
        (version("6.14", "A"), None, False),  # not known, which the night says
        (None, version("6.14", "A"), False),  # not loaded, which the night says
    ],
)
def test_a_reboot_is_pending_when_the_running_module_is_not_the_installed_one(loaded, installed, pending):
    assert module(loaded, installed).reboot_pending is pending


def test_a_host_without_modinfo_does_not_know_and_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_module.shutil, "which", lambda *_a, **_k: None)
    monkeypatch.setattr(kernel_module, "SYS_MODULES", tmp_path)
    found = kernel_module.read("amdgpu")
    assert (found.loaded, found.installed, found.reboot_pending) == (None, None, False)
    assert "apt-get install kmod" in found.unknown


def test_the_running_module_is_read_from_sysfs(tmp_path, monkeypatch):
    (tmp_path / "amdgpu").mkdir()
    (tmp_path / "amdgpu/srcversion").write_text("ABCD\n")
    monkeypatch.setattr(kernel_module, "SYS_MODULES", tmp_path)
    assert kernel_module.read("amdgpu").loaded == version(None, "ABCD")


def test_each_vendor_names_its_module_and_a_processor_has_none():
    names = {vendor: vendors.module(vendor).kernel_module() for vendor in ("amd", "nvidia", "cpu")}
    assert names == {"amd": "amdgpu", "nvidia": "nvidia", "cpu": None}
    assert vendors.driver_module("cpu") is None


def of(**changes: Any) -> Fingerprint:
    device = {"model": "MI300X", "id": "a", "firmware": "1", "power_cap_w": 750.0}
    fields = {
        "vendor": "amd",
        "devices": (device,),
        "driver": "6.14.5",
        "srcversion": "A",
        "kernel": "6.8",
        "partition": "SPX/NPS1",
        "nvls": "unavailable",
    }
    return Fingerprint.model_validate(fields | changes)


DEVICE = {"model": "MI300X", "id": "a", "firmware": "1", "power_cap_w": 750.0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ()),
        ({"driver": "6.16", "srcversion": "B"}, ("driver 6.14.5 -> 6.16",)),
        ({"srcversion": "B"}, ("srcversion of the driver A -> B",)),
        ({"kernel": "6.11"}, ("kernel 6.8 -> 6.11",)),
        ({"partition": None}, ("partition SPX/NPS1 -> none",)),
        ({"devices": (DEVICE | {"firmware": "2"},)}, ("firmware 1 x1 -> 2 x1",)),
        ({"devices": (DEVICE | {"power_cap_w": 600.0},)}, ("power cap in W 750 x1 -> 600 x1",)),
        ({"devices": (DEVICE | {"id": "b"},)}, ("1 devices are new in this host",)),
        ({"devices": (DEVICE, DEVICE)}, ("devices MI300X x1 -> MI300X x2",)),
    ],
)
def test_every_change_of_a_host_is_said_in_words(changes, words):
    found = fingerprint.changes(of(), of(**changes))
    assert found[: len(words) or 1] == words


def test_a_fingerprint_survives_its_file():
    assert Fingerprint.model_validate_json(of().model_dump_json()) == of()


def test_the_fingerprint_of_this_host_is_of_the_host_that_the_suites_see():
    host = vendors.host("cpu")
    found = fingerprint.of_host(host, None)
    assert (found.kernel, found.device_model, found.driver) == (host.kernel, "CPU", None)
    assert tuple(fingerprint.configuration_changes(host.as_json(), found.model_dump())) == ()
