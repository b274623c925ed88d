"""The files of the amdgpu driver: PCI devices, DRM nodes, sensors, RAS, partitions, xGMI.

In: a `HostState` and the revision of gpu_metrics that the library reads. Out: the tree below /sys.
Formats: the kernel's amdgpu documentation and sources; values are made up (docs/amd.md).
"""

import os

from fakeamd import gpu_metrics, kfd
from fakeamd.gpu_metrics import Value
from fakeamd.products import Product
from fakeamd.states import Change, HostState
from fakeamd.tree import Folder, Link, Tree

DRM_MAJOR = 226
EMPTY_CLASSES = (
    "class/net",
    "class/misc",
    "class/scsi_host",
    "class/pci_bus",
    "bus/event_source/devices",
    "bus/pci/drivers/amdgpu",
    "kernel/debug/dri",
)
RAS_BLOCKS = ("umc", "sdma", "gfx", "mmhub", "xgmi_wafl", "pcie_bif", "hdp")
FIRMWARE = [
    "asd",
    "mc",
    "mec",
    "mec2",
    "rlc",
    "rlc_srlc",
    "rlc_srlg",
    "rlc_srls",
    "sdma",
    "sdma2",
    "smc",
    "sos",
    "ta_ras",
    "ta_xgmi",
    "vcn",
]
USED_BYTES = 297795584
MODULE = {"initstate": "live", "version": "6.12.12", "refcnt": "0"}  # the driver of ROCm 6.4


def tree(state: HostState, metrics_revision: int) -> Tree:
    """Everything below /sys."""
    files: Tree = _machine() | {name: Folder() for name in EMPTY_CLASSES}
    for gpu in range(state.gpus):
        files |= _pci_device(state, gpu)
    if state.driver_loaded:
        files |= {f"module/amdgpu/{name}": text for name, text in MODULE.items()}
        files |= kfd.topology(state)
        for gpu in kfd.bound(state):
            files |= _driven_device(state, gpu, metrics_revision)
    for path, entry in state.host_files.items():
        files.pop(path, None)
        if entry is not None:
            files[path] = entry
    return files


def device_folder(gpu: int) -> str:
    """A GPU's own folder, behind the root port of its bus."""
    bus = kfd.BUSES[gpu]
    return f"devices/pci0000:{bus - 1:02x}/0000:{bus - 1:02x}:01.1/{bdf(gpu)}"


def bdf(gpu: int) -> str:
    """A GPU's PCI address."""
    return f"0000:{kfd.BUSES[gpu]:02x}:00.0"


def _machine() -> Tree:
    """Processors as in the KFD; NUMA node 0 has every CPU of this machine, whose /proc the command really sees."""
    files: Tree = {f"devices/system/cpu/{name}": "0-3" for name in ("online", "possible", "present")}
    for cpu in range(4):
        files[f"devices/system/cpu/cpu{cpu}/topology/physical_package_id"] = str(cpu // 2)
        files[f"devices/system/cpu/cpu{cpu}/topology/core_id"] = str(cpu)
    nodes = {"node0/cpulist": f"0-{(os.cpu_count() or 1) - 1}", "node1/cpulist": "", "online": "0-1"}
    return files | {f"devices/system/node/{name}": text for name, text in nodes.items()}


def _pci_device(state: HostState, gpu: int) -> Tree:
    """What the PCI bus says, with or without a driver."""
    product, here = state.product, device_folder(gpu)
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
        f"bus/pci/devices/{bdf(gpu)}": Link(here),
    }


def _uevent(product: Product, gpu: int, *, driven: bool) -> str:
    identity = f"1002:{product.device_id:04X}"
    lines = [
        "PCI_CLASS=120000",
        f"PCI_ID={identity}",
        f"PCI_SUBSYS_ID={identity}",
        f"PCI_SLOT_NAME={bdf(gpu)}",
    ]
    return "\n".join((["DRIVER=amdgpu"] if driven else []) + lines)


def _driven_device(state: HostState, gpu: int, revision: int) -> Tree:
    here, change = device_folder(gpu), state.changes.get(gpu, Change())
    files: Tree = {}
    for part in (
        _memory(state, gpu),
        _board(state, gpu),
        _clocks(state.product),
        _ras(),
        _partitions(state.product),
        _sensors(state, gpu),
    ):
        files |= part
    files |= _xgmi(state, gpu) | {f"fw_version/{name}_fw_version": "0x000000a8" for name in FIRMWARE}
    for path, entry in change.files.items():
        files.pop(path, None)
        if entry is not None:
            files[path] = entry
    files["gpu_metrics"] = gpu_metrics.encode(
        revision_of(state.product, revision), _metrics(state, gpu) | change.metrics
    )
    tree: Tree = {f"{here}/{path}": entry for path, entry in files.items()}
    return tree | _nodes(state, gpu) | _links_to(gpu)


