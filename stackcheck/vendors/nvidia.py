"""NVIDIA GPUs on a host.

In: NVML, the host's device nodes and driver libraries. Out: the devices, and what a container needs to use
them: CDI if the host has a specification, else nodes and libraries by path.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pynvml

from stackcheck.vendors import (
    UNLIMITED_PINNING,
    Bind,
    ContainerNeeds,
    HostDevice,
    LaunchWords,
    anonymous_id,
    model_of,
)

DEV = Path("/dev")
CDI_SPECS = (Path("/etc/cdi/nvidia.yaml"), Path("/var/run/cdi/nvidia.yaml"))
DRIVER_LIBRARIES = (
    "libcuda.so.1",
    "libnvidia-ml.so.1",
    "libnvidia-ptxjitcompiler.so.1",
    "libnvidia-nvvm.so.4",
)
# Where container runtimes and images put the driver; asked before the loader's own folders.
DRIVER_FOLDERS = (
    Path("/usr/local/nvidia/lib64"),
    Path("/usr/local/nvidia/lib"),
    Path("/usr/lib/x86_64-linux-gnu"),
    Path("/usr/lib/aarch64-linux-gnu"),
    Path("/usr/lib64"),
)


def present() -> bool:
    """Whether NVML sees a GPU."""
    return bool(devices())


def driver() -> str | None:
    """The driver's version, e.g. 580.159.04."""
    with _nvml() as up:
        return str(pynvml.nvmlSystemGetDriverVersion()) if up else None


def kernel_module() -> str:
    """The same name for the open and the closed module."""
    return "nvidia"


def devices() -> tuple[HostDevice, ...]:
    """Every GPU that NVML sees, in PCI bus order."""
    with _nvml() as up:
        if not up:
            return ()
        return tuple(_device(handle) for handle in sorted(_handles(), key=_bus_id))


def addresses() -> Mapping[str, str]:
    """The PCI addresses that NVML lists, with the kernel's four digits for the domain."""
    with _nvml() as up:
        if not up:
            return {}
        return {_id(handle): _bus_id(handle)[-len("0000:1b:00.0") :].lower() for handle in _handles()}


def busy() -> Mapping[str, float | None]:
    """How busy the devices are, by NVML's utilisation."""
    try:
        with _nvml() as up:
            return {_id(handle): _busy(handle) for handle in _handles()} if up else {}
    except pynvml.NVMLError:
        return {}


def partition() -> str | None:
    """Whether MIG is on; training is certified with MIG off."""
    with _nvml() as up:
        if not up or pynvml.nvmlDeviceGetCount() == 0:
            return None
        try:
            current, _pending = pynvml.nvmlDeviceGetMigMode(pynvml.nvmlDeviceGetHandleByIndex(0))
        except pynvml.NVMLError_NotSupported:
            return None
        return "MIG on" if current else "MIG off"


def container_needs() -> ContainerNeeds:
    """CDI devices where a specification is installed, else the nodes and the driver's libraries by path.

    NVML makes the nodes of all GPUs, also in a container or a Slurm job that may open only some of them. An
    engine outside would give the others to the image, so only devices that NVML lists are named.
    """
    minors, uuids = _listed()
    others = {*DEV.glob("nvidia[0-9]*")} - {DEV / f"nvidia{minor}" for minor in minors}
    if any(spec.exists() for spec in CDI_SPECS):
        names = uuids if others else ["all"]
        return ContainerNeeds(
            devices=tuple(f"nvidia.com/gpu={name}" for name in names),
            ulimits=UNLIMITED_PINNING,
            remark=f"NVIDIA: CDI devices: {len(names) if others else 'all'}",
        )
    paths = {node for node in DEV.glob("nvidia*") if node.is_char_device()}
    nodes = sorted(str(node) for node in paths - others)
    caps = sorted(str(node) for node in (DEV / "nvidia-caps").glob("*"))
    libraries = tuple(_driver_libraries())
    return ContainerNeeds(
        devices=(*nodes, *caps),
        binds=tuple(Bind(source=path, target=f"/usr/local/nvidia/lib64/{name}") for name, path in libraries),
        env=(("LD_LIBRARY_PATH", "/usr/local/nvidia/lib64"),),
        ulimits=UNLIMITED_PINNING if nodes else (),
        remark=f"NVIDIA: no CDI specification found, so {len(nodes) + len(caps)} device nodes and "
        f"{len(libraries)} driver libraries are bound by path, read-only",
    )


def _listed() -> tuple[list[int], list[str]]:
    """The numbers of the nodes of all GPUs that NVML lists, and their UUIDs, by which CDI names them too."""
    with _nvml() as up:
        handles = _handles() if up else []
        minors = [pynvml.nvmlDeviceGetMinorNumber(handle) for handle in handles]
        return minors, [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]


@contextlib.contextmanager
def _nvml() -> Iterator[bool]:
    try:
        pynvml.nvmlInit()
    except (
        pynvml.NVMLError_LibraryNotFound,
        pynvml.NVMLError_DriverNotLoaded,
        pynvml.NVMLError_NoPermission,
    ):
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def launch_words() -> LaunchWords:
    """NVIDIA's container toolkit brings the driver's libraries of the host."""
    return LaunchWords(
        docker=("--gpus=all",),
        podman=("--device=nvidia.com/gpu=all", "--security-opt=label=disable"),
        apptainer=("--nv",),
        resource="nvidia.com/gpu",
    )


def visibility() -> Mapping[str, str | None]:
    """CUDA's own choice is removed; the container toolkit, where a daemon has it, gives all."""
    return {"CUDA_VISIBLE_DEVICES": None, "NVIDIA_VISIBLE_DEVICES": "all"}


def kernel_files(archs: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """CUDA's kernels are inside its libraries: there is no file to leave out."""
    del archs
    return (), ()


def _handles() -> list[Any]:
    """The GPUs that answer: one that fell off its bus is still counted, and is not there."""
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        with contextlib.suppress(pynvml.NVMLError_GpuIsLost):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            pynvml.nvmlDeviceGetUUID(handle)
            pynvml.nvmlDeviceGetMemoryInfo(handle)
            found.append(handle)
    return found


def _id(handle: Any) -> str:
    return anonymous_id(str(pynvml.nvmlDeviceGetUUID(handle)))


def _busy(handle: Any) -> float | None:
    try:
        return int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
    except pynvml.NVMLError:
        return None


def _bus_id(handle: Any) -> str:
    return str(pynvml.nvmlDeviceGetPciInfo(handle).busId)


def _device(handle: Any) -> HostDevice:
    identifier = pynvml.nvmlDeviceGetPciInfo(handle).pciDeviceId
    memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return HostDevice(
        model=model_of(f"{identifier & 0xFFFF:04x}:{identifier >> 16:04x}", memory),
        arch=f"sm_{major}{minor}",
        id=_id(handle),
        memory_bytes=memory,
        power_cap_w=pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        firmware=str(pynvml.nvmlDeviceGetVbiosVersion(handle)),
    )


def _driver_libraries() -> Iterator[tuple[str, Path]]:
    folders = [*(Path(p) for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if p), *DRIVER_FOLDERS]
    for name in DRIVER_LIBRARIES:
        found = next((folder / name for folder in folders if (folder / name).exists()), None)
        if found is not None:
            yield name, found.resolve()
