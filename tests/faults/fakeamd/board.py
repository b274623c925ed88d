"""The files of one GPU's own folder: memory, board, clocks, RAS, partitions, xGMI, firmware.

In: a `HostState` and a GPU's number. Out: the tree below the device folder.
Formats: the kernel's amdgpu documentation and sources; values are made up (docs/reference/amd.md).
"""

from fakeamd import kfd
from fakeamd.products import Product
from fakeamd.states import HostState
from fakeamd.tree import Link, Refusing, Tree

USED_BYTES = 297795584
RAS_BLOCKS = ("umc", "sdma", "gfx", "mmhub", "xgmi_wafl", "pcie_bif", "hdp")
FIRMWARE = (
    *("asd", "mc", "mec", "mec2", "rlc", "rlc_srlc", "rlc_srlg", "rlc_srls"),
    *("sdma", "sdma2", "smc", "sos", "ta_ras", "ta_xgmi", "vcn"),
)


def files(state: HostState, gpu: int) -> Tree:
    """Everything in the folder but sensors and PCI."""
    return {
        **_memory(state, gpu),
        **_board(state, gpu),
        **_clocks(state.product),
        **_ras(),
        **_partitions(state),
        **_xgmi(state, gpu),
        **{f"fw_version/{name}_fw_version": "0x000000a8" for name in FIRMWARE},
    }


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
        "thermal_throttling_logging": f"{kfd.bdf(gpu)}: thermal throttling logging enabled",
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


def _partitions(state: HostState) -> Tree:
    product = state.product
    if not product.partitions:
        return {}
    compute, memory = ", ".join(product.partitions), ", ".join(product.memory_modes)
    files: Tree = {
        "current_compute_partition": state.compute,
        "available_compute_partition": compute,
        "current_memory_partition": state.memory,
        "available_memory_partition": memory,
        "compute_partition_config/xcp_config": state.compute,
        "compute_partition_config/supported_xcp_configs": compute,
        "compute_partition_config/supported_nps_configs": state.memory,
    }
    for resource, (count, shared) in {"xcc": (8, 1), "dma": (16, 1), "dec": (4, 1), "jpeg": (32, 1)}.items():
        files[f"compute_partition_config/{resource}/num_inst"] = str(count)
        files[f"compute_partition_config/{resource}/num_shared"] = str(shared)
    return files


def _xgmi(state: HostState, gpu: int) -> Tree:
    """Ports in the kernel's "own node:port ->  peer node:port" form; the hive lives under the first GPU."""
    peers = [other for other in range(state.gpus) if other != gpu]
    ports = [
        f"{gpu + 1:02x}:{port:02x} ->  {other + 1:02x}:{gpu if gpu < other else gpu - 1:02x}"
        for port, other in enumerate(peers)
    ]
    return {
        "xgmi_error": Refusing() if state.product.link_status_refused else "0",
        "xgmi_device_id": f"{kfd.UNIQUE_ID + gpu:x}",
        "xgmi_physical_id": str(gpu),
        "xgmi_num_hops": "41",
        "xgmi_num_links": "1",
        "xgmi_port_num": "\n".join(ports),
        **(
            {"xgmi_hive_info/xgmi_hive_id": str(kfd.HIVE)}
            if gpu == 0
            else {"xgmi_hive_info": Link(f"{kfd.device_folder(0)}/xgmi_hive_info")}
        ),
    }
