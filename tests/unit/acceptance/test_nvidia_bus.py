"""GPUs of the PCI bus that no list names: missed where they were given to us, and nowhere else."""

from pathlib import Path

import pytest

from vendors import nvidia_bus


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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


def test_a_healthy_machine_misses_nothing(machine: Path) -> None:
    assert machine.exists()
    assert nvidia_bus.unheld() == nvidia_bus.unlisted(_listed(0, 1, 2, 3)) == ()


def test_a_gpu_that_did_not_start_is_missed(machine: Path) -> None:
    assert machine.exists()
    assert nvidia_bus.unlisted(_listed(0, 1, 3)) == ("0000:02:00.0",)


def test_a_gpu_without_a_driver_is_missed_and_one_of_a_virtual_machine_is_not(machine: Path) -> None:
    _device(machine, "0000:04:00.0", "0x10de", "0x030200", "")
    _device(machine, "0000:05:00.0", "0x10de", "0x030200", "vfio-pci")
    assert nvidia_bus.unheld() == ("0000:04:00.0",)


def test_a_container_of_two_gpus_misses_no_other(machine: Path) -> None:
    for number in (2, 3):
        (machine / f"dev/nvidia{number}").unlink()
    _device(machine, "0000:04:00.0", "0x10de", "0x030200", "")
    assert nvidia_bus.unheld() == nvidia_bus.unlisted(_listed(0, 1)) == ()


def test_a_container_of_all_gpus_misses_one_that_the_toolkit_could_not_give(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The toolkit shows neither the node nor the driver's file of what it did not give."""
    (machine / "dev/nvidia2").unlink()
    (machine / "proc/driver/nvidia/gpus/0000:02:00.0/information").unlink()
    assert nvidia_bus.unlisted(_listed(0, 1, 3)) == ()
    monkeypatch.setenv(nvidia_bus.GIVEN, "all")
    assert nvidia_bus.unlisted(_listed(0, 1, 3)) == ("0000:02:00.0",)


def test_an_image_that_says_all_by_itself_promises_nothing(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As CUDA's base images do; two nodes were bound by hand."""
    for number in (2, 3):
        (machine / f"dev/nvidia{number}").unlink()
    _device(machine, "0000:04:00.0", "0x10de", "0x030200", "")
    monkeypatch.setenv(nvidia_bus.GIVEN, "all")
    assert nvidia_bus.unheld() == nvidia_bus.unlisted(_listed(0, 1)) == ()


def test_a_job_misses_no_gpu_of_others(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under Slurm: nodes that may not be opened, or a container that was promised all."""

    def refused(path: Path, flags: int) -> int:
        raise PermissionError(path, flags)

    monkeypatch.setattr(nvidia_bus.os, "open", refused)
    assert nvidia_bus.unlisted(_listed(0, 1)) == ()
    (machine / "dev/nvidia2").unlink()
    monkeypatch.setenv(nvidia_bus.GIVEN, "all")
    monkeypatch.setenv(nvidia_bus.JOB, "4711")
    assert nvidia_bus.unlisted(_listed(0, 1)) == ()
