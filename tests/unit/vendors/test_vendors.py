"""A fingerprint names devices without revealing them; what a host sees of its devices by itself."""

import contextlib
import dataclasses
import types
from pathlib import Path

import pytest

from stackcheck import vendors
from stackcheck.errors import ConfigurationError
from stackcheck.matrix import resolve
from stackcheck.vendors import Host, HostDevice, amd, cpu, environment, nvidia, seen
from stackcheck.vendors.seen import HostLink
from vendors import amd_kernel


@pytest.fixture
def amd_host(tmp_path, monkeypatch) -> Path:
    """One processor node and one MI300X as KFD and DRM show them."""
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for name, text in {"0": "simd_count 0\n", "1": GPU_NODE}.items():
        (nodes / name).mkdir(parents=True)
        (nodes / name / "properties").write_text(text, encoding="utf-8")
    card = tmp_path / "sys/class/drm/renderD128/device"
    (card / "hwmon/hwmon3").mkdir(parents=True)
    for name, text in CARD.items():
        (card / name).write_text(text + "\n", encoding="utf-8")
    (tmp_path / "sys/module/amdgpu").mkdir(parents=True)
    (tmp_path / "sys/module/amdgpu/version").write_text("6.10.5\n", encoding="utf-8")
    (tmp_path / "dev/dri").mkdir(parents=True)
    (tmp_path / "dev/kfd").touch()
    (tmp_path / "dev/dri/renderD128").touch()
    monkeypatch.setattr(amd, "SYS", tmp_path / "sys")
    monkeypatch.setattr(amd, "DEV", tmp_path / "dev")
    return tmp_path


GPU_NODE = "simd_count 1216\ngfx_target_version 90402\ndevice_id 29857\ndrm_render_minor 128\nunique_id 77\n"
CARD = {
    "mem_info_vram_total": str(192 * 2**30),
    "unique_id": "deadbeef01234567",
    "vbios_version": "113-M3000100-103",
    "current_compute_partition": "SPX",
    "current_memory_partition": "NPS1",
    "hwmon/hwmon3/power1_cap": "750000000",
}


def test_an_amd_gpu_is_read_from_sysfs_with_units(amd_host):
    (device,) = amd.devices()
    assert (device.arch, device.memory_bytes, device.power_cap_w) == ("gfx942", 192 * 2**30, 750.0)
    assert amd.driver() == "6.10.5"
    assert amd.partition() == "SPX/NPS1"
    assert amd_host.exists()


def test_a_uuid_never_leaves_the_host(amd_host):
    (device,) = amd.devices()
    assert CARD["unique_id"] not in device.id
    assert amd_host.exists()


def test_an_amd_gpu_has_the_id_that_the_suites_see_in_the_container(amd_host):
    """HIP, ROCr and harness/resultfile.py write 77 so, before they hash it."""
    (device,) = amd.devices()
    assert device.id == vendors.anonymous_id("GPU-000000000000004d")
    assert amd_host.exists()


def test_each_variable_that_a_vendor_names_is_known_to_hide_devices():
    named = [name for vendor in ("amd", "nvidia", "cpu") for name in vendors.module(vendor).visibility()]
    assert {"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"} <= set(named)
    assert all(vendors.hides_devices(name) for name in named)
    assert not vendors.hides_devices("CUDA_DEVICE_ORDER")


@pytest.mark.parametrize("opened", [(), (129,), (128, 130), (128, 129, 130)])
def test_amd_nodes_are_those_of_the_gpus_whose_properties_the_kernel_shows(amd_host, opened):
    """It refuses to read those that a container or a job may not open; their nodes in /dev may be there."""
    nodes = amd_host / "sys/class/kfd/kfd/topology/nodes"
    for number, minor in enumerate((128, 129, 130), 1):
        (amd_host / f"dev/dri/renderD{minor}").touch()
        properties = nodes / str(number) / "properties"
        properties.parent.mkdir(exist_ok=True)
        properties.unlink(missing_ok=True)
        if minor in opened:
            properties.write_text(GPU_NODE.replace("128", str(minor)), encoding="utf-8")
        else:
            properties.mkdir()  # no user can read it, root neither
    (amd_host / "dev/dri/renderD131").touch()  # of another vendor's card
    render = (f"dev/dri/renderD{minor}" for minor in opened)
    assert amd.container_needs().devices == tuple(str(amd_host / one) for one in ("dev/kfd", *render))


