"""One AMD GPU as amdsmi reports it. In: the opened module and a processor handle.
Out: a `Device`, a `Sample`.

Some units differ between releases, and the size of the value shows which unit it has: power caps are in
microwatts from 6.1.2 on and in watts before; temperatures are in millidegrees by the documents, in degrees by
the code.

MI300 and later count for how long each reason kept the clocks down, and the time itself
(`accumulation_counter`). The share of an unfit reason decides, as in AMD's own `amdsmi_get_violation_status`.
MI200 reports the reasons of the moment.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vendors import (
    Absence,
    Device,
    Ecc,
    PcieLink,
    Power,
    Process,
    Reading,
    Sample,
    Throttle,
    amd_kernel,
    is_known,
    is_unfit_share,
)
from vendors.amd_library import ask, counter, demand, field, member, reading, rows

# Residency counters of gpu_metrics -> the reason in words.
UNFIT_ACCUMULATORS = {
    "prochot_residency_acc": "prochot",
    "socket_thm_residency_acc": "socket temperature",
    "vr_thm_residency_acc": "voltage regulator temperature",
    "hbm_thm_residency_acc": "HBM temperature",
}
NORMAL_ACCUMULATORS = {"ppt_residency_acc": "package power"}
TICKS = "accumulation_counter"
MODES = ("SPX", "DPX", "TPX", "QPX", "CPX", "NPS1", "NPS2", "NPS4", "NPS8")  # not "N/A", "INVALID"
GENERATIONS = {2500: 1, 5000: 2, 8000: 3, 16000: 4, 32000: 5, 64000: 6}  # MT/s of one lane
Metrics = Mapping[str, Any] | Absence  # gpu_metrics as amdsmi returns it


def address(smi: Any, handle: Any) -> str:
    """The PCI address of a device, lower case."""
    return str(demand(smi, "amdsmi_get_gpu_device_bdf", handle)).lower()


def device(smi: Any, handle: Any, index: int, earlier: Metrics, *, same: int, gpu: Any) -> Device:
    """Everything about one device.
    Throttling is what grew since its GPU's metrics of a moment ago, `earlier`.

    `same` is how many devices before it have its address; `gpu` is its GPU's first partition, or itself.
    """
    bdf, whole = address(smi, handle), address(smi, gpu)
    asic = ask(smi, "amdsmi_get_gpu_asic_info", handle)
    part = _part(smi, handle, bdf, same)
    found = amd_kernel.node_of(bdf, part)
    node = found.properties if found else {}
    partition = _partition(smi, handle)
    metrics = metrics_of(smi, gpu)
    reported = str(field(asic, "target_graphics_version"))
    return Device(
        index=index,
        uuid=_uuid(smi, handle, asic, node) + (f"-part{part}" if part else ""),
        bdf=bdf,
        name=str(field(asic, "market_name")),
        arch=reported if reported.startswith("gfx") else amd_kernel.architecture(node),
        compute_units=_units(asic, node, partition),
        memory_bytes=_memory_bytes(smi, handle, found, partition),
        part=part,
        memory_used_bytes=_used_bytes(smi, handle, bdf, part),
        pci_id=_pci_id(asic),
        firmware=_firmware(smi, handle),
        partition=partition,
        pcie=_pcie(smi, gpu),
        ecc=_ecc(smi, gpu),
        throttle=throttle(whole, metrics, earlier),
        power=_power(smi, gpu, whole, metrics),
        clock_mhz=_clock(smi, handle, metrics),
        temperature_c=_temperature(smi, handle),
        processes=_processes(smi, handle),
        numa_node=reading(ask(smi, "amdsmi_topo_get_numa_node_number", handle)),
        fabric=Absence.NOT_AVAILABLE,  # links are point to point: there is no switch
    )


def sample(smi: Any, handle: Any, index: int) -> Sample:
    """What changes under load."""
    metrics = metrics_of(smi, handle)
    bdf = address(smi, handle)
    return Sample(
        index=index,
        clock_mhz=_clock(smi, handle, metrics),
        power_w=_draw(metrics),
        temperature_c=field(metrics, "temperature_hotspot"),
        throttle=throttle(bdf, metrics, metrics),
    )


def metrics_of(smi: Any, handle: Any) -> Metrics:
    """The firmware's table of metrics, which the driver refreshes every 100 ms."""
    answer: Metrics = ask(smi, "amdsmi_get_gpu_metrics_info", handle)
    return answer


