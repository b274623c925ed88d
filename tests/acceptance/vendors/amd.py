"""AMD devices through `amdsmi`. In: the library, in a child process; kernel files.
Out: `Host`, `Sample`s, `Event`s.

Tested with AMD's real libraries 6.1.2 and 10.1 on fabricated hosts, not yet on AMD hardware:
docs/reference/amd.md.
"""

import itertools
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vendors import (
    Absence,
    Device,
    Event,
    Host,
    Reading,
    Requirement,
    Sample,
    VendorAbsentError,
    VendorName,
    amd_device,
    amd_events,
    amd_kernel,
    amd_links,
    drivers,
    is_known,
    software,
)
from vendors.amd_library import ask, demand, open_library, reading, version
from vendors.amd_software import HIP_OF_RELEASES
from vendors.container import device_node, locked_memory, shared_memory
from vendors.drivers import Support

NAME: VendorName = "amd"
gpudirect = amd_kernel.gpudirect
VISIBILITY = "ROCR_VISIBLE_DEVICES"  # applies before HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES
PEER_LINK = "xgmi"
FOREIGN_RUNTIMES = ("libcuda", "libcudart", "libnvrtc", "libnccl")
REFERENCE_PARTITION: Mapping[str, str] = {"compute": "SPX", "memory": "NPS1"}
# MIOpen searches for kernels in the first call of each shape, and keeps them for no later container.
TIME_LIMIT_FACTOR = 3.0
SHM_BYTES, MEMLOCK_BYTES = 8 << 30, 32 << 30  # AMD's preflight defaults (ROCm/cvs)
WHOLE = ("SPX", Absence.NOT_AVAILABLE, Absence.NOT_SUPPORTED, None)
METRICS_PERIOD_S = 0.15  # the driver refreshes gpu_metrics every 100 ms


def read() -> Host:
    """The visible devices and their links, as amdsmi reports them. Raises `VendorAbsentError`."""
    host, smi = read_devices(), open_library()
    handles = demand(smi, "amdsmi_get_processor_handles")
    ends = {device.index: amd_links.end(smi, handles[device.index], device) for device in host.devices}
    pairs = [(a, b) for number, a in enumerate(host.devices) for b in host.devices[number + 1 :]]
    short = amd_links.short_of_links(ends)
    links = tuple(amd_links.link(smi, ends, short, a, b) for a, b in pairs)
    return replace(host, links=links, unlisted=amd_kernel.unheld())


def read_devices() -> Host:
    """The same without links: reading their error counts could clear them before a check judges them."""
    _require_nodes()
    smi = open_library()
    handles = demand(smi, "amdsmi_get_processor_handles")
    addresses = [amd_device.address(smi, handle) for handle in handles]
    gpus = [_gpu(handles, addresses, address) for address in addresses]
    earlier = [amd_device.metrics_of(smi, gpu) for gpu in gpus]
    time.sleep(METRICS_PERIOD_S)
    every = [
        amd_device.device(
            smi,
            handle,
            index,
            earlier[index],
            same=addresses[:index].count(addresses[index]),
            gpu=gpus[index],
        )
        for index, handle in enumerate(handles)
    ]
    return Host(
        vendor=NAME,
        library=f"amdsmi {version(smi)}",
        driver=_driver(smi, handles),
        driver_runtime=_rocm(smi),
        devices=tuple(_visible(every)),
    )


def sample(indices: Sequence[int]) -> tuple[Sample, ...]:
    """Clock, power, temperature, and MI200's throttling of the moment.

    Counters are too coarse for a tenth of a second: the readings before and after a check give their share of
    its whole time.
    """
    smi = open_library()
    handles = demand(smi, "amdsmi_get_processor_handles")
    addresses = [amd_device.address(smi, handle) for handle in handles]
    return tuple(
        amd_device.sample(smi, _gpu(handles, addresses, addresses[index]), index) for index in indices
    )


def listen() -> Iterator[Event | None] | Absence:
    """Page faults, resets and hangs of the visible devices, as the KFD reports them."""
    smi = open_library()
    handles = demand(smi, "amdsmi_get_processor_handles")
    return amd_events.listen(smi, {device.index: handles[device.index] for device in read_devices().devices})


def child_environment(devices: Sequence[Device]) -> dict[str, str]:
    """By unique id, which does not depend on numbering; HIP then numbers the devices that ROCr shows."""
    numbered = ",".join(str(number) for number in range(len(devices)))
    ids = Counter(device.uuid for device in devices)  # drivers give all partitions of a GPU one id
    shown = ",".join(
        device.uuid
        if device.uuid.startswith("GPU-")
        and ids[device.uuid] == 1
        and device.partition.get("compute") in WHOLE
        else str(amd_kernel.order(amd_kernel.node_of(device.bdf, device.part)))
        for device in devices
    )
    return {VISIBILITY: shown, "HIP_VISIBLE_DEVICES": numbered, "CUDA_VISIBLE_DEVICES": numbered}


