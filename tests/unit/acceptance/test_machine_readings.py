"""Readings of healthy machines once taken for faults, faults that still are, and GPUs that no list names."""

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

import test_devices
import test_devices_links
from harness import paths
from harness.monitor import MonitorError, Sampler
from harness.readings import links_of_pairs
from harness.unfit import InvalidRun
from vendors import Absence, Device, Host, Link, amd_device, amd_kernel, container, nvidia_bus, nvidia_library
from workloads import speed_outliers

GIB = 1 << 30


def device(index: int, **changes: Any) -> Device:
    plain: dict[str, Any] = {"name": "", "arch": "gfx90a", "compute_units": 104, "memory_bytes": 64 * GIB}
    bdf = f"0000:0{index}:00.0"
    return Device(index=index, uuid=f"GPU-{index}", bdf=bdf, **{**plain, **changes})


# ---- Locked memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cards", "needed"), [((), False), (("mlx5_0",), True)])
def test_locked_memory_is_asked_for_only_where_a_network_card_can_use_it(
    tmp_path, monkeypatch, *, cards, needed
):
    for card in cards:
        (tmp_path / card).mkdir()
    monkeypatch.setattr(container, "INFINIBAND", tmp_path)
    monkeypatch.setattr(container.resource, "getrlimit", lambda _kind: (8 << 20, 8 << 20))
    found = container.locked_memory(32 * GIB)
    assert bool(found) is needed
    assert all(not requirement.ok for requirement in found)


# ---- Firmware ----------------------------------------------------------------------------------------------


def test_firmware_that_one_device_does_not_tell_is_not_mixed():
    versions = [{"smc": "85"}, {"smc": Absence.NOT_AVAILABLE}, {"smc": "85"}, {}]
    test_devices.test_firmware_is_equal(tuple(device(i, firmware=one) for i, one in enumerate(versions)))


def test_firmware_that_differs_makes_a_machine_unfit():
    versions = [{"smc": "85"}, {"smc": Absence.NOT_AVAILABLE}, {"smc": "86"}]
    with pytest.raises(InvalidRun, match="different smc firmware"):
        test_devices.test_firmware_is_equal(tuple(device(i, firmware=one) for i, one in enumerate(versions)))


# ---- PCI Express -------------------------------------------------------------------------------------------


def test_a_link_that_sleeps_is_read_while_it_works():
    asleep = amd_device._generation(0)
    assert asleep == "0 MT/s"
    assert paths._most([asleep, 5, asleep], "PCIe generation") == 5


def test_a_link_that_never_wakes_fails_in_words_and_not_by_a_crash():
    with pytest.raises(pytest.fail.Exception, match="PCIe generation: 0 MT/s"):
        paths._most(["0 MT/s", "0 MT/s"], "PCIe generation")


# ---- Links of MI250: 1, 2 or 4 to a pair ----------------------------------------------------------------

PAIRS = {(0, 1): 4, (0, 2): 1, (0, 3): 2, (1, 2): 2, (1, 3): 1, (2, 3): 4}
ONE_LINK = 37.0  # GB/s


def node(slow: tuple[int, int] | None = None) -> tuple[Host, dict[tuple[int, int], float]]:
    links = tuple(Link(a=a, b=b, kind="xgmi", links=count) for (a, b), count in PAIRS.items())
    rates = {pair: ONE_LINK * count for (a, b), count in PAIRS.items() for pair in ((a, b), (b, a))}
    for pair in (slow, slow[::-1]) if slow else ():
        rates[pair[0], pair[1]] *= 0.2
    return Host(vendor="amd", library="", driver="", links=links), rates


def test_pairs_with_fewer_links_are_compared_with_their_like():
    host, rates = node()
    counted = links_of_pairs(host, [device(index) for index in range(4)])
    assert counted[3, 2] == 4
    assert speed_outliers.odd_pairs(rates, counted) == []
    usual = speed_outliers.medians(rates, counted)
    assert list(test_devices_links._uneven(rates, usual)) == []
    # Without the number of links, the same healthy node would fail.
    assert list(test_devices_links._uneven(rates, speed_outliers.medians(rates)))


def test_a_slow_pair_is_seen_among_its_like():
    host, rates = node(slow=(2, 3))
    counted = links_of_pairs(host, [device(index) for index in range(4)])
    odd = speed_outliers.odd_pairs(rates, counted)
    assert {line.split(" GB/s")[0].rsplit(" ", 1)[0] for line in odd} == {"2 to 3", "3 to 2"}


# ---- A part of a node -----------------------------------------------------------------------------------


def test_only_what_the_container_was_given_is_ours(tmp_path, monkeypatch):
    """With two of eight render nodes, a library that lists all eight is cut down to two."""
    (tmp_path / "dri").mkdir()
    for minor in (130, 133):
        (tmp_path / "dri" / f"renderD{minor}").touch()
    monkeypatch.setattr(amd_kernel, "DEV", tmp_path)
    nodes = tuple(
        amd_kernel.Node(2 + i, f"0000:0{i}:00.0", 0, {"drm_render_minor": 128 + i}, 1) for i in range(8)
    )
    monkeypatch.setattr(amd_kernel, "nodes", lambda: nodes)
    ours = [i for i in range(8) if amd_kernel.is_ours(amd_kernel.node_of(f"0000:0{i}:00.0", 0))]
    assert ours == [2, 5]
    assert not amd_kernel.is_ours(amd_kernel.node_of("0000:09:00.0", 0))  # the KFD hides it


MESSAGE = "the library stumbled"


