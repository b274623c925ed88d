"""NVIDIA devices through nvidia-ml-py. In: NVML, in a child process. Out: `Host`, `Sample`s, `Event`s."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vendors import (
    Absence,
    Device,
    Event,
    Host,
    Requirement,
    Sample,
    VendorAbsentError,
    VendorName,
    drivers,
    is_known,
    kernel_files,
    nvidia_bus,
    nvidia_device,
    nvidia_events,
    nvidia_links,
    software,
)
from vendors.container import device_node, locked_memory, shared_memory
from vendors.drivers import Support
from vendors.nvidia_library import ask, open_library, text, version

NAME: VendorName = "nvidia"
VISIBILITY = "CUDA_VISIBLE_DEVICES"
PEER_LINK = "nvlink"
FOREIGN_RUNTIMES = ("libamdhip64", "librccl", "libhsa-runtime64")
REFERENCE_PARTITION: Mapping[str, str] = {"mig": "disabled"}

TIME_LIMIT_FACTOR = 1.0
SHM_BYTES, MEMLOCK_BYTES = 8 << 30, 32 << 30  # AMD's preflight defaults, used for both vendors


def read() -> Host:
    """The visible devices and their links, as NVML reports them."""
    host, nvml = read_devices(), open_library()
    shown = [device.index for device in host.devices]
    ends = {index: nvidia_links.end(nvml, nvml.nvmlDeviceGetHandleByIndex(index)) for index in shown}
    pairs = [(a, b) for number, a in enumerate(shown) for b in shown[number + 1 :]]
    links = [nvidia_links.link(nvml, ends, a, b) for a, b in pairs]
    return replace(host, links=tuple(links))


def read_devices() -> Host:
    """The same without links, which take a hundred calls per pair: 0.44 s on four linked H200s."""
    nvml = open_library()
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    every = [nvidia_device.device(nvml, handle, index) for index, handle in enumerate(handles)]
    shown, cuda = _visible(every), ask(nvml, "nvmlSystemGetCudaDriverVersion_v2")
    return Host(
        vendor=NAME,
        library=f"nvidia-ml-py {version(nvml)}",
        driver=text(nvml, nvml.nvmlSystemGetDriverVersion),
        driver_runtime=cuda if isinstance(cuda, Absence) else f"{cuda // 1000}.{cuda % 1000 // 10}",
        devices=tuple(shown),
        unlisted=(*nvidia_bus.unlisted({device.bdf for device in every}), *nvidia_bus.unheld()),
    )


def sample(indices: Sequence[int]) -> tuple[Sample, ...]:
    """Clock, power, temperature and throttle reasons of some devices now."""
    nvml = open_library()
    handles = {index: nvml.nvmlDeviceGetHandleByIndex(index) for index in indices}
    return tuple(nvidia_device.sample(nvml, handle, index) for index, handle in handles.items())


def listen() -> Iterator[Event | None] | Absence:
    """Xids and uncorrectable memory errors of the visible devices, from an event set of NVML."""
    nvml = open_library()
    return nvidia_events.listen(nvml, {device.index for device in read_devices().devices})


def gpudirect(root: Path) -> Mapping[str, bool | None]:
    """The module nvidia-peermem, or dma-buf, which NVIDIA's open kernel modules alone export.

    https://docs.nvidia.com/cuda/gpudirect-rdma/
    """
    driver = kernel_files.text(root / "proc/driver/nvidia/version")
    is_new = kernel_files.release(root) >= kernel_files.DMA_BUF_SINCE
    return {
        "nvidia-peermem": (root / "sys/module/nvidia_peermem").exists(),
        "dma-buf": is_new and "Open Kernel Module" in driver if driver else None,
    }


def child_environment(devices: Sequence[Device]) -> dict[str, str]:
    """Variables that show a child these devices, named by UUID; an empty list hides every GPU."""
    return {VISIBILITY: ",".join(device.uuid for device in devices), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def requirements() -> tuple[Requirement, ...]:
    """The control nodes, each GPU's node, shared and locked memory."""
    start = "start the container with --gpus all, or pass /dev/nvidia* as --device"
    gpus = sorted(path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    nodes = (Path("/dev/nvidiactl"), Path("/dev/nvidia-uvm"), *gpus)
    return (
        *(device_node(path, start) for path in nodes),
        shared_memory(SHM_BYTES),
        *locked_memory(MEMLOCK_BYTES),
    )


def torch_runtime() -> str | None:
    """The CUDA release that torch was built with."""
    release = software.torch_version()["cuda"]
    return None if release is None else str(release)


def is_release(found: str, declared: str) -> bool:
    """torch names CUDA's major and minor alone, as stacks do."""
    return found == declared


def torch_uuid(printed: str) -> str:
    """torch prints the UUID without its prefix."""
    return f"GPU-{printed.removeprefix('GPU-')}"


def driver_support(host: Host, runtime_version: str) -> Support:
    """Whether the driver serves the runtime, by CUDA's minor-version and forward compatibility."""
    driver, serves = (
        str(reading) if is_known(reading) else None for reading in (host.driver, host.driver_runtime)
    )
    return drivers.nvidia(driver, runtime_version, serves)


def _visible(devices: Sequence[Device]) -> list[Device]:
    """The devices that the user's environment shows to this process; NVML itself ignores it.

    Raises `VendorAbsentError` for a part of a GPU.
    """
    chosen = os.environ.get(VISIBILITY)
    if chosen is None:
        return list(devices)
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    if part := next((name for name in names if name.startswith("MIG-")), None):
        raise VendorAbsentError(
            f"{VISIBILITY} names {part}, an instance of a GPU in MIG mode: devices.json has whole GPUs only,"
            " and no part is certified; choose whole GPUs, and switch MIG off with nvidia-smi -mig 0"
        )
    ids = tuple(name for name in names if name.startswith("GPU-"))
    return [device for device in devices if str(device.index) in names or device.uuid.startswith(ids)]