def requirements() -> tuple[Requirement, ...]:
    """The KFD's node, each render node, shared and locked memory."""
    start = "pass --device /dev/kfd --device /dev/dri and --group-add with the nodes' numeric group"
    nodes = (amd_kernel.DEV / "kfd", *(amd_kernel.render_nodes() or (amd_kernel.DEV / "dri/renderD128",)))
    return (
        *(device_node(node, start) for node in nodes),
        shared_memory(SHM_BYTES),
        *locked_memory(MEMLOCK_BYTES),
    )


def torch_runtime() -> str | None:
    """The ROCm release, or in older wheels HIP's number; None for a CUDA torch in a ROCm image."""
    version = software.torch_version()
    release = version.get("rocm") or version["hip"]
    return None if release is None else str(release)


def is_release(found: str, declared: str) -> bool:
    """HIP counts by itself: 7.2.53211 is of ROCm 7.2.1 to 7.2.4. A number that is not known is no release."""
    numbers = found.partition("-")[0]
    return declared in HIP_OF_RELEASES.get(numbers, (numbers,))


def torch_uuid(printed: str) -> str:
    """HIP uses the unique id as 16 letters, and torch prints their bytes as a UUID (ROCm/ROCm#4203)."""
    return f"GPU-{bytes.fromhex(printed.replace('-', '')).decode('ascii', 'replace')}"


def driver_support(host: Host, runtime_version: str) -> Support:
    """By AMD's lists of driver and user-space releases."""
    return drivers.amd(str(host.driver) if is_known(host.driver) else None, runtime_version)


def _gpu(handles: Sequence[Any], addresses: Sequence[str], address: str) -> Any:
    """The first device of a GPU.
    Only it has the kernel's files of the whole GPU: link, power, errors, metrics. Further partitions have its
    address, or their number as the address's last digit.
    """
    return next(
        handle for handle, other in zip(handles, addresses, strict=True) if other[:-1] == address[:-1]
    )


def _require_nodes() -> None:
    """Raise `VendorAbsentError` with the device nodes that this user may not open.

    The library itself would only report a "file error".
    """
    nodes = [node for node in requirements() if node.name.startswith("/dev/") and node.name != "/dev/shm"]
    closed = [node for node in nodes if not node.ok and node.got != "missing"]
    if closed and len(closed) == len([node for node in nodes if node.got != "missing"]):
        got = "; ".join(f"{node.name}: {node.got}" for node in closed[:2])
        raise VendorAbsentError(f"{got}; expected {closed[0].expected}: {closed[0].next_step}")


def _driver(smi: Any, handles: Sequence[Any]) -> Reading:
    """The module's version.
    Without one, as in the kernel's own tree, the library answers the text of /proc/version or N/A; then the
    checksum of the module's sources names it, as on the host's side.
    """
    answer = ask(smi, "amdsmi_get_gpu_driver_info", handles[0]) if handles else Absence.NOT_AVAILABLE
    found = answer if isinstance(answer, Absence) else reading(answer.get("driver_version"))
    if is_known(found) and drivers.parse(str(found)):
        return found
    return reading(amd_kernel.driver())


def _rocm(smi: Any) -> Reading:
    """The ROCm release of the user space that the library belongs to.
    From 6.4 on it answers (found, release).
    """
    answer = ask(smi, "amdsmi_get_rocm_version")
    if isinstance(answer, Absence):
        return answer
    return reading(answer[1]) if answer[0] else Absence.NOT_AVAILABLE


def _visible(devices: Sequence[Device]) -> list[Device]:
    """The devices that the container and the user's environment show to this process.
    The library lists every GPU of the host.

    ROCr numbers devices in the KFD's order, and HIP numbers the devices that ROCr shows.
    """
    nodes = {device.index: amd_kernel.node_of(device.bdf, device.part) for device in devices}
    ours = [device for device in devices if amd_kernel.is_ours(nodes[device.index])]
    shown = sorted(ours, key=lambda device: amd_kernel.order(nodes[device.index]))
    # HIP obeys CUDA's variable, if its own is not set.
    of_hip = os.environ.get("HIP_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
    for chosen in (os.environ.get(VISIBILITY), of_hip):
        if chosen is not None:
            shown = _named(shown, [name.strip() for name in chosen.split(",")])
    return [device for device in devices if device in shown]


def _named(devices: Sequence[Device], names: Sequence[str]) -> list[Device]:
    """Devices by number or unique id, up to the first unknown name: both runtimes stop there."""
    known = {
        **{str(number): device for number, device in enumerate(devices)},
        **{device.uuid: device for device in devices},
    }
    return [known[name] for name in itertools.takewhile(known.__contains__, names)]
