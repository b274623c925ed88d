"""AMD Instinct on a host: read from sysfs, so that no ROCm is needed outside the image.

In: the host's KFD and render nodes. Out: the devices, and what a container needs to use them.

Sources: kernel documentation of the amdgpu sysfs files; the KFD topology's `properties` files.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from stackcheck.vendors import (
    UNLIMITED_PINNING,
    ContainerNeeds,
    HostDevice,
    LaunchWords,
    anonymous_id,
    model_of,
)
from stackcheck.vendors.kernel_module import text

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
    return text(module / "version") or text(module / "srcversion")


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
    shares = {_id(node): text(_card(node) / "gpu_busy_percent") for node in _gpus()}
    return {name: int(share) / 100 if share and share.isdigit() else None for name, share in shares.items()}


def partition() -> str | None:
    """Compute and memory partition of the first device (SPX/NPS1 is the reference for training)."""
    for card in sorted((SYS / "class/drm").glob("renderD*/device")):
        compute = text(card / "current_compute_partition")
        if compute:
            return f"{compute}/{text(card / 'current_memory_partition') or 'unknown'}"
    return None


def container_needs() -> ContainerNeeds:
    """KFD and the GPUs' render nodes, by path, with the numeric groups that own them on this host.

    A container or a job that may open only some GPUs can see the nodes of all in /dev. The kernel shows it
    the properties of its own alone (kfd_devcgroup_check_permission); an engine outside would give the
    image the others. Group names inside an image map to other numbers (ROCm-docker#90, #116), so numbers are
    passed. Scratch memory is kept where a GPU's MEC firmware cannot reclaim it, which no image can know.
    """
    own = {f"renderD{gpu.get('drm_render_minor')}" for gpu in _gpus()}
    nodes = [DEV / "kfd", *(node for node in sorted((DEV / "dri").glob("renderD*")) if node.name in own)]
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
    return anonymous_id(_uuid(text(_card(properties) / "unique_id"), properties))


def _device(properties: dict[str, int], parts: int) -> HostDevice:
    card = _card(properties)
    memory = int(text(card / "mem_info_vram_total") or 0) // parts
    cap = text(next(iter(sorted(card.glob("hwmon/hwmon*/power1_cap"))), card / "absent"))
    modes = {name: text(card / f"current_{name}_partition") for name in ("compute", "memory")}
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
        firmware=text(card / "vbios_version"),
    )


def _arch(properties: dict[str, int]) -> str:
    version = properties.get("gfx_target_version", 0)
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _keeps_scratch(properties: dict[str, int]) -> bool:
    """Whether it is a gfx942 with older or unknown firmware, which gets the safe setting."""
    version = text(_card(properties) / "fw_version/mec_fw_version") or "0"
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
    lines = (text(node / "properties") or "").splitlines()
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