# All partitions of a GPU have its unique id, and leases and results need one for each: hence `-part3`.
def _uuid(smi: Any, handle: Any, asic: Any, node: Mapping[str, int]) -> str:
    """As HIP and ROCr write it, "GPU-" and the unique id; before ROCm 7.13 the library has another form."""
    serial = field(asic, "asic_serial")
    number = node.get("unique_id", 0) or (
        int(serial, 16) if isinstance(serial, str) and serial.startswith("0x") else 0
    )
    return f"GPU-{number:016x}" if number else str(ask(smi, "amdsmi_get_gpu_device_uuid", handle))


def _part(smi: Any, handle: Any, bdf: str, same: int) -> int:
    """Which partition of its GPU a device is.
    Before 6.4 the library does not tell, and lists a GPU's partitions in their order under one address, or
    with the number as the address's last digit.
    """
    told = field(ask(smi, "amdsmi_get_gpu_kfd_info", handle), "current_partition_id")
    return int(told) if is_known(told) else max(int(bdf[-1]), same)


def _used_bytes(smi: Any, handle: Any, bdf: str, part: int) -> Reading:
    """Bytes of memory in use on the device, as the library reports them.
    Only a GPU's first partition has the kernel's file, so a further one is judged by what all of them use
    together.
    """
    whole = amd_kernel.used_bytes(bdf[:-1] + "0") if part else None
    if whole is not None:
        return whole
    return reading(ask(smi, "amdsmi_get_gpu_memory_usage", handle, member(smi, "AmdSmiMemoryType.VRAM")))


def _is_part(partition: Mapping[str, Reading]) -> bool:
    return is_known(partition["compute"]) and partition["compute"] != "SPX"


def _units(asic: Any, node: Mapping[str, int], partition: Mapping[str, Reading]) -> Reading:
    """By the library; of a partition, whose GPU's units some releases report, by the KFD's node."""
    reported, counted = field(asic, "num_compute_units"), amd_kernel.compute_units(node) if node else None
    by_kernel = counted is not None and (_is_part(partition) or not is_known(reported))
    return reading(counted) if by_kernel else reported


def _memory_bytes(
    smi: Any, handle: Any, node: amd_kernel.Node | None, partition: Mapping[str, Reading]
) -> int:
    """By the library; of a partition by its own memory banks, because the card's file has the whole GPU's."""
    if _is_part(partition) and node and node.memory_bytes:
        return node.memory_bytes
    vram = member(smi, "AmdSmiMemoryType.VRAM")
    return int(demand(smi, "amdsmi_get_gpu_memory_total", handle, vram))


def _pci_id(asic: Any) -> Reading:
    parts = [field(asic, name) for name in ("vendor_id", "device_id")]
    for part in parts:
        if isinstance(part, Absence):
            return part
    numbers = (int(part, 16) if isinstance(part, str) else int(part) for part in parts)
    return ":".join(f"{number:04x}" for number in numbers)


def _firmware(smi: Any, handle: Any) -> dict[str, Reading]:
    vbios = field(ask(smi, "amdsmi_get_gpu_vbios_info", handle), "part_number", "version")
    answer = ask(smi, "amdsmi_get_fw_info", handle)
    blocks = (
        {}
        if isinstance(answer, Absence)
        else {_block(row["fw_name"]): reading(row["fw_version"]) for row in answer["fw_list"]}
    )
    return {"vbios": vbios, **blocks}


def _block(name: Any) -> str:
    """The name of a firmware block without prefix:
    releases write `AMDSMI_FW_ID_CP_MEC1`, `FW_ID_CP_MEC1` or `CP_MEC1`.
    """
    return str(getattr(name, "name", name)).removeprefix("AMDSMI_").removeprefix("FW_ID_")


