"""A fabricated host from the file of `stackcheck first-host`. In: its `kernel_files`. Out: state and tree.

What the files show at one time is replayed: no event, and no counter that grows.
"""

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fakeamd import products, sysfs
from fakeamd.rootfs import FakeAmdError
from fakeamd.states import Change, HostState
from fakeamd.tree import Entry, Folder, Link, Refusing, Tree

Files = Mapping[str, Any]
GPU = re.compile(r"bus/pci/devices/(.+)")
NODE = re.compile(r"class/kfd/kfd/topology/nodes/(\d+)/properties")


def load(path: Path) -> Files:
    """The kernel's files in what a user attached to an issue."""
    found: Files = json.loads(path.read_text(encoding="utf-8"))["kernel_files"]
    return found


def tree(files: Files) -> Tree:
    """Everything below /sys: the recorded files, and of this machine what no GPU has."""
    found: Tree = sysfs.machine() | {path: _entry(value) for path, value in files.items()}
    if "module/amdgpu/initstate" in files:
        found |= {"devices/virtual/kfd/kfd": Link("class/kfd/kfd"), "class/kfd/kfd/proc": Folder()}
    return found


def state(files: Files) -> HostState:
    """What the device nodes and the DRM ioctls answer for, which have no files."""
    gpus = [value["link"] for path, value in sorted(files.items()) if GPU.fullmatch(path)]
    if not gpus:
        raise FakeAmdError("the file has no AMD GPU: it was made on another host")
    first = gpus[0]
    memory = {place: int(files.get(f"{gpu}/mem_info_vram_total", 0)) for place, gpu in enumerate(gpus)}
    unbound = tuple(place for place, gpu in enumerate(gpus) if f"{gpu}/driver" not in files)
    nodes = {int(match[1]): files[path] for path in files if (match := NODE.fullmatch(path))}
    shown = [
        node for _, node in sorted(nodes.items()) if not isinstance(node, str) or "simd_count 0\n" not in node
    ]
    given = tuple(place for place, node in enumerate(shown) if isinstance(node, str))
    return HostState(
        name="recorded",
        product=_product(files, first),
        gpus=len(gpus),
        changes={place: Change(memory_bytes=size) for place, size in memory.items() if size},
        unbound=unbound,
        driver_loaded="module/amdgpu/initstate" in files,
        given=None if len(given) == len(shown) else given,
        compute=_mode(files, gpus, "compute", "SPX"),
        memory=_mode(files, gpus, "memory", "NPS1"),
    )


def _mode(files: Files, gpus: list[str], kind: str, usual: str) -> str:
    """The mode that every GPU has: where they differ, no one device is in several parts of its own."""
    found = {str(files.get(f"{gpu}/current_{kind}_partition", usual)) for gpu in gpus}
    return found.pop() if len(found) == 1 else usual


def _product(files: Files, gpu: str) -> products.Product:
    identity = int(files[f"{gpu}/device"], 16)
    known = [one for one in vars(products).values() if isinstance(one, products.Product)]
    alike = [one for one in known if one.device_id == identity]
    texts = " ".join(text for path, text in files.items() if NODE.fullmatch(path) and isinstance(text, str))
    counted = [one for one in alike if f"simd_count {4 * one.compute_units}\n" in f"{texts}\n"]
    if not alike:
        raise FakeAmdError(f"PCI 1002:{identity:04x} is no product of fakeamd/products.py: add it there")
    return (counted or alike)[0]


def _entry(value: Any) -> Entry:
    if isinstance(value, str):
        return value
    match value:
        case {"bytes": text}:
            return base64.b64decode(text)
        case {"link": target}:
            return Link(target)
        case {"refused": "EPERM" | "EINVAL" as error}:
            return Refusing(error)
    return Folder()
