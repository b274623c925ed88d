"""What one GPU measures of itself: hwmon, and the values of gpu_metrics.

In: a `HostState` and a GPU's number. Out: files of its hwmon folder; fields and revision of gpu_metrics.
"""

from fakeamd import kfd
from fakeamd.gpu_metrics import Value
from fakeamd.products import Product
from fakeamd.states import HostState
from fakeamd.tree import Link, Tree

# Counters that are 0 on an idle, healthy GPU.
IDLE = (
    *("average_gfx_activity", "average_umc_activity", "average_mm_activity", "vcn_activity", "jpeg_activity"),
    *("throttle_status", "indep_throttle_status", "prochot_residency_acc", "ppt_residency_acc"),
    *("socket_thm_residency_acc", "vr_thm_residency_acc", "hbm_thm_residency_acc", "gfxclk_lock_status"),
    *("gfx_activity_acc", "mem_activity_acc", "pcie_l0_to_recov_count_acc", "pcie_replay_count_acc"),
    *("pcie_replay_rover_count_acc", "pcie_nak_sent_count_acc", "pcie_nak_rcvd_count_acc"),
    "pcie_lc_perf_other_end_recovery",
)


def revision_of(product: Product, library_revision: int) -> int:
    """MI200 has stayed at v1.3; newer parts fill the newest structure that the library of that time knows."""
    return 3 if product.dies == 1 else library_revision


def sensors(state: HostState, gpu: int) -> Tree:
    """Temperatures in millidegrees, power in microwatts. Only a module's first die reports its power."""
    here = f"hwmon/hwmon{gpu}"
    first_die = gpu % state.product.dies_per_module == 0
    cap = state.product.power_cap_w * 10**6 if first_die else 0
    files: Tree = {f"{here}/name": "amdgpu", f"{here}/device": Link(kfd.device_folder(gpu))}
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


def metrics(state: HostState, gpu: int) -> dict[str, Value]:
    """The fields that the firmware fills, with those of every revision."""
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
