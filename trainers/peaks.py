"""Dense peak performance of accelerators, by their datasheets. In: a device's name. Out: its Peak, or a
refusal.

There is no default: pytorch/torchtitan takes an unknown device for an A100, and users saw an MFU of 152 %
(torchtitan#4779). A peak is of one device as torch counts it; for MI250 and MI250X that is half a card (a
GCD).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from errors import RefusedError

if TYPE_CHECKING:
    from world import World


@dataclass(frozen=True, kw_only=True)
class Peak:
    """TFLOP/s without sparsity; None: the device has no such format. `fnuz`: its FP8 has no negative zero."""

    model: str
    bf16: float | None
    fp8: float | None
    unit: str
    source: str
    fnuz: bool = False


NVIDIA_H = "nvidia.com H100/H200 datasheets, without sparsity"
AMD = "amd.com Instinct datasheets, without sparsity"

PEAKS: tuple[tuple[str, Peak], ...] = (
    ("NVIDIA H200 NVL", Peak(model="H200-NVL", bf16=835.5, fp8=1671.0, unit="card", source=NVIDIA_H)),
    ("NVIDIA H200", Peak(model="H200", bf16=989.5, fp8=1979.0, unit="card", source=NVIDIA_H)),
    ("NVIDIA H100 80GB HBM3", Peak(model="H100", bf16=989.5, fp8=1979.0, unit="card", source=NVIDIA_H)),
    ("NVIDIA GH200 480GB", Peak(model="GH200", bf16=989.5, fp8=1979.0, unit="card", source=NVIDIA_H)),
    (
        "NVIDIA B200",
        Peak(model="B200", bf16=2250.0, fp8=4500.0, unit="card", source="nvidia.com B200 datasheet"),
    ),
    (
        "NVIDIA A100-SXM4",
        Peak(model="A100", bf16=312.0, fp8=None, unit="card", source="nvidia.com A100 datasheet"),
    ),
    ("AMD Instinct MI250X", Peak(model="MI250X", bf16=191.5, fp8=None, unit="GCD", source=AMD)),
    ("AMD Instinct MI250", Peak(model="MI250", bf16=181.0, fp8=None, unit="GCD", source=AMD)),
    (
        "AMD Instinct MI300X",
        Peak(model="MI300X", bf16=1307.4, fp8=2614.9, unit="card", source=AMD, fnuz=True),
    ),
    (
        "AMD Instinct MI325X",
        Peak(model="MI325X", bf16=1307.4, fp8=2614.9, unit="card", source=AMD, fnuz=True),
    ),
    ("AMD Instinct MI355X", Peak(model="MI355X", bf16=2500.0, fp8=5000.0, unit="card", source=AMD)),
)
CPU = Peak(model="CPU", bf16=None, fp8=None, unit="host", source="no peak is claimed for a CPU")


def find(world: World) -> Peak:
    """The peak of this rank's device."""
    return named(torch.cuda.get_device_name(world.device)) if world.gpu else CPU


def named(name: str) -> Peak:
    """The peak of the device with this name: the first entry that the name begins with."""
    matches = [peak for start, peak in PEAKS if name.startswith(start)]
    if not matches:
        known = ", ".join(peak.model for _, peak in PEAKS)
        raise RefusedError(
            f"no peak known for device {name!r}, known: {known}; add it to trainers/peaks.py, with a source"
        )
    return matches[0]
