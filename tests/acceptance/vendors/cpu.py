"""The `cpu` vendor: the machine as one device without a GPU, so that the same checks run everywhere.

In: /proc and /dev/shm. Out: a `Host` with one device, whose compute units are the machine's cores. It proves
the flow and the numerics, never a GPU: it has no links, no ECC and no power values to judge.
"""

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from vendors import Absence, Device, Event, Host, Requirement, Sample, Throttle, VendorName
from vendors.container import shared_memory
from vendors.drivers import Support

NAME: VendorName = "cpu"
VISIBILITY = ""
PEER_LINK = ""
FOREIGN_RUNTIMES = (
    "libcuda", "libcudart", "libnvrtc", "libnccl", "libamdhip64", "librccl", "libhsa-runtime64",
)  # fmt: skip
REFERENCE_PARTITION: Mapping[str, str] = {}
TIME_LIMIT_FACTOR = 1.0
SHARED_MEMORY_BYTES = 64 << 20  # Docker's default; gloo needs little


def read() -> Host:
    """The machine as one device."""
    return Host(
        vendor=NAME,
        library="/proc",
        driver=Absence.NOT_AVAILABLE,
        devices=(
            Device(
                index=0,
                uuid=f"{platform.machine()} {processor()} x {os.cpu_count()}",  # as the host names it
                bdf="",
                name=platform.processor() or platform.machine(),
                arch=platform.machine(),
                compute_units=len(os.sched_getaffinity(0)),
                memory_bytes=_memory_bytes("MemTotal"),
                memory_used_bytes=_memory_bytes("MemTotal") - _memory_bytes("MemAvailable"),
            ),
        ),
    )


read_devices = read


def processor() -> str:
    """The processor's name as the kernel gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def sample(indices: Sequence[int]) -> tuple[Sample, ...]:
    """Samples without values: nothing is judged on a CPU under load."""
    nothing = Absence.NOT_AVAILABLE
    return tuple(
        Sample(index=index, clock_mhz=nothing, power_w=nothing, temperature_c=nothing, throttle=Throttle())
        for index in indices
    )


def listen() -> Iterator[Event | None] | Absence:
    """Not supported: a CPU's faults are in the kernel's log, which a container cannot read."""
    return Absence.NOT_SUPPORTED


def child_environment(devices: Sequence[Device]) -> dict[str, str]:
    """Hide every GPU of the machine, so that checks really run on the CPU."""
    del devices
    return {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


def requirements() -> tuple[Requirement, ...]:
    """Shared memory for gloo and DataLoader workers."""
    return (shared_memory(SHARED_MEMORY_BYTES),)


def torch_runtime() -> str | None:
    """None: a CPU build has neither CUDA nor HIP."""
    return None


def is_release(found: str, declared: str) -> bool:
    """Never: a CPU build has no runtime that could be declared."""
    del found, declared
    return False


def torch_uuid(printed: str) -> str:
    """The same text: torch has no UUID for a CPU."""
    return printed


def driver_support(host: Host, runtime_version: str) -> Support:
    """A CPU needs no driver."""
    del host, runtime_version
    return Support("listed", "a CPU needs no driver")


def gpudirect(root: Path) -> Mapping[str, bool | None]:
    """A CPU reads its own memory."""
    del root
    return {}


def _memory_bytes(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/meminfo has no {field}")
