"""What a host sees of its devices by itself: the slowest link, GPUs in no list, devices that are gone."""

import types
from pathlib import Path

import pytest

from stackcheck import vendors
from stackcheck.vendors import Host, HostDevice, amd, cpu, nvidia, seen
from stackcheck.vendors.seen import HostLink
from vendors import amd_kernel

PORT, GPU, OTHER = "0000:00:01.0", "0000:1b:00.0", "0000:1f:00.0"
SPEEDS = {
    1: "2.5 GT/s PCIe",
    3: "8.0 GT/s PCIe",
    4: "16.0 GT/s PCIe",
    5: "32.0 GT/s PCIe",
    6: "64.0 GT/s PCIe",
}


def device(name: str) -> HostDevice:
    return HostDevice(model="H200", arch="sm_90", id=name, memory_bytes=141)


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two GPUs, of which the driver lists the first, behind one port each; a third device is no GPU."""
    for address, kind in ((GPU, "0x030200"), (OTHER, "0x030200"), ("0000:20:00.0", "0x020000")):
        folder = tmp_path / "devices/pci0000:00" / PORT / address
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x10de\n")
        (folder / "class").write_text(f"{kind}\n")
        bus = tmp_path / "bus/pci/devices"
        bus.mkdir(parents=True, exist_ok=True)
        (bus / address).symlink_to(folder)
    monkeypatch.setattr(seen, "SYS", tmp_path)
    monkeypatch.setattr(amd_kernel, "SYS", tmp_path)
    return tmp_path / "devices/pci0000:00"


def look(monkeypatch: pytest.MonkeyPatch, *now: str) -> seen.Seen:
    """What is seen now of a host that had the devices a and b."""
    backend = types.SimpleNamespace(
        devices=lambda: tuple(map(device, now)), addresses=lambda: {name: GPU for name in now if name == "a"}
    )
    monkeypatch.setattr(vendors, "module", lambda _vendor: backend)
    had = Host(
        vendor="nvidia",
        devices=(device("a"), device("b")),
        driver="580",
        kernel="6.1",
        partition=None,
        nvls="on",
        cpu="x",
        memory_bytes=1,
    )
    return seen.look(had)


def write(folder: Path, width: int, now: int, most: int) -> None:
    (folder / "current_link_width").write_text(f"{width}\n")
    (folder / "current_link_speed").write_text(SPEEDS[now] + "\n")
    (folder / "max_link_speed").write_text(SPEEDS[most] + "\n")


@pytest.mark.parametrize(
    ("of_gpu", "of_port", "expected"),
    [
        ((16, 5, 5), (16, 5, 5), HostLink(width=16, generation=5, max_generation=5)),
        (
            (16, 5, 5),
            (8, 5, 5),
            HostLink(width=8, generation=5, max_generation=5),
        ),  # a card's own switch is wide
        ((4, 5, 5), (16, 5, 5), HostLink(width=4, generation=5, max_generation=5)),
        (
            (16, 1, 5),
            (16, 1, 4),
            HostLink(width=16, generation=1, max_generation=4),
        ),  # idle, in an older slot
        ((16, 4, 6), (16, 3, 6), HostLink(width=16, generation=3, max_generation=6)),
    ],
)
def test_the_slowest_port_on_the_way_decides(
    sysfs: Path,
    monkeypatch: pytest.MonkeyPatch,
    of_gpu: tuple[int, int, int],
    of_port: tuple[int, int, int],
    expected: HostLink,
) -> None:
    write(sysfs / PORT, *of_port)
    write(sysfs / PORT / GPU, *of_gpu)
    found = look(monkeypatch, "a", "b")
    assert found.links == (expected, None)  # nothing tells where the second is
    assert found.memory_bytes == (141, 141)
    assert amd_kernel.slot_generation(GPU) == of_port[2]  # the suites read slots from the same files


def test_a_machine_that_shows_no_links_tells_nothing_of_them(
    sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sysfs / PORT / GPU / "current_link_speed").write_text("Unknown\n")
    assert look(monkeypatch, "a", "b").links == (None, None)
    assert amd_kernel.slot_generation(GPU) is None


def test_gpus_that_no_list_has_and_devices_that_are_gone(
    sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sysfs.is_dir()
    assert look(monkeypatch, "a", "b").unlisted == (OTHER,)
    assert look(monkeypatch, "a", "b").gone == ()
    assert look(monkeypatch, "a").gone == ("b",)
    assert look(monkeypatch).gone == ("a", "b")


@pytest.mark.parametrize("backend", [amd, nvidia, cpu], ids=lambda module: module.__name__)
def test_each_vendor_gives_addresses_of_its_devices(backend: types.ModuleType) -> None:
    known = {one.id for one in backend.devices()}
    assert set(backend.addresses()) <= known


def test_a_gpu_that_fell_off_its_bus_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = nvidia.pynvml.NVMLError_GpuIsLost

    def uuid(handle: int) -> str:
        if handle == 1:
            raise lost
        return f"GPU-{handle}"

    monkeypatch.setattr(nvidia.pynvml, "nvmlDeviceGetCount", lambda: 3)
    monkeypatch.setattr(nvidia.pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(nvidia.pynvml, "nvmlDeviceGetUUID", uuid)
    monkeypatch.setattr(nvidia.pynvml, "nvmlDeviceGetMemoryInfo", lambda _handle: None)
    assert nvidia._handles() == [0, 2]
