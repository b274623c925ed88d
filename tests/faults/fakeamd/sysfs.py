"""Everything below /sys on a fabricated host: the machine, the PCI bus, the amdgpu driver and its DRM nodes.

In: a `HostState` and the revision of gpu_metrics that the library reads. Out: the tree.
"""

import os
from collections.abc import Mapping

from fakeamd import board, gpu_metrics, kfd, telemetry
from fakeamd.products import Product
from fakeamd.states import Change, HostState
from fakeamd.tree import Entry, Folder, Link, Tree

DRM_MAJOR = 226
EMPTY_CLASSES = (
    "class/net", "class/misc", "class/scsi_host", "class/pci_bus", "bus/event_source/devices",
    "bus/pci/drivers/amdgpu", "kernel/debug/dri",
)  # fmt: skip
MODULE = {"initstate": "live", "refcnt": "0", "srcversion": "85F6A8C2CC7AEEAF1C3BD41"}


def tree(state: HostState, metrics_revision: int) -> Tree:
    """Everything below /sys."""
    files = machine()
    for gpu in range(state.gpus):
        files |= _pci_device(state, gpu)
    if state.driver_loaded:
        version = {"version": state.driver} if state.driver else {}
        files |= {f"module/amdgpu/{name}": text for name, text in {**MODULE, **version}.items()}
        files |= kfd.topology(state)
        for gpu in kfd.bound(state):
            files |= _driven_device(state, gpu, metrics_revision)
    return _changed(files, state.host_files)


def machine() -> Tree:
    """Processors as in the KFD; NUMA node 0 has every CPU of this machine, whose /proc is the real one."""
    files: Tree = {name: Folder() for name in EMPTY_CLASSES}
    files |= {f"devices/system/cpu/{name}": "0-3" for name in ("online", "possible", "present")}
    for cpu in range(4):
        files[f"devices/system/cpu/cpu{cpu}/topology/physical_package_id"] = str(cpu // 2)
        files[f"devices/system/cpu/cpu{cpu}/topology/core_id"] = str(cpu)
    nodes = {"node0/cpulist": f"0-{(os.cpu_count() or 1) - 1}", "node1/cpulist": "", "online": "0-1"}
    return files | {f"devices/system/node/{name}": text for name, text in nodes.items()}


def _pci_device(state: HostState, gpu: int) -> Tree:
    """What the PCI bus says, with or without a driver."""
    product, here = state.product, kfd.device_folder(gpu)
    files = {
        "vendor": "0x1002",
        "device": f"{product.device_id:#06x}",
        "subsystem_vendor": "0x1002",
        "subsystem_device": f"{product.device_id:#06x}",
        "revision": "0x00",
        "class": "0x120000",
        "numa_node": str(kfd.processor_of(state, gpu)),
        "local_cpulist": "0-3",
        "current_link_speed": f"{product.pcie_gt_per_s}.0 GT/s PCIe",
        "max_link_speed": f"{product.pcie_gt_per_s}.0 GT/s PCIe",
        "current_link_width": "16",
        "max_link_width": "16",
        "uevent": _uevent(product, gpu, driven=state.driver_loaded and gpu not in state.unbound),
    }
    config = bytes.fromhex("0210") + product.device_id.to_bytes(2, "little") + bytes(7) + b"\x12" + bytes(52)
    tree: Tree = {f"{here}/{name}": text for name, text in files.items()}
    return tree | {
        f"{here}/config": config,
        f"{here}/subsystem": Link("bus/pci"),
        f"bus/pci/devices/{kfd.bdf(gpu)}": Link(here),
    }


def _uevent(product: Product, gpu: int, *, driven: bool) -> str:
    identity = f"1002:{product.device_id:04X}"
    lines = [
        "PCI_CLASS=120000",
        f"PCI_ID={identity}",
        f"PCI_SUBSYS_ID={identity}",
        f"PCI_SLOT_NAME={kfd.bdf(gpu)}",
    ]
    return "\n".join((["DRIVER=amdgpu"] if driven else []) + lines)


def _driven_device(state: HostState, gpu: int, library_revision: int) -> Tree:
    here, change = kfd.device_folder(gpu), state.changes.get(gpu, Change())
    files = board.files(state, gpu) | telemetry.sensors(state, gpu)
    revision = telemetry.revision_of(state.product, library_revision)
    files["gpu_metrics"] = gpu_metrics.encode(revision, telemetry.metrics(state, gpu) | change.metrics)
    tree: Tree = {f"{here}/{path}": entry for path, entry in _changed(files, change.files).items()}
    return tree | _nodes(state, gpu) | _links_to(gpu)


def _changed(files: Tree, changes: Mapping[str, Entry | None]) -> Tree:
    return {path: entry for path, entry in {**files, **changes}.items() if entry is not None}


def _nodes(state: HostState, gpu: int) -> Tree:
    """The DRM nodes, numbered without gaps: the older library stops at the first missing card.

    Only a GPU's first part has its nodes in the PCI device; the others hang on empty platform devices.
    """
    files: Tree = {}
    for part in range(state.parts):
        index = kfd.devices(state).index((gpu, part))
        here = kfd.device_folder(gpu) if part == 0 else f"devices/platform/amdgpu_xcp_{index}"
        for name, minor in ((f"card{index}", index), (f"renderD{128 + index}", 128 + index)):
            node = f"{here}/drm/{name}"
            files[f"{node}/dev"] = f"{DRM_MAJOR}:{minor}"
            files[f"{node}/uevent"] = (
                f"MAJOR={DRM_MAJOR}\nMINOR={minor}\nDEVNAME=dri/{name}\nDEVTYPE=drm_minor"
            )
            files |= {
                f"{node}/device": Link(here),
                f"class/drm/{name}": Link(node),
                f"dev/char/{DRM_MAJOR}:{minor}": Link(node),
            }
    return files


def _links_to(gpu: int) -> Tree:
    here = kfd.device_folder(gpu)
    return {
        f"{here}/driver": Link("bus/pci/drivers/amdgpu"),
        f"bus/pci/drivers/amdgpu/{kfd.bdf(gpu)}": Link(here),
        f"class/hwmon/hwmon{gpu}": Link(f"{here}/hwmon/hwmon{gpu}"),
        f"{kfd.device_folder(0)}/xgmi_hive_info/node{gpu + 1}": Link(here),
    }