class Library:
    """Fails as often as it is told, then answers."""

    timeout_s = 60.0

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def sample(self, indices: Sequence[int]) -> tuple[Any, ...]:
        if self.failures:
            self.failures -= 1
            raise MonitorError(MESSAGE)
        return tuple(indices)


@pytest.mark.parametrize(
    ("failures", "samples", "problem"), [(0, 1, None), (1, 1, MESSAGE), (99, 0, MESSAGE)]
)
def test_a_short_check_is_sampled_once_at_least(failures, samples, problem):
    library: Any = Library(failures)
    sampler = Sampler(library, [0])
    sampler._done.set()  # the check has ended before the first answer
    assert len(sampler.start().finish()) == samples
    assert sampler.problem == problem


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Path:
    """Four GPUs of NVIDIA's driver, all of them given; a NIC and a display beside them."""
    for number in range(4):
        _device(tmp_path, f"0000:0{number}:00.0", "0x10de", "0x030200", "nvidia")
        _give(tmp_path, number)
    _device(tmp_path, "0000:08:00.0", "0x15b3", "0x020000", "mlx5_core")
    _device(tmp_path, "0000:09:00.0", "0x10de", "0x030000", "nouveau")
    for name in ("SYS", "PROC", "DEV"):
        monkeypatch.setattr(nvidia_bus, name, tmp_path / name.lower())
    for name in (nvidia_bus.GIVEN, nvidia_bus.JOB):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def _device(root: Path, bdf: str, vendor: str, kind: str, driver: str) -> None:
    folder = root / "sys/bus/pci/devices" / bdf
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(vendor + "\n", encoding="utf-8")
    (folder / "class").write_text(kind + "\n", encoding="utf-8")
    if driver:
        (root / "sys/bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
        (folder / "driver").symlink_to(root / "sys/bus/pci/drivers" / driver)


def _give(root: Path, number: int) -> None:
    information = root / f"proc/driver/nvidia/gpus/0000:0{number}:00.0/information"
    information.parent.mkdir(parents=True)
    information.write_text(f"Model: \t NVIDIA H200\nDevice Minor: \t {number}\n", encoding="utf-8")
    (root / "dev").mkdir(exist_ok=True)
    (root / f"dev/nvidia{number}").touch()


def _listed(*numbers: int) -> set[str]:
    return {f"0000:0{number}:00.0" for number in numbers}


def test_a_healthy_machine_misses_nothing(machine):
    assert machine.exists()
    assert nvidia_bus.unheld() == nvidia_bus.unlisted(_listed(0, 1, 2, 3)) == ()


def test_a_gpu_that_did_not_start_is_missed(machine):
    assert machine.exists()
    assert nvidia_bus.unlisted(_listed(0, 1, 3)) == ("0000:02:00.0",)


def test_a_gpu_without_a_driver_is_missed_and_one_of_a_virtual_machine_is_not(machine):
    _device(machine, "0000:04:00.0", "0x10de", "0x030200", "")
    _device(machine, "0000:05:00.0", "0x10de", "0x030200", "vfio-pci")
    assert nvidia_bus.unheld() == ("0000:04:00.0",)


def test_a_container_of_two_gpus_misses_no_other(machine):
    for number in (2, 3):
        (machine / f"dev/nvidia{number}").unlink()
    _device(machine, "0000:04:00.0", "0x10de", "0x030200", "")
    assert nvidia_bus.unheld() == nvidia_bus.unlisted(_listed(0, 1)) == ()


def test_a_container_of_all_gpus_misses_one_that_the_toolkit_could_not_give(machine, monkeypatch):
    """The toolkit shows neither the node nor the driver's file of what it did not give."""
    (machine / "dev/nvidia2").unlink()
    (machine / "proc/driver/nvidia/gpus/0000:02:00.0/information").unlink()
    assert nvidia_bus.unlisted(_listed(0, 1, 3)) == ()
    monkeypatch.setenv(nvidia_bus.GIVEN, "all")
    assert nvidia_bus.unlisted(_listed(0, 1, 3)) == ("0000:02:00.0",)


def test_an_image_that_says_all_by_itself_promises_nothing(machine, monkeypatch):
    """As CUDA's base images do; two nodes were bound by hand."""
    for number in (2, 3):
        (machine / f"dev/nvidia{number}").unlink()
    _device(machine, "0000:04:00.0", "0x10de", "0x030200", "")
    monkeypatch.setenv(nvidia_bus.GIVEN, "all")
    assert nvidia_bus.unheld() == nvidia_bus.unlisted(_listed(0, 1)) == ()


def test_a_job_misses_no_gpu_of_others(machine, monkeypatch):
    """As under Slurm: nodes that may not be opened, or a container that was promised all."""

    def refused(path: Path, flags: int) -> int:
        raise PermissionError(path, flags)

    monkeypatch.setattr(nvidia_bus.os, "open", refused)
    assert nvidia_bus.unlisted(_listed(0, 1)) == ()
    (machine / "dev/nvidia2").unlink()
    monkeypatch.setenv(nvidia_bus.GIVEN, "all")
    monkeypatch.setenv(nvidia_bus.JOB, "4711")
    assert nvidia_bus.unlisted(_listed(0, 1)) == ()


def test_the_release_is_the_one_that_the_installer_recorded(tmp_path):
    assert nvidia_library.version(pynvml) == importlib.metadata.version("nvidia-ml-py")
    nowhere = SimpleNamespace(__file__=str(tmp_path / "pynvml.py"))
    assert nvidia_library.version(nowhere) == "of unknown version"