def revision_of(product: Product, library_revision: int) -> int:
    """MI200 has stayed at v1.3; newer parts fill the newest structure that the library of that time knows."""
    return 3 if product.dies == 1 else library_revision


def _memory(state: HostState, gpu: int) -> Tree:
    total = str(kfd.memory_bytes(state, gpu))
    return {
        "mem_info_vram_total": total,
        "mem_info_vis_vram_total": total,
        "mem_info_vram_used": str(USED_BYTES),
        "mem_info_vis_vram_used": str(USED_BYTES),
        "mem_info_gtt_total": str(1 << 40),
        "mem_info_gtt_used": "24395776",
        "mem_info_vram_vendor": "hynix",
    }


def _board(state: HostState, gpu: int) -> Tree:
    name = state.product.name
    return {
        "unique_id": f"{kfd.UNIQUE_ID + gpu:016x}",
        "serial_number": f"69250700{gpu:04d}",
        "product_name": f"AMD Instinct {name} OAM",
        "product_number": "102-G30211-0C",
        "fru_id": "113-AMDG302110C02-0C",
        "manufacturer": "AMD",
        "board_info": "type : oam",
        "vbios_version": "113-M3000100-102",
        "gpu_busy_percent": "0",
        "mem_busy_percent": "0",
        "pcie_replay_count": "0",
        "pcie_bw": "0 0 256",
        "enforce_isolation": "0",
        "thermal_throttling_logging": f"{bdf(gpu)}: thermal throttling logging enabled, with interval 60 seconds",
        "df_cntr_avail": "8",
    }


def _clocks(product: Product) -> Tree:
    return {
        "power_dpm_force_performance_level": "auto",
        "power_dpm_state": "performance",
        "pp_dpm_sclk": "S: 132Mhz *\n0: 500Mhz\n1: 2100Mhz",
        "pp_dpm_mclk": "0: 900Mhz *\n1: 1100Mhz\n2: 1300Mhz",
        "pp_dpm_fclk": "0: 1200Mhz *\n1: 2000Mhz",
        "pp_dpm_socclk": "0: 29Mhz *\n1: 1143Mhz",
        "pp_dpm_vclk": "0: 29Mhz *\n1: 1333Mhz",
        "pp_dpm_dclk": "0: 22Mhz *\n1: 1143Mhz",
        "pp_dpm_pcie": f"0: 2.5GT/s, x16 0Mhz\n1: {product.pcie_gt_per_s}.0GT/s, x16 0Mhz *",
        "pp_od_clk_voltage": "GFXCLK:\n0: 500Mhz\n1: 2100Mhz",
    }


def _ras() -> Tree:
    fixed = {"features": "feature mask: 0x2ff", "schema": "schema: 0xf", "version": "table version: 0x30000"}
    files: Tree = {f"ras/{name}": text for name, text in fixed.items()}
    files |= {f"ras/{block}_err_count": "ue: 0\nce: 0\nde: 0" for block in RAS_BLOCKS}
    return files | {"ras/event_state": "", "ras/gpu_vram_bad_pages": ""}


def _partitions(product: Product) -> Tree:
    if not product.partitions:
        return {}
    compute, memory = ", ".join(product.partitions), ", ".join(product.memory_modes)
    files: Tree = {
        "current_compute_partition": "SPX",
        "available_compute_partition": compute,
        "current_memory_partition": "NPS1",
        "available_memory_partition": memory,
        "compute_partition_config/xcp_config": "SPX",
        "compute_partition_config/supported_xcp_configs": compute,
        "compute_partition_config/supported_nps_configs": "NPS1",
    }
    for resource, (count, shared) in {"xcc": (8, 1), "dma": (16, 1), "dec": (4, 1), "jpeg": (32, 1)}.items():
        files[f"compute_partition_config/{resource}/num_inst"] = str(count)
        files[f"compute_partition_config/{resource}/num_shared"] = str(shared)
    return files


def _sensors(state: HostState, gpu: int) -> Tree:
    """Temperatures in millidegrees, power in microwatts. Only a module's first die reports its power."""
    here = f"hwmon/hwmon{gpu}"
    first_die = gpu % state.product.dies_per_module == 0
    cap = state.product.power_cap_w * 10**6 if first_die else 0
    files: Tree = {f"{here}/name": "amdgpu", f"{here}/device": Link(device_folder(gpu))}
    for sensor, label, degrees, critical in ((2, "junction", 45 + gpu, 100), (3, "mem", 38 + gpu, 95)):
        values = {"input": degrees * 1000, "crit": critical * 1000, "crit_hyst": -273150, "emergency": 105000}
        files |= {f"{here}/temp{sensor}_{name}": str(value) for name, value in values.items()}
        files[f"{here}/temp{sensor}_label"] = label
    draw = (140 + gpu) * 10**6 if first_die else 0
    power = {"cap": cap, "cap_max": cap, "cap_min": 0, "cap_default": cap}
    power["average" if state.product.dies == 1 else "input"] = draw
    files |= {f"{here}/power1_{name}": str(value) for name, value in power.items()}
    return files | {
        f"{here}/power1_label": "PPT",
        f"{here}/freq1_input": "132000000",
        f"{here}/freq1_label": "sclk",
    }