@pytest.mark.parametrize(
    ("version", "arch", "kept"),
    [
        (None, 90402, True),
        ("0x000000a8", 90402, True),
        ("0x000000b0", 90402, True),
        ("0x000000b1", 90402, False),
        ("0x000000c0", 90402, False),
        ("0x00000020", 90010, False),
        ("0x0000002c", 90500, False),
    ],
)
def test_scratch_is_kept_by_the_firmware_of_an_mi300(amd_host, version, arch, *, kept):
    for file in (amd_host / "sys").rglob("properties"):
        text = file.read_text(encoding="utf-8")
        file.write_text(
            text.replace("gfx_target_version 90402", f"gfx_target_version {arch}"), encoding="utf-8"
        )
    if version is not None:
        folder = amd_host / "sys/class/drm/renderD128/device/fw_version"
        folder.mkdir()
        (folder / "mec_fw_version").write_text(f"{version}\n", encoding="utf-8")
    assert dict(amd.container_needs().env) == ({"HSA_NO_SCRATCH_RECLAIM": "1"} if kept else {})


def test_a_host_without_kfd_has_no_amd_device(tmp_path, monkeypatch):
    monkeypatch.setattr(amd, "SYS", tmp_path)
    assert not amd.present()
    assert amd.driver() is None


def test_two_vendors_on_one_host_have_to_be_named(monkeypatch):
    monkeypatch.setattr(amd, "present", lambda: True)
    monkeypatch.setattr(nvidia, "present", lambda: True)
    with pytest.raises(ConfigurationError, match="two vendors"):
        vendors.detect()


def test_a_new_driver_changes_the_fingerprint_and_grown_memory_does_not():
    host = vendors.host("cpu")
    assert dataclasses.replace(host, memory_bytes=1).digest() == host.digest()
    assert dataclasses.replace(host, driver="580.1").digest() != host.digest()


def test_the_processor_stands_in_as_one_device_of_model_cpu():
    assert [device.model for device in cpu.devices()] == ["CPU"]


# Which of AMD's variables an image sets, and that each has a source; no other vendor has any.

STACKS = resolve.load_stacks(Path(__file__).resolve().parents[3])


@pytest.mark.parametrize(
    ("torch", "archs", "expected"),
    [
        ("2.13.0", ["gfx942"], {"HIP_FORCE_DEV_KERNARG", "ROCBLAS_USE_HIPBLASLT"}),
        ("2.13.0", ["gfx90a", "gfx942"], {"HIP_FORCE_DEV_KERNARG"}),
        (
            "2.9.1",
            ["gfx942", "gfx950"],
            {"HIP_FORCE_DEV_KERNARG", "ROCBLAS_USE_HIPBLASLT", "DISABLE_ADDMM_CUDA_LT"},
        ),
        ("2.12.1", ["gfx90a"], {"HIP_FORCE_DEV_KERNARG"}),
    ],
)
def test_an_image_sets_what_belongs_to_its_torch_and_architectures(torch, archs, expected):
    assert set(environment.of_image("amd", torch, archs)) == expected


def test_what_amds_recipes_set_differently_is_left_to_the_job():
    left = {one.name for one in environment.variables("amd") if len(one.values) > 1}
    assert left
    assert all(not left & set(stack.env) for stack in STACKS)