def _partition(smi: Any, handle: Any) -> dict[str, Reading]:
    """Compute and memory mode, from the first source that tells them.

    Before 6.4 there is only the older call, which ROCm 10 deprecates; 6.4.3 and 7.0.2 have the newer one,
    and it answers "N/A" instead of an error where the driver has no profiles. The last source is the kernel's
    file.
    """
    profile = ask(smi, "amdsmi_get_gpu_accelerator_partition_profile", handle)
    newer = profile if isinstance(profile, Absence) else field(profile["partition_profile"], "profile_type")
    bdf = address(smi, handle)
    told = {
        "compute": (newer, reading(ask(smi, "amdsmi_get_gpu_compute_partition", handle))),
        "memory": (reading(ask(smi, "amdsmi_get_gpu_memory_partition", handle)),),
    }
    return {name: _told(readings, amd_kernel.mode(bdf, name)) for name, readings in told.items()}


def _told(readings: Sequence[Reading], by_kernel: str) -> Reading:
    """The first value, else the kernel's, else why the library gave none."""
    known = [found for found in readings if is_known(found) and found in MODES]
    absent = [found for found in readings if isinstance(found, Absence)] or [Absence.NOT_AVAILABLE]
    return known[0] if known else by_kernel or absent[-1]


def _pcie(smi: Any, handle: Any) -> PcieLink:
    answer = ask(smi, "amdsmi_get_pcie_info", handle)
    if isinstance(answer, Absence):
        return PcieLink(
            generation=answer, width=answer, max_generation=answer, max_width=answer, replays=answer
        )
    static, now = answer["pcie_static"], answer["pcie_metric"]
    bdf = str(demand(smi, "amdsmi_get_gpu_device_bdf", handle)).lower()
    most, slot = _generation(field(static, "max_pcie_speed")), amd_kernel.slot_generation(bdf)
    return PcieLink(
        generation=_generation(field(now, "pcie_speed")),
        width=field(now, "pcie_width"),
        max_generation=min(most, slot) if isinstance(most, int) and slot else most,
        max_width=field(static, "max_pcie_width"),
        replays=counter(now, "pcie_replay_count"),
    )


def _generation(speed: Reading) -> Reading:
    return GENERATIONS.get(int(speed), f"{speed} MT/s") if is_known(speed) else speed


def _ecc(smi: Any, handle: Any) -> Ecc:
    counts = ask(smi, "amdsmi_get_gpu_total_ecc_count", handle)
    lost = [counter(counts, name) for name in ("uncorrectable_count", "deferred_count")]
    pages = ask(smi, "amdsmi_get_gpu_bad_page_info", handle)
    blocks = ask(smi, "amdsmi_get_gpu_ras_block_features_enabled", handle)  # RAS of the memory controllers
    return Ecc(
        enabled=blocks
        if isinstance(blocks, Absence)
        else any(row["block"] == "UMC" and row["status"] == "ENABLED" for row in blocks),
        correctable=counter(counts, "correctable_count"),
        # A deferred error is uncorrectable data that no one has read yet.
        uncorrectable=lost[0]
        if not is_known(lost[0])
        else int(lost[0]) + (int(lost[1]) if is_known(lost[1]) else 0),
        pending=_pages(smi, pages, "PENDING"),
        failed=_pages(smi, pages, "UNRESERVABLE"),
        retired=_pages(smi, pages, "RESERVED"),
    )


def _pages(smi: Any, pages: Any, status: str) -> Reading:
    if isinstance(pages, Absence):
        return pages
    wanted = member(smi, f"AmdSmiMemoryPageStatus.{status}")
    return [row["status"] for row in rows(pages)].count(wanted)