def _metrics(state: HostState, gpu: int) -> dict[str, Value]:
    product, peers = state.product, state.gpus - 1
    idle = dict.fromkeys(IDLE, 0)
    per_link: Value = [1000 * (link + 1) if link < peers else 0 for link in range(8)]
    return idle | {
        "temperature_hotspot": 45 + gpu,
        "temperature_mem": 38 + gpu,
        "temperature_vrsoc": 41 + gpu,
        "current_socket_power": 140 + gpu,
        "average_socket_power": 140 + gpu if gpu % product.dies_per_module == 0 else 0,
        "mem_max_bandwidth": product.memory_gb_per_s,
        "energy_accumulator": 123456789012,
        "system_clock_counter": 987654321000,
        "firmware_timestamp": 98765432100,
        "accumulation_counter": 1000000,
        "pcie_link_width": 16,
        "pcie_link_speed": 10 * product.pcie_gt_per_s,
        "pcie_bandwidth_acc": 100,
        "pcie_bandwidth_inst": 1,
        "xgmi_link_width": 16,
        "xgmi_link_speed": product.xgmi_gbit_per_s,
        "xgmi_read_data_acc": per_link,
        "xgmi_write_data_acc": per_link,
        "xgmi_link_status": [1 if link < peers else 0xFFFF for link in range(8)],
        "current_gfxclk": 132,
        "current_socclk": 29,
        "current_vclk0": 29,
        "current_dclk0": 22,
        "current_uclk": 900,
        "num_partition": 1,
    }


IDLE = [
    "average_gfx_activity",
    "average_umc_activity",
    "average_mm_activity",
    "vcn_activity",
    "jpeg_activity",
    "throttle_status",
    "indep_throttle_status",
    "prochot_residency_acc",
    "ppt_residency_acc",
    "socket_thm_residency_acc",
    "vr_thm_residency_acc",
    "hbm_thm_residency_acc",
    "gfxclk_lock_status",
    "gfx_activity_acc",
    "mem_activity_acc",
    "pcie_l0_to_recov_count_acc",
    "pcie_replay_count_acc",
    "pcie_replay_rover_count_acc",
    "pcie_nak_sent_count_acc",
    "pcie_nak_rcvd_count_acc",
    "pcie_lc_perf_other_end_recovery",
]


def _xgmi(state: HostState, gpu: int) -> Tree:
    """Ports in the kernel's "own node:port ->  peer node:port" form; the hive lives under the first GPU."""
    peers = [other for other in range(state.gpus) if other != gpu]
    ports = [
        f"{gpu + 1:02x}:{port:02x} ->  {other + 1:02x}:{gpu if gpu < other else gpu - 1:02x}"
        for port, other in enumerate(peers)
    ]
    return {
        "xgmi_error": "0",
        "xgmi_device_id": f"{kfd.UNIQUE_ID + gpu:x}",
        "xgmi_physical_id": str(gpu),
        "xgmi_num_hops": "41",
        "xgmi_num_links": "1",
        "xgmi_port_num": "\n".join(ports),
        **(
            {"xgmi_hive_info/xgmi_hive_id": str(kfd.HIVE)}
            if gpu == 0
            else {"xgmi_hive_info": Link(f"{device_folder(0)}/xgmi_hive_info")}
        ),
    }


def _nodes(state: HostState, gpu: int) -> Tree:
    """The DRM nodes. Numbers have no gaps: the older library looks for card0, card1, … until one is missing."""
    files: Tree = {}
    here, index = device_folder(gpu), kfd.bound(state).index(gpu)
    for name, minor in ((f"card{index}", index), (f"renderD{128 + index}", 128 + index)):
        node = f"{here}/drm/{name}"
        files[f"{node}/dev"] = f"{DRM_MAJOR}:{minor}"
        files[f"{node}/uevent"] = f"MAJOR={DRM_MAJOR}\nMINOR={minor}\nDEVNAME=dri/{name}\nDEVTYPE=drm_minor"
        files |= {
            f"{node}/device": Link(here),
            f"class/drm/{name}": Link(node),
            f"dev/char/{DRM_MAJOR}:{minor}": Link(node),
        }
    return files


def _links_to(gpu: int) -> Tree:
    here = device_folder(gpu)
    return {
        f"{here}/driver": Link("bus/pci/drivers/amdgpu"),
        f"bus/pci/drivers/amdgpu/{bdf(gpu)}": Link(here),
        f"class/hwmon/hwmon{gpu}": Link(f"{here}/hwmon/hwmon{gpu}"),
        f"{device_folder(0)}/xgmi_hive_info/node{gpu + 1}": Link(here),
    }