def test_every_row_has_a_source_and_the_matrix_may_overrule_it():
    assert all(one.source and one.because for one in environment.variables("amd"))
    assert all(one.source and one.note for one in environment.names("amd"))
    assert all(
        "HIP_FORCE_DEV_KERNARG" in stack.env for stack in STACKS if stack.vendor == "amd" and stack.torch
    )


def test_no_other_vendor_and_no_stack_without_torch_gets_any():
    assert environment.variables("nvidia") == environment.variables("cpu") == ()
    names = {one.name for one in environment.variables("amd")}
    others = [stack for stack in STACKS if stack.vendor != "amd" or stack.torch is None]
    assert all(not names & set(stack.env) for stack in others)


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
def sysfs(tmp_path, monkeypatch) -> Path:
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
def test_the_slowest_port_on_the_way_decides(sysfs, monkeypatch, of_gpu, of_port, expected):
    write(sysfs / PORT, *of_port)
    write(sysfs / PORT / GPU, *of_gpu)
    found = look(monkeypatch, "a", "b")
    assert found.links == (expected, None)  # nothing tells where the second is
    assert found.memory_bytes == (141, 141)
    assert amd_kernel.slot_generation(GPU) == of_port[2]  # the suites read slots from the same files


def test_a_machine_that_shows_no_links_tells_nothing_of_them(sysfs, monkeypatch):
    (sysfs / PORT / GPU / "current_link_speed").write_text("Unknown\n")
    assert look(monkeypatch, "a", "b").links == (None, None)
    assert amd_kernel.slot_generation(GPU) is None


def test_gpus_that_no_list_has_and_devices_that_are_gone(sysfs, monkeypatch):
    assert sysfs.is_dir()
    assert look(monkeypatch, "a", "b").unlisted == (OTHER,)
    assert look(monkeypatch, "a", "b").gone == ()
    assert look(monkeypatch, "a").gone == ("b",)
    assert look(monkeypatch).gone == ("a", "b")


@pytest.mark.parametrize("backend", [amd, nvidia, cpu], ids=lambda module: module.__name__)
def test_each_vendor_gives_addresses_of_its_devices(backend):
    known = {one.id for one in backend.devices()}
    assert set(backend.addresses()) <= known


def test_a_gpu_that_fell_off_its_bus_is_not_listed(monkeypatch):
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


@pytest.mark.parametrize("opened", [(), (1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("specified", [False, True])
def test_a_container_gets_the_devices_that_nvml_lists(tmp_path, monkeypatch, opened, *, specified):
    """NVML makes the nodes of all devices, also where a container or a job may open only some of them."""
    names = [*(f"nvidia{minor}" for minor in range(3)), "nvidiactl", "nvidia-uvm"]
    for name in names:
        (tmp_path / name).touch()
    monkeypatch.setattr(nvidia, "DEV", tmp_path)
    monkeypatch.setattr(nvidia, "CDI_SPECS", (tmp_path,) * specified)
    monkeypatch.setattr(nvidia, "_driver_libraries", list)
    monkeypatch.setattr(nvidia.Path, "is_char_device", lambda _node: True)
    monkeypatch.setattr(nvidia, "_nvml", lambda: contextlib.nullcontext(True))
    monkeypatch.setattr(nvidia, "_handles", lambda: list(opened))
    monkeypatch.setattr(nvidia.pynvml, "nvmlDeviceGetMinorNumber", lambda handle: handle)
    monkeypatch.setattr(nvidia.pynvml, "nvmlDeviceGetUUID", lambda handle: f"GPU-{handle}")
    needs = nvidia.container_needs()
    if specified:
        named = ["all"] if len(opened) == 3 else [f"GPU-{handle}" for handle in opened]
        assert needs.devices == tuple(f"nvidia.com/gpu={name}" for name in named)
        assert "GPU-" not in needs.remark
    else:
        given = {Path(node).name for node in needs.devices}
        assert given == {f"nvidia{minor}" for minor in opened} | {"nvidiactl", "nvidia-uvm"}
