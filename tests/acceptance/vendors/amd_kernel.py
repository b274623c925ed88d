"""AMD GPUs by the kernel's own files, for what the library does not report. In: /sys, /dev. Out: plain facts.

The KFD's topology has the architecture and compute units, which amdsmi reports only from 6.4 on. The PCI bus
shows GPUs without a driver. `gpu_metrics` v1.3 (MI200) has the throttle reasons; amdsmi reports only whether
there is one.
"""

import functools
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vendors import kernel_files

SYS = Path("/sys")
DEV = Path("/dev")
AMD = "0x1002"
# GT/s of a lane of PCI Express, as the kernel writes them.
GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
XGMI = 11  # CRAT_IOLINK_TYPE_XGMI of the kernel's kfd_crat.h
COMPUTE_CLASSES = ("0x1200", "0x0380")  # processing accelerator (MI300), other display controller (MI200)

# struct gpu_metrics_v1_3 of the kernel's kgd_pp_interface.h: the last eight bytes; bits of amdgpu_smu.h.
METRICS_V1_3 = (1, 3)
THROTTLE_OFFSET = 112
NORMAL_THROTTLES = {
    **{bit: f"PPT{bit}" for bit in range(4)},
    4: "SPL",
    5: "FPPT",
    6: "SPPT",
    7: "SPPT APU",
    16: "TDC GFX",
    17: "TDC SOC",
    18: "TDC MEM",
    22: "EDC GFX",
}
UNFIT_THROTTLES = {
    32: "GPU temperature", 34: "memory temperature", 35: "edge temperature", 36: "hotspot temperature",
    37: "SOC temperature", 38: "VR GFX temperature", 39: "VR SOC temperature", 40: "VR memory temperature",
    44: "VR hot", 45: "VR hot", 47: "PROCHOT GFX",
}  # fmt: skip


@dataclass(frozen=True)
class Node:
    """One KFD node with compute units: a GPU, or a partition of one."""

    number: int
    bdf: str
    partition: int  # 0 of a whole GPU
    properties: Mapping[str, int]
    memory_bytes: int  # of its memory banks; 0 if the kernel lists none


@functools.cache  # the nodes do not change during the life of the child that reads them
def nodes() -> tuple[Node, ...]:
    """The KFD's nodes in the order in which ROCr numbers devices.

    In a container the kernel refuses to read a node whose render node the container may not open
    (kfd_topology.c: kfd_devcgroup_check_permission, EPERM). ROCr leaves such a node out, and so does this.
    """
    folder = SYS / "class/kfd/kfd/topology/nodes"
    paths = sorted(folder.glob("*"), key=lambda node: int(node.name)) if folder.is_dir() else []
    return tuple(node for path in paths for node in _node(path) if node.properties.get("simd_count", 0))


def node_of(bdf: str, partition: int) -> Node | None:
    """The node of a device; None if this container may not use it.
    amdsmi may put the partition's number in the last digit of the address, and the KFD never does.
    """
    slot = bdf.rpartition(".")[0]
    found = [node for node in nodes() if node.bdf.rpartition(".")[0] == slot and node.partition == partition]
    return found[0] if found else None


def are_linked(one: Node | None, other: Node | None) -> bool:
    """Whether the KFD lists xGMI between two devices.
    Releases of the library lose count of the nodes where a container may not read all of them.
    """
    if one is None or other is None:
        return False
    folder = SYS / "class/kfd/kfd/topology/nodes" / str(one.number) / "io_links"
    links = (_link(path) for path in folder.glob("*/properties"))
    return any(link.get("type") == XGMI and link.get("node_to") == other.number for link in links)


def order(node: Node | None) -> int:
    """The number that ROCr gives to a device; after all others if the KFD does not list it."""
    return nodes().index(node) if node else len(nodes())


def is_ours(node: Node | None) -> bool:
    """Whether this container may use a device of the library's list: sysfs shows it every GPU of the host.

    True where the kernel lists nothing, so that the library's own answer is judged.
    """
    if node is None:
        return not nodes()
    minor = node.properties.get("drm_render_minor", 0)
    shown = {path.name for path in render_nodes()}
    return not shown or not minor or f"renderD{minor}" in shown


def architecture(node: Mapping[str, int]) -> str:
    """ "gfx942" of 90402: major, minor and step in decimal pairs, the last two digits in hexadecimal."""
    number = node.get("gfx_target_version", 0)
    return f"gfx{number // 10000}{number // 100 % 100:x}{number % 100:x}" if number else ""


def compute_units(node: Mapping[str, int]) -> int | None:
    """The number of SIMDs over the SIMDs per compute unit."""
    per_unit = node.get("simd_per_cu", 0)
    return node["simd_count"] // per_unit if per_unit else None


