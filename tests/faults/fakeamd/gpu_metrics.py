"""The binary file `gpu_metrics` of the amdgpu driver.

In: the revision N of the structure gpu_metrics_v1_N and the values of some fields. Out: its bytes.
Source of the layouts: `kgd_pp_interface.h` of the kernel (natural alignment, little endian).
"""

import ctypes as c
from collections.abc import Mapping, Sequence
from functools import cache

Field = tuple[str, type]
Value = int | Sequence[int]

UNFILLED = 0xFF  # the driver presets every byte so; all-ones reads as "not filled" in the library


def encode(revision: int, values: Mapping[str, Value]) -> bytes:
    """The file of structure v1.`revision`; fields not named stay unfilled, names it lacks are ignored."""
    record = layout(revision)()
    c.memset(c.byref(record), UNFILLED, c.sizeof(record))
    header = {"structure_size": c.sizeof(record), "format_revision": 1, "content_revision": revision}
    for name, value in {**values, **header}.items():
        if hasattr(record, name):
            _put(record, name, value)
    if hasattr(record, "xcp_stats"):
        c.memset(c.byref(record.xcp_stats[0]), 0, c.sizeof(record.xcp_stats[0]))
    return bytes(record)


def offset(revision: int, field: str) -> tuple[int, int]:
    """Where a field lies in the file: (offset, size), both in bytes."""
    place = getattr(layout(revision), field)
    return place.offset, place.size


@cache
def layout(revision: int) -> type[c.Structure]:
    """The structure gpu_metrics_v1_`revision`: 3 on MI200, 5 and later on MI300."""
    fields = _v1_3() if revision == 3 else _v1_5_and_later(revision)
    return type(f"gpu_metrics_v1_{revision}", (c.Structure,), {"_fields_": fields})


def _put(record: c.Structure, name: str, value: Value) -> None:
    field = getattr(record, name)
    if not isinstance(field, c.Array):
        setattr(record, name, value)
        return
    elements = [value] * len(field) if isinstance(value, int) else value
    for index, element in enumerate(elements):
        field[index] = element


def _each(names: str, kind: type) -> list[Field]:
    return [(name, kind) for name in names.split()]


HEADER = [("structure_size", c.c_uint16), ("format_revision", c.c_uint8), ("content_revision", c.c_uint8)]


def _v1_3() -> list[Field]:
    return [
        *HEADER,
        *_each("temperature_edge temperature_hotspot temperature_mem temperature_vrgfx", c.c_uint16),
        *_each("temperature_vrsoc temperature_vrmem average_gfx_activity average_umc_activity", c.c_uint16),
        *_each("average_mm_activity average_socket_power", c.c_uint16),
        *_each("energy_accumulator system_clock_counter", c.c_uint64),
        ("average_clocks", c.c_uint16 * 7),
        ("current_clocks", c.c_uint16 * 7),
        ("throttle_status", c.c_uint32),
        *_each("current_fan_speed pcie_link_width pcie_link_speed padding", c.c_uint16),
        *_each("gfx_activity_acc mem_activity_acc", c.c_uint32),
        ("temperature_hbm", c.c_uint16 * 4),
        ("firmware_timestamp", c.c_uint64),
        ("voltages", c.c_uint16 * 3),
        ("padding1", c.c_uint16),
        ("indep_throttle_status", c.c_uint64),
    ]


def _v1_5_and_later(revision: int) -> list[Field]:
    return [*_sensors(revision), *_links(revision), *_clocks(), *_partitions(revision)]


def _sensors(revision: int) -> list[Field]:
    engines = [("vcn_activity", c.c_uint16 * 4), ("jpeg_activity", c.c_uint16 * 32)]
    residencies = _each(
        "accumulation_counter prochot_residency_acc ppt_residency_acc socket_thm_residency_acc"
        " vr_thm_residency_acc hbm_thm_residency_acc",
        c.c_uint32,
    )
    return [
        *HEADER,
        *_each("temperature_hotspot temperature_mem temperature_vrsoc current_socket_power", c.c_uint16),
        *_each("average_gfx_activity average_umc_activity", c.c_uint16),
        *(engines if revision == 5 else []),
        *([("mem_max_bandwidth", c.c_uint64)] if revision >= 7 else []),
        *_each("energy_accumulator system_clock_counter", c.c_uint64),
        *([("throttle_status", c.c_uint32)] if revision == 5 else residencies),
        ("gfxclk_lock_status", c.c_uint32),
    ]


def _links(revision: int) -> list[Field]:
    return [
        *_each("pcie_link_width pcie_link_speed xgmi_link_width xgmi_link_speed", c.c_uint16),
        *_each("gfx_activity_acc mem_activity_acc", c.c_uint32),
        *_each("pcie_bandwidth_acc pcie_bandwidth_inst pcie_l0_to_recov_count_acc", c.c_uint64),
        *_each("pcie_replay_count_acc pcie_replay_rover_count_acc", c.c_uint64),
        *_each("pcie_nak_sent_count_acc pcie_nak_rcvd_count_acc", c.c_uint32),
        ("xgmi_read_data_acc", c.c_uint64 * 8),
        ("xgmi_write_data_acc", c.c_uint64 * 8),
        *([("xgmi_link_status", c.c_uint16 * 8), ("padding", c.c_uint16)] if revision >= 7 else []),
    ]


def _clocks() -> list[Field]:
    return [
        ("firmware_timestamp", c.c_uint64),
        ("current_gfxclk", c.c_uint16 * 8),
        *[(f"current_{name}", c.c_uint16 * 4) for name in ("socclk", "vclk0", "dclk0")],
        ("current_uclk", c.c_uint16),
    ]


def _partitions(revision: int) -> list[Field]:
    if revision == 5:
        return [("padding_end", c.c_uint16)]
    stats: list[Field] = [
        ("gfx_busy_inst", c.c_uint32 * 8),
        ("jpeg_busy", c.c_uint16 * (40 if revision >= 8 else 32)),
        ("vcn_busy", c.c_uint16 * 4),
        ("gfx_busy_acc", c.c_uint64 * 8),
    ]
    below = {
        7: "host_limit_acc",
        8: "host_limit_ppt_acc host_limit_thm_acc low_utilization_acc host_limit_total_acc",
    }
    stats += [(f"gfx_below_{name}", c.c_uint64 * 8) for name in below.get(revision, "").split()]
    partition = type(f"xcp_metrics_v1_{revision}", (c.Structure,), {"_fields_": stats})
    return [
        ("num_partition", c.c_uint16),
        ("xcp_stats", partition * 8),
        ("pcie_lc_perf_other_end_recovery", c.c_uint32),
    ]
