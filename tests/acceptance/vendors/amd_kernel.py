"""AMD GPUs by the kernel's own files, for what the library does not report. In: /sys, /dev. Out: plain facts.

The KFD's topology has the architecture and compute units, which amdsmi reports only from 6.4 on. The PCI bus
shows GPUs without a driver. `gpu_metrics` v1.3 (MI200) has the throttle reasons; amdsmi reports only whether
there is one.
"""

import functools
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from vendors import kernel_files

SYS = Path("/sys")
DEV = Path("/dev")
AMD = "0x1002"
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
    32: "GPU temperature",
    34: "memory temperature",
    35: "edge temperature",
    36: "hotspot temperature",
    37: "SOC temperature",
    38: "VR GFX temperature",
    39: "VR SOC temperature",
    40: "VR memory temperature",
    44: "VR hot",
    45: "VR hot",
    47: "PROCHOT GFX",
}


@functools.cache  # the nodes do not change during the life of the child that reads them
def topology() -> Mapping[str, Mapping[str, int]]:
    """PCI address -> properties of its KFD node, in the order in which ROCr numbers devices."""
    folder = SYS / "class/kfd/kfd/topology/nodes"
    nodes = sorted(folder.glob("*"), key=lambda node: int(node.name)) if folder.is_dir() else []
    every = (_properties(node / "properties") for node in nodes)
    return {_bdf(node): node for node in every if node.get("simd_count", 0) > 0}


def architecture(node: Mapping[str, int]) -> str:
    """ "gfx942" of 90402: major, minor and step in decimal pairs, the last two digits in hexadecimal."""
    number = node.get("gfx_target_version", 0)
    return f"gfx{number // 10000}{number // 100 % 100:x}{number % 100:x}" if number else ""


def compute_units(node: Mapping[str, int]) -> int | None:
    """The number of SIMDs over the SIMDs per compute unit."""
    per_unit = node.get("simd_per_cu", 0)
    return node["simd_count"] // per_unit if per_unit else None


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


def _bdf(node: Mapping[str, int]) -> str:
    location = node.get("location_id", 0)
    return f"{node.get('domain', 0):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"


def _properties(path: Path) -> dict[str, int]:
    return dict(_pairs(kernel_files.text(path)))


def _pairs(text: str) -> Iterator[tuple[str, int]]:
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if value.strip().isdigit():
            yield name, int(value)