def slot_generation(bdf: str) -> int | None:
    """The PCI Express generation of the slowest port above a device; None if the kernel tells of none."""
    ports = (SYS / "bus/pci/devices" / bdf).resolve().parents
    speeds = [kernel_files.text(port / "max_link_speed").split(" ")[0] for port in ports]
    return min((GENERATIONS[speed] for speed in speeds if speed in GENERATIONS), default=None)


def unheld() -> tuple[str, ...]:
    """AMD compute devices on the PCI bus that neither amdgpu nor a virtual machine uses."""
    found = kernel_files.drivers(SYS, AMD, COMPUTE_CLASSES)
    return tuple(
        bdf for bdf, driver in found.items() if driver not in ("amdgpu", kernel_files.PASSED_THROUGH)
    )


def driver() -> str | None:
    """The version of the amdgpu module; in the kernel's own tree it has none, then its sources' checksum."""
    module = SYS / "module/amdgpu"
    found = (
        kernel_files.text(module / name) for name in ("version", "srcversion") if (module / name).exists()
    )
    return next((text for text in found if text), None)


def render_nodes() -> tuple[Path, ...]:
    """The render nodes that this container or machine offers."""
    return tuple(sorted((DEV / "dri").glob("renderD*")))


def used_bytes(bdf: str) -> int | None:
    """What is in use of a GPU's memory, all partitions together; None if there is no such file."""
    used = kernel_files.text(SYS / "bus/pci/devices" / bdf / "mem_info_vram_used")
    return int(used) if used else None


def mode(bdf: str, name: str) -> str:
    """The compute or memory mode in the kernel's file; "" if there is no such file."""
    return kernel_files.text(SYS / "bus/pci/devices" / bdf / f"current_{name}_partition")


def power_cap_w(bdf: str) -> float | None:
    """The power cap in the kernel's file; None if there is no such file."""
    for cap in sorted((SYS / "bus/pci/devices" / bdf / "hwmon").glob("hwmon*/power1_cap")):
        return int(kernel_files.text(cap)) / 1e6
    return None


def throttles(bdf: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """(unfit, normal) reasons of an MI200; None if its file has another revision."""
    path = SYS / "bus/pci/devices" / bdf / "gpu_metrics"
    record = path.read_bytes() if path.exists() else b""
    if tuple(record[2:4]) != METRICS_V1_3 or len(record) < THROTTLE_OFFSET + 8:
        return None
    (word,) = struct.unpack_from("<Q", record, THROTTLE_OFFSET)
    if word == 0xFFFFFFFFFFFFFFFF:
        return None
    known = UNFIT_THROTTLES.keys() | NORMAL_THROTTLES.keys()
    others = tuple(f"throttle bit {bit}" for bit in range(64) if word >> bit & 1 and bit not in known)
    return (*_named(word, UNFIT_THROTTLES), *others), _named(word, NORMAL_THROTTLES)


def _named(word: int, names: Mapping[int, str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for bit, name in names.items() if word >> bit & 1))


def _node(path: Path) -> Iterator[Node]:
    try:
        found = _properties(path / "properties")
        domain, place = found.get("domain", 0), found.get("location_id", 0)
        bdf = f"{domain:04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
        banks = (_properties(bank) for bank in path.glob("mem_banks/*/properties"))
        memory = sum(bank.get("size_in_bytes", 0) for bank in banks)
        yield Node(int(path.name), bdf, place >> 28, found, memory)
    except PermissionError:
        return


def _link(path: Path) -> dict[str, int]:
    try:
        return _properties(path)
    except PermissionError:  # it leads to a device that this container may not use
        return {}


def _properties(path: Path) -> dict[str, int]:
    words = (line.partition(" ") for line in kernel_files.text(path).splitlines())
    return {name: int(value) for name, _, value in words if value.strip().isdigit()}


def gpudirect(root: Path) -> Mapping[str, bool | None]:
    """Peer memory of AMD's driver, or dma-buf: where RCCL looks for them.

    The folder of a peer's client moved with the module. Some kernels have the interface built in, and only
    its symbol shows it.
    """
    clients = (root / place / "memory_peers/amdkfd" for place in ("sys/kernel/mm", "sys/kernel", "sys"))
    built_in = "ib_register_peer_memory_client" in kernel_files.text(root / "proc/kallsyms")
    is_new = kernel_files.release(root) >= kernel_files.DMA_BUF_SINCE
    options = kernel_files.has_options(root, "CONFIG_DMABUF_MOVE_NOTIFY", "CONFIG_PCI_P2PDMA")
    return {
        "amdkfd peer memory": built_in or any(client.exists() for client in clients),
        "dma-buf": options and is_new,
    }
