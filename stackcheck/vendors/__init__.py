"""What differs between vendors on a host: which devices there are, and what a container needs to see them.

In: the host's device nodes, sysfs and SMI library. Out: `Host` (the fingerprint that a certificate is
about) and `ContainerNeeds`. Each vendor is a module with the same names (`VendorModule`); nothing outside
this folder branches on a vendor.
"""

import dataclasses
import functools
import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import psutil

from stackcheck.errors import ConfigurationError
from stackcheck.vendors.kernel_module import DriverModule

Vendor = Literal["amd", "nvidia", "cpu"]
UNLIMITED_PINNING = (("memlock", -1),)
WHOLE = {"compute": "SPX", "memory": "NPS1"}  # an AMD GPU that is one device
Nvls = Literal["on", "off", "unavailable"]

# Variables of a site that change what collectives do; they reach the container and are recorded.
SITE_PREFIXES = ("NCCL_", "RCCL_", "TORCH_NCCL_", "TORCH_SYMM_MEM_", "NVSHMEM_", "HSA_")

# Variables that show a program only some devices, whoever invents them: CUDA_VISIBLE_DEVICES,
# GPU_DEVICE_ORDINAL, ZE_AFFINITY_MASK, ONEAPI_DEVICE_SELECTOR, …
HIDING = re.compile(r"VISIBLE_DEVICES|DEVICE_ORDINAL|AFFINITY_MASK|DEVICE_SELECTOR")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostDevice:
    """One physical device as the host's driver shows it."""

    model: str  # product name as `devices.json` spells it, or "unknown (PCI 10de:2335)"
    arch: str  # compiler target (gfx942, sm_90, x86_64)
    id: str  # hash of the device's UUID; the UUID itself stays on the host
    memory_bytes: int  # device memory
    power_cap_w: float | None = None  # enforced power limit in watts, or None if there is no limit
    firmware: str | None = None  # version of the video BIOS, or None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """The fingerprint of a machine: equal fingerprints mean that a result still holds."""

    vendor: Vendor
    devices: tuple[HostDevice, ...]
    driver: str | None
    kernel: str
    partition: str | None
    nvls: Nvls
    cpu: str
    memory_bytes: int

    def as_json(self) -> dict[str, object]:
        """The `host` object of result.json."""
        fields = dataclasses.asdict(self)
        fields["devices"] = [dataclasses.asdict(device) for device in self.devices]
        return fields

    def digest(self) -> str:
        """One value to compare two fingerprints by; host memory is left out, as virtual machines grow it."""
        text = json.dumps(self.as_json() | {"memory_bytes": None}, sort_keys=True)
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bind:
    """A path of the host that a container sees, read-only."""

    source: Path
    target: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContainerNeeds:
    """What a container needs to use the devices, and nothing more.

    Attributes:
        ulimits: Limits to raise: a device's driver pins what is copied, and Docker allows 8 MiB.
    """

    devices: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()  # numeric group ids that own those nodes
    binds: tuple[Bind, ...] = ()  # driver libraries of the host, read-only
    env: tuple[tuple[str, str], ...] = ()
    ulimits: tuple[tuple[str, int], ...] = ()
    remark: str  # how the devices reach the container, in one sentence for the log


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchWords:
    """How a user's own command line asks an engine for all devices of a node: shell words, ready to print.

    They hold on any host of the vendor, so numbers that differ from host to host are looked up by the shell.

    Attributes:
        docker, podman, apptainer: Words of their command lines.
    """

    docker: tuple[str, ...] = ()
    podman: tuple[str, ...] = ()
    apptainer: tuple[str, ...] = ()
    resource: str | None = None  # what a scheduler counts these devices as; None: it does not count them


