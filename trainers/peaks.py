"""Dense peak performance of accelerators, by their datasheets. In: a device. Out: its Peak, or a refusal.

The rows are those of the suites (`tests/acceptance/devices.json`, which lies beside this folder). Which row
is this device's, the first of these decides:

1. `$STACKCHECK_DEVICE_MODEL`: the suites name the model that they found, and so can you.
2. The PCI id that the kernel shows for the device.
3. Architecture, compute units and memory, and among several rows the marketing name, if there is one. A
   container on ROCm often has none (ROCm/TheRock#4693). If the name does not decide, the highest peak does,
   so that no share of a peak is reported too high. A peak that nobody publishes may be the highest.

There is no default: pytorch/torchtitan takes an unknown device for an A100, and users saw an MFU of 152 %
(torchtitan#4779). A peak is of one device as torch counts it; for MI250 and MI250X that is half a card (a
GCD), and of a partitioned GPU one partition.
"""

from __future__ import annotations

import functools
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from world import World

TABLE = Path(__file__).resolve().parents[1] / "tests/acceptance/devices.json"
VARIABLE = "STACKCHECK_DEVICE_MODEL"
SYS = Path("/sys")
MEMORY_TOLERANCE = 0.08  # as the suites have it; drivers and ECC reserve the rest
FNUZ = "gfx94"  # MI300's FP8 has no negative zero


@dataclass(frozen=True, kw_only=True)
class Peak:
    """TFLOP/s without sparsity; None: it has no such format, or nobody publishes the figure.

    `fnuz`: its FP8 has no negative zero.
    """

    model: str
    bf16: float | None
    fp8: float | None
    unit: str
    source: str
    fnuz: bool = False


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What torch and the kernel show of a device. `pci_id` is "1002:74a1", or None if nothing shows it."""

    name: str
    arch: str
    compute_units: int
    memory_bytes: int
    pci_id: str | None = None


CPU = Peak(model="CPU", bf16=None, fp8=None, unit="host", source="no peak is claimed for a CPU")


def find(world: World) -> Peak:
    """The peak of this rank's device."""
    if not world.gpu:
        return CPU
    model = os.environ.get(VARIABLE)
    return of_model(model) if model else of_device(seen(world.device))


def of_model(model: str) -> Peak:
    """The peak of a model of devices.json, "MI300X" or "MI300X-CPX-NPS4".

    Raises:
        RefusedError: There is no such row.
    """
    for row in table():
        if row["model"] == model:
            return _peak(row)
    raise _unknown(f"model {model!r} of ${VARIABLE}")


def of_device(device: Seen) -> Peak:
    """The peak of a device that nobody named.

    Raises:
        RefusedError: No row fits.
    """
    by_id = [row for row in table() if device.pci_id and device.pci_id in row["pci_ids"]]
    rows = [row for row in by_id or table() if _fits(row, device)]
    if not rows:
        raise _unknown(f"device {device}")
    named = [row for row in rows if _mentions(device.name, row["model"])]
    # Of "H200" and "H200-NVL" the longer one is meant, if the name has both.
    longest = max((len(row["model"]) for row in named), default=0)
    left = [row for row in named if len(row["model"]) == longest] or rows
    return _peak(max(left, key=lambda row: float(row["peak_tflops"].get("bf16", math.inf))))


def seen(device: torch.device) -> Seen:
    """The device as torch and the kernel show it."""
    shown = torch.cuda.get_device_properties(device)
    gfx = str(getattr(shown, "gcnArchName", "")).split(":")[0]
    return Seen(
        name=shown.name,
        arch=gfx if gfx.startswith("gfx") else f"sm_{shown.major}{shown.minor}",
        compute_units=shown.multi_processor_count,
        memory_bytes=shown.total_memory,
        pci_id=_pci_id(shown),
    )


@functools.cache
def table() -> Sequence[Mapping[str, Any]]:
    """The rows of devices.json for GPUs. Raises `RefusedError` if the file is not there."""
    if not TABLE.exists():
        raise RefusedError(f"{TABLE} is missing: trainers/ needs tests/ beside it, or run with --device cpu")
    return [row for row in json.loads(TABLE.read_text())["devices"] if row["vendor"] != "cpu"]


def _fits(row: Mapping[str, Any], device: Seen) -> bool:
    nominal = int(row["memory_bytes"])
    close = abs(device.memory_bytes - nominal) <= MEMORY_TOLERANCE * nominal
    # A row without compute units is of a product of which nobody publishes them.
    units = row["compute_units"] in (None, device.compute_units)
    return close and units and row["arch"] == device.arch


def _mentions(name: str, model: str) -> bool:
    """Whether a marketing name has every word of a model: "NVIDIA H100 NVL" has those of H100-NVL."""
    return all(word in name for word in model.split("-"))


def _peak(row: Mapping[str, Any]) -> Peak:
    published = row["sources"].get("peak_tflops")
    return Peak(
        model=row["model"],
        bf16=row["peak_tflops"].get("bf16"),
        fp8=row["peak_tflops"].get("fp8"),
        unit=row.get("unit", "card"),
        source=f"{published}, without sparsity" if published else "nobody publishes a peak of this device",
        fnuz=row["arch"].startswith(FNUZ),
    )


def _pci_id(shown: Any) -> str | None:
    """By the kernel's file for the device's address; torch before 2.8 gives no address on ROCm."""
    bus = getattr(shown, "pci_bus_id", None)
    if bus is None:
        return None
    address = f"{getattr(shown, 'pci_domain_id', 0):04x}:{bus:02x}:{getattr(shown, 'pci_device_id', 0):02x}.0"
    files = [SYS / "bus/pci/devices" / address / name for name in ("vendor", "device")]
    if not all(file.exists() for file in files):
        return None
    return ":".join(file.read_text().strip().removeprefix("0x") for file in files)


def _unknown(what: str) -> RefusedError:
    known = ", ".join(row["model"] for row in table())
    return RefusedError(
        f"no peak known for {what}, known: {known}; add it to tests/acceptance/devices.json, with its"
        f" sources, or name the model that it is: {VARIABLE}=MODEL"
    )