def _power(smi: Any, handle: Any, bdf: str, metrics: Metrics) -> Power:
    """Power caps and draw.
    The second die of an MI250 reports 0 W everywhere: the first has the module's power.

    libamd_smi 6.1.2 cuts a cap to nine digits, so that 1000 W reads as 100 W; the kernel's file has all
    digits.
    """
    caps = ask(smi, "amdsmi_get_power_cap_info", handle)
    cap, default = (_watts(field(caps, name)) for name in ("power_cap", "default_power_cap"))
    if cap == 0 and default == 0:
        return Power(
            cap_w=Absence.NOT_AVAILABLE, default_cap_w=Absence.NOT_AVAILABLE, draw_w=Absence.NOT_AVAILABLE
        )
    kernel = amd_kernel.power_cap_w(bdf)
    if is_known(cap) and kernel is not None and kernel // 10 == cap:
        cap = kernel
    return Power(cap_w=cap, default_cap_w=default, draw_w=_draw(metrics))


def _watts(value: Reading) -> Reading:
    if not is_known(value):
        return value
    return float(value) / 1e6 if float(value) >= 1e5 else float(value)


def _draw(metrics: Metrics) -> Reading:
    now = field(metrics, "current_socket_power")
    return now if is_known(now) else field(metrics, "average_socket_power")


def _clock(smi: Any, handle: Any, metrics: Metrics) -> Reading:
    """The clock of the slowest die, which decides the speed; MI200 has only one."""
    dies = (
        []
        if isinstance(metrics, Absence)
        else [reading(clock) for clock in metrics.get("current_gfxclks", ())]
    )
    known = [int(clock) for clock in dies if is_known(clock)]
    if known:
        return min(known)
    clocks = ask(smi, "amdsmi_get_clock_info", handle, member(smi, "AmdSmiClkType.GFX"))
    return field(clocks, "clk", "cur_clk")


def _temperature(smi: Any, handle: Any) -> Reading:
    kind = member(smi, "AmdSmiTemperatureType.HOTSPOT", "AmdSmiTemperatureType.JUNCTION")
    now = member(smi, "AmdSmiTemperatureMetric.CURRENT")
    value = reading(ask(smi, "amdsmi_get_temp_metric", handle, kind, now))
    return float(value) / 1000 if is_known(value) and float(value) > 1000 else value


def _processes(smi: Any, handle: Any) -> tuple[Process, ...] | Absence:
    found = ask(smi, "amdsmi_get_gpu_process_list", handle)
    if isinstance(found, Absence):
        return found
    return tuple(
        Process(
            pid=int(row["pid"]), name=field(row, "name"), memory_bytes=field(row["memory_usage"], "vram_mem")
        )
        for row in rows(found)
    )


def throttle(bdf: str, metrics: Metrics, earlier: Metrics) -> Throttle:
    """Return what held the clocks down since `earlier`, by the share of the time that each counter grew by.

    MI200 has no counters: its reasons of the moment. Where neither is read: "not supported".

    Before gpu_metrics v1.6, MI300's driver writes a zero without meaning ("Throttle status is not reported
    through metrics now", smu_v13_0_6_ppt.c), so this zero is not read.
    """
    counters = {name: counter(metrics, name) for name in UNFIT_ACCUMULATORS | NORMAL_ACCUMULATORS}
    if all(map(is_known, counters.values())):
        return Throttle(
            unfit=_grown(UNFIT_ACCUMULATORS, metrics, earlier),
            normal=_grown(NORMAL_ACCUMULATORS, metrics, earlier),
            accumulators={UNFIT_ACCUMULATORS[name]: counters[name] for name in UNFIT_ACCUMULATORS},
            ticks=counter(metrics, TICKS),
            reading="accumulators",
        )
    reasons = amd_kernel.throttles(bdf)
    if reasons is None:
        if isinstance(metrics, Absence) and metrics.is_failure:
            return Throttle(reading=metrics)
        return Throttle()  # its reading is "not supported"
    return Throttle(unfit=reasons[0], normal=reasons[1], reading="indep_throttle_status")


def _grown(names: Mapping[str, str], metrics: Metrics, earlier: Metrics) -> tuple[str, ...]:
    ticks = _growth(TICKS, metrics, earlier)
    return tuple(
        words for name, words in names.items() if is_unfit_share(_growth(name, metrics, earlier), ticks)
    )


def _growth(name: str, metrics: Metrics, earlier: Metrics) -> int:
    before, after = counter(earlier, name), counter(metrics, name)
    return int(after) - int(before) if is_known(before) and is_known(after) else 0