class VendorModule(Protocol):
    """The names that amd.py, nvidia.py and cpu.py share."""

    def present(self) -> bool:
        """Whether a device of this vendor is visible on this host."""

    def driver(self) -> str | None:
        """The kernel driver's version, or None when it is not loaded."""

    def kernel_module(self) -> str | None:
        """The name of the driver's kernel module; None where there is no such thing."""

    def devices(self) -> tuple[HostDevice, ...]:
        """Every visible device."""

    def addresses(self) -> Mapping[str, str]:
        """Device id -> PCI address ("0000:1b:00.0") of every visible device."""

    def busy(self) -> Mapping[str, float | None]:
        """Device id -> the share of the last moment that it worked, by its driver; None: unknown."""

    def partition(self) -> str | None:
        """The partition mode (SPX/NPS1, MIG off), or None where there is no such thing."""

    def container_needs(self) -> ContainerNeeds:
        """What a container needs to use the devices."""

    def launch_words(self) -> LaunchWords:
        """How a user's own command line asks an engine for the devices."""

    def visibility(self) -> Mapping[str, str | None]:
        """The variables that choose devices -> the value that shows all; None: to be removed."""

    def kernel_files(self, archs: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Patterns of the files of distribution packages that hold kernels for one architecture each:
        of all of them, and of those for `archs`.
        """


def module(vendor: Vendor) -> VendorModule:
    """The module of one vendor."""
    from stackcheck.vendors import amd, cpu, nvidia

    modules: dict[str, VendorModule] = {"amd": amd, "nvidia": nvidia, "cpu": cpu}
    return modules[vendor]


def kernel_record() -> tuple[Mapping[str, object], tuple[str, ...]]:
    """The kernel's files of this host's GPUs, to show to others, and the identities that nothing may show.

    Only AMD's are known: NVIDIA's driver tells through its library alone.
    """
    from stackcheck.vendors import amd_record

    return amd_record.record(), amd_record.identities()


def detect() -> Vendor:
    """The vendor of this host's devices; `cpu` where there is no GPU.

    Raises:
        ConfigurationError: GPUs of both vendors are visible, so the user has to choose.
    """
    found: list[Vendor] = [vendor for vendor in ("amd", "nvidia") if module(vendor).present()]
    if len(found) > 1:
        raise ConfigurationError(
            "GPUs of two vendors are visible on this host",
            got=" and ".join(found),
            expected="one vendor",
            next_step="name it: --gpu-vendor amd or --gpu-vendor nvidia",
        )
    return found[0] if found else "cpu"


def host(vendor: Vendor | None = None) -> Host:
    """The fingerprint of this host as seen by one vendor (by default the vendor that `detect` finds)."""
    vendor = vendor or detect()
    backend = module(vendor)
    return Host(
        vendor=vendor,
        devices=backend.devices(),
        driver=backend.driver(),
        kernel=platform.release(),
        partition=backend.partition(),
        nvls=_nvls(vendor),
        cpu=f"{cpu_model()} x {psutil.cpu_count()}",
        memory_bytes=psutil.virtual_memory().total,
    )


def driver_module(vendor: Vendor) -> DriverModule | None:
    """The kernel module of a vendor's driver, running and installed; None where there is no such thing."""
    from stackcheck.vendors import kernel_module

    name = module(vendor).kernel_module()
    return kernel_module.read(name) if name else None


def site_environment() -> tuple[tuple[str, str], ...]:
    """The host's variables that change collectives, in order of name."""
    return tuple(
        sorted((name, value) for name, value in os.environ.items() if name.startswith(SITE_PREFIXES))
    )


def visibility(vendor: Vendor) -> dict[str, str | None]:
    """What shows a container all devices of a vendor: variable -> value, or None: to be removed."""
    names: tuple[Vendor, ...] = ("amd", "nvidia", "cpu")
    known = dict.fromkeys(name for each in names for name in module(each).visibility())
    return {**known, **module(vendor).visibility()}


def chosen_devices(vendor: Vendor, asked: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables by which a user's job sees its devices and no others.

    Args:
        vendor: Whose devices.
        asked: `all`, how many, or ids with commas (of one: `device=3`); None: what this shell or Slurm gave
            to this process.
        environ: The variables of this process. Slurm's own list has the numbers of the node; the variable
            that it sets may count within the job, whose devices a container does not know.

    Raises:
        ConfigurationError: More is asked for than this process has.
    """
    names = [name for name, value in module(vendor).visibility().items() if value is None]
    if not names:
        return {}
    given = {name: environ[name] for name in names if environ.get(name)}
    allocated = environ.get("SLURM_STEP_GPUS") or environ.get("SLURM_JOB_GPUS")
    given = {names[0]: allocated} if allocated else given
    if asked in {None, "all"}:
        return given
    allowed = next(iter(given.values()), "").split(",") if given else []
    allowed = allowed or [str(index) for index in range(len(module(vendor).devices()))]
    words = str(asked)
    count = int(words) if words.isdigit() else 0
    chosen = allowed[:count] if count else words.removeprefix("device=").split(",")
    if len(chosen) < count or not set(chosen) <= set(allowed):
        raise ConfigurationError(
            "more GPUs are asked for than this process has",
            where="--gpus",
            got=str(asked),
            expected=f"a number up to {len(allowed)}, or some of {', '.join(allowed) or 'none'}",
            next_step="leave --gpus out: all that this process has",
        )
    return {names[0]: ",".join(chosen)}


def hides_devices(name: str) -> bool:
    """Whether a variable of this name can hide devices from a program."""
    return HIDING.search(name) is not None


def anonymous_id(uuid: str) -> str:
    """A stable id of a device that does not reveal its UUID."""
    return hashlib.sha256(uuid.encode()).hexdigest()[:16]


def model_of(
    pci_id: str,
    memory_bytes: int,
    compute_units: int | None = None,
    partition: Mapping[str, str] | None = None,
) -> str:
    """The device model of a PCI id ("1002:74a1").

    Products that share one differ in memory or in compute units, and a GPU in partitions is a model of its
    own. The table is the suites' own (`tests/acceptance/devices.json`): one fact in one place.
    """
    rows = [row for row in device_table() if _fits(row, pci_id, memory_bytes, partition or {})]
    if len(rows) > 1:
        rows = [row for row in rows if row["compute_units"] == compute_units]
    return str(rows[0]["model"]) if rows else f"unknown (PCI {pci_id})"


def _fits(row: Mapping[str, Any], pci_id: str, memory_bytes: int, partition: Mapping[str, str]) -> bool:
    known = {str(entry).lower() for entry in row.get("pci_ids", ())}
    nominal = int(row.get("memory_bytes", 0))
    wanted = row.get("partition", WHOLE)
    return (
        pci_id.lower() in known
        and (not nominal or abs(memory_bytes - nominal) <= 0.08 * nominal)
        and all(partition.get(name, mode) == mode for name, mode in wanted.items())
    )


def device_table() -> list[dict[str, Any]]:
    """The rows of tests/acceptance/devices.json: here is a link to it, and in the wheel a copy."""
    return _table("devices")


def unreadable_table() -> list[dict[str, Any]]:
    """What a driver or a library's release does not tell: rows of the same file."""
    return _table("unreadable")


def _table(name: str) -> list[dict[str, Any]]:
    path = Path(__file__).with_name("devices.json")
    if not path.exists():  # the package alone was copied, without the suites
        return []
    return list(_parsed(path.read_bytes())[name])


@functools.lru_cache(maxsize=2)
def _parsed(text: bytes) -> dict[str, list[dict[str, Any]]]:
    """Each verdict asks for the table, and a fleet has ten thousand."""
    found: dict[str, list[dict[str, Any]]] = json.loads(text)
    return found


def _nvls(vendor: Vendor) -> Nvls:
    if vendor != "nvidia":
        return "unavailable"
    return "off" if os.environ.get("NCCL_NVLS_ENABLE") == "0" else "on"


def cpu_model() -> str:
    """The processor's name as the kernel gives it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
