"""AMD Instinct on a host: read from sysfs, so that no ROCm is needed outside the image.

In: the host's KFD and render nodes. Out: the devices, what a container needs to use them, and the kernel's
files as a user can show them: without serial numbers, with 1, 2, 3 for the numbers of GPUs and hives.

Sources: kernel documentation of the amdgpu sysfs files; the KFD topology's `properties` files.
"""

from __future__ import annotations

import base64
import errno
import fnmatch
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from stackcheck.vendors import (
    UNLIMITED_PINNING,
    ContainerNeeds,
    HostDevice,
    LaunchWords,
    anonymous_id,
    model_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SYS = Path("/sys")
DEV = Path("/dev")
SCRATCH = "HSA_NO_SCRATCH_RECLAIM"
RECLAIMING_MEC = 177  # public launch scripts for MI300X, which name the notes of ROCm 6.4.3
ROCBLAS = "/usr/lib/*/rocblas/*/library/*{arch}*"


def present() -> bool:
    """Whether a KFD node with compute units is visible."""
    return bool(devices())


def driver() -> str | None:
    """The amdgpu module's version; in-tree modules carry none, then their source version."""
    module = SYS / "module" / "amdgpu"
    return _text(module / "version") or _text(module / "srcversion")


def kernel_module() -> str:
    """The same module whether it comes with the kernel or from AMD's DKMS package."""
    return "amdgpu"


def devices() -> tuple[HostDevice, ...]:
    """Every GPU, or partition of one, that the kernel offers for compute, in PCI order."""
    gpus = _gpus()
    parts = Counter(_card(node) for node in gpus)  # the nodes of one GPU's partitions share its PCI address
    return tuple(_device(node, parts[_card(node)]) for node in gpus)


def addresses() -> Mapping[str, str]:
    """By the KFD's nodes; the partitions of one GPU have its address."""
    return {_id(node): _card(node).resolve().name for node in _gpus()}


def busy() -> Mapping[str, float | None]:
    """By the kernel's `gpu_busy_percent`, which all partitions of a GPU share."""
    shares = {_id(node): _text(_card(node) / "gpu_busy_percent") for node in _gpus()}
    return {name: int(share) / 100 if share and share.isdigit() else None for name, share in shares.items()}


def partition() -> str | None:
    """Compute and memory partition of the first device (SPX/NPS1 is the reference for training)."""
    for card in sorted((SYS / "class/drm").glob("renderD*/device")):
        compute = _text(card / "current_compute_partition")
        if compute:
            return f"{compute}/{_text(card / 'current_memory_partition') or 'unknown'}"
    return None


def container_needs() -> ContainerNeeds:
    """KFD and the render nodes, by path, with the numeric groups that own them on this host.

    Group names inside an image map to other numbers (ROCm-docker#90, #116), so numbers are passed.
    Scratch memory is kept where a GPU's MEC firmware cannot reclaim it, which no image can know.
    """
    nodes = [DEV / "kfd", *sorted((DEV / "dri").glob("renderD*"))]
    there = [node for node in nodes if node.exists()]
    return ContainerNeeds(
        devices=tuple(str(node) for node in there),
        groups=tuple(sorted({node.stat().st_gid for node in there} - {0})),
        env=((SCRATCH, "1"),) if any(map(_keeps_scratch, _gpus())) else (),
        ulimits=UNLIMITED_PINNING if there else (),
        remark=f"AMD: {len(there)} device nodes by path, default seccomp profile",
    )


def launch_words() -> LaunchWords:
    """The nodes, and the groups that own them there.

    Not Apptainer's `--rocm`: it puts the host's ROCm over the image's, which is what was certified.
    """
    nodes = ("--device=/dev/kfd", "--device=/dev/dri")
    owners = ("/dev/kfd", "/dev/dri/renderD*")
    return LaunchWords(
        docker=(*nodes, *(f'--group-add="$(stat -c %g {node} | head -n 1)"' for node in owners)),
        podman=(*nodes, "--group-add=keep-groups", "--security-opt=label=disable"),
        apptainer=("--bind=/dev/kfd", "--bind=/dev/dri", "--bind=/sys"),
        resource="amd.com/gpu",
    )


def visibility() -> Mapping[str, str | None]:
    """ROCr's, HIP's and OpenCL's choices; HIP obeys CUDA's too. AMD's container toolkit gives all."""
    hiding = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
    return {**dict.fromkeys(hiding), "AMD_VISIBLE_DEVICES": "all"}


def kernel_files(archs: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Debian's rocBLAS has files for ten architectures, 1.9 GB; what names no architecture stays."""
    return (ROCBLAS.format(arch="gfx"),), tuple(ROCBLAS.format(arch=arch) for arch in archs)


def _gpus() -> list[dict[str, int]]:
    nodes = sorted((SYS / "class/kfd/kfd/topology/nodes").glob("*"), key=lambda path: int(path.name))
    every = [_properties(node) for node in nodes]
    return [node for node in every if node.get("simd_count", 0)]  # the others are processors


def _id(properties: dict[str, int]) -> str:
    return anonymous_id(_uuid(_text(_card(properties) / "unique_id"), properties))


def _device(properties: dict[str, int], parts: int) -> HostDevice:
    card = _card(properties)
    memory = int(_text(card / "mem_info_vram_total") or 0) // parts
    cap = _text(next(iter(sorted(card.glob("hwmon/hwmon*/power1_cap"))), card / "absent"))
    modes = {name: _text(card / f"current_{name}_partition") for name in ("compute", "memory")}
    units = properties["simd_count"] // properties["simd_per_cu"] if properties.get("simd_per_cu") else None
    return HostDevice(
        model=model_of(
            f"1002:{properties.get('device_id', 0):04x}",
            memory,
            units,
            {name: mode for name, mode in modes.items() if mode},
        ),
        arch=_arch(properties),
        id=_id(properties),
        memory_bytes=memory,
        power_cap_w=int(cap) / 1e6 if cap else None,
        firmware=_text(card / "vbios_version"),
    )


def _arch(properties: dict[str, int]) -> str:
    version = properties.get("gfx_target_version", 0)
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _keeps_scratch(properties: dict[str, int]) -> bool:
    """Whether it is a gfx942 with older or unknown firmware, which gets the safe setting."""
    version = _text(_card(properties) / "fw_version/mec_fw_version") or "0"
    return _arch(properties) == "gfx942" and int(version, 0) < RECLAIMING_MEC


def _card(properties: dict[str, int]) -> Path:
    """The folder of a node's GPU: by its PCI address, because a partition's own render node has no files."""
    location, domain = properties.get("location_id", 0), properties.get("domain", 0)
    address = f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.0"
    by_address = SYS / "bus/pci/devices" / address
    by_node = SYS / "class/drm" / f"renderD{properties.get('drm_render_minor', 0)}" / "device"
    return by_address if location and by_address.exists() else by_node


def _uuid(of_card: str | None, properties: dict[str, int]) -> str:
    """As HIP and ROCr write it, and for a further partition of a GPU its number, as the suites write it."""
    number = properties.get("unique_id", 0) or int(of_card or "0", 16)
    part = properties.get("location_id", 0) >> 28  # kfd_topology.c
    return f"GPU-{number:016x}" + (f"-part{part}" if part else "")


def _properties(node: Path) -> dict[str, int]:
    lines = (_text(node / "properties") or "").splitlines()
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None


SYSFS = Path("/sys")
AMD, DISPLAY, ACCELERATOR = "0x1002", "0x03", "0x12"
BINARY = {"gpu_metrics": 1 << 16, "config": 64}  # and no serial number, which is further on in `config`
LARGEST = 1 << 16
# Below a GPU's folder. What is not named here never leaves the host.
OF_A_GPU = (
    *("available_*_partition", "current_*_partition", "current_link_*", "max_link_*", "board_info", "class"),
    *("compute_partition_config/*", "config", "device", "vendor", "revision", "subsystem_*", "uevent"),
    *("df_cntr_avail", "drm/*/dev", "drm/*/uevent", "enforce_isolation", "fw_version/*", "gpu_busy_percent"),
    *("gpu_metrics", "hwmon/*/freq*", "hwmon/*/name", "hwmon/*/power*", "hwmon/*/temp*", "local_cpulist"),
    *("manufacturer", "mem_*", "numa_node", "pcie_*", "power_dpm_*", "pp_*", "product_name", "ras/*"),
    *("thermal_throttling_logging", "unique_id", "vbios_version", "xgmi_*"),
)
OF_A_PART = ("drm/*/dev", "drm/*/uevent")
OF_THE_HOST = {
    "class/kfd/kfd/topology": ("*",),
    "module/amdgpu": ("version", "srcversion", "initstate", "refcnt"),
}
LINKS = ("bus/pci/devices/*", "bus/pci/drivers/amdgpu/*", "class/drm/*", "class/hwmon/*", "dev/char/226:*")
LINKS_OF_A_GPU = ("driver", "subsystem", "drm/*/device", "xgmi_hive_info/node*")
NUMBERS = re.compile(r"^(?:unique_id|hive_id) (\d+)$", re.MULTILINE)


def record() -> dict[str, object]:
    """Path below /sys -> its text, or an object: base64 `bytes`, a `link`, an empty `folder`, a `refused`."""
    found: dict[str, object] = dict(_files())
    numbers = _numbers(found)
    return {path: _anonymous(value, numbers) for path, value in sorted(found.items())}


def identities() -> tuple[str, ...]:
    """Every serial number and identity of this host's GPUs, as texts: no file for others may have one."""
    files = [
        path
        for gpu in _folders_of_gpus()
        for path in (gpu / "serial_number", gpu / "fru_id", gpu / "unique_id")
    ]
    told = [str(found) for path in files if isinstance(found := _read(path), str)]
    return tuple({text for text in (*told, *_numbers(dict(_files()))) if len(text) > 3})


def _files() -> Iterator[tuple[str, object]]:
    gpus, parts = _folders_of_gpus(), sorted(SYSFS.glob("devices/platform/amdgpu_xcp*"))
    folders = {**{SYSFS / path: names for path, names in OF_THE_HOST.items()}}
    folders |= {**dict.fromkeys(gpus, OF_A_GPU), **dict.fromkeys(parts, OF_A_PART)}
    for folder, names in folders.items():
        for path in sorted(folder.rglob("*")):
            if any(fnmatch.fnmatchcase(str(path.relative_to(folder)), name) for name in names):
                yield from _entry(path)
    for folder in (*gpus, *parts):
        for name in LINKS_OF_A_GPU:
            yield from _links(folder, name)
    for name in LINKS:
        yield from (
            (path, link) for path, link in _links(SYSFS, name) if _is_amd(link["link"], (*gpus, *parts))
        )


def _folders_of_gpus() -> list[Path]:
    """The folders of AMD's GPUs on the PCI bus, with or without a driver."""
    every = [path.resolve() for path in sorted((SYSFS / "bus/pci/devices").glob("*"))]
    return [
        path
        for path in every
        if _read(path / "vendor") == AMD and str(_read(path / "class")).startswith((DISPLAY, ACCELERATOR))
    ]


def _entry(path: Path) -> Iterator[tuple[str, object]]:
    place = str(path.relative_to(SYSFS))
    if path.is_dir() and not path.is_symlink():
        if not any(path.iterdir()):
            yield place, {"folder": True}
    elif path.is_file() and not path.is_symlink():
        found = _read(path)
        if found is not None:
            yield place, found


def _links(folder: Path, name: str) -> Iterator[tuple[str, dict[str, str]]]:
    for path in sorted(folder.glob(name)):
        if path.is_symlink() and path.resolve().is_relative_to(SYSFS.resolve()):
            yield str(path.relative_to(SYSFS)), {"link": str(path.resolve().relative_to(SYSFS.resolve()))}


def _is_amd(target: str, folders: tuple[Path, ...]) -> bool:
    return any((SYSFS / target).is_relative_to(folder) for folder in folders)


def _read(path: Path) -> object:
    """A text, an object for what is no text, or None where no process may read."""
    try:
        body = path.read_bytes()[: BINARY.get(path.name, LARGEST)]
    except OSError as error:
        return (
            {"refused": errno.errorcode[error.errno]} if error.errno in {errno.EINVAL, errno.EPERM} else None
        )
    if path.name in BINARY:
        return {"bytes": base64.b64encode(body).decode()}
    return body.decode("utf-8", "replace").rstrip("\n")


def _numbers(found: Mapping[str, object]) -> dict[str, str]:
    """Each identity, as the kernel writes it in decimal and hexadecimal -> its place in order, likewise."""
    texts = [text for path, text in sorted(found.items()) if isinstance(text, str) and "/nodes/" in path]
    files = [
        text for path, text in sorted(found.items()) if isinstance(text, str) and path.endswith("/unique_id")
    ]
    values = [int(number) for text in texts for number in NUMBERS.findall(text)]
    values += [int(text, 16) for text in files]
    places = {value: place for place, value in enumerate(dict.fromkeys(filter(None, values)), start=1)}
    forms = (str, "{:x}".format, "{:016x}".format)
    return {form(value): form(place) for value, place in places.items() for form in forms}


def _anonymous(value: object, numbers: Mapping[str, str]) -> object:
    if not isinstance(value, str):
        return value
    for known, place in sorted(numbers.items(), key=lambda pair: -len(pair[0])):
        value = re.sub(rf"(?<![0-9a-fA-F]){known}(?![0-9a-fA-F])", place, value)
    return value
