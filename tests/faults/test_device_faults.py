"""Faults of devices, planted in the NVML library, and the healthy host that must pass."""

# ruff: noqa: E501 - a table of faults reads in rows
from dataclasses import replace
from pathlib import Path

import pytest

from by_path import module_at
from device_hosts import READ, SAMPLE, SEEN, STUMBLES, by_uuid, host_copies, nvidia, speeds
from planting import STUBS, TESTS, Fault, device_check

ACCEPTANCE = TESTS / "acceptance"
# An error of the library in the image is no evidence about the machine: FAILED.
UNANSWERED = ("the library answered", "the library does not report", "gave no reading")


FAULTS = (
    nvidia("one GPU is missing", "test_device_count", devices=3),
    nvidia("unknown product", "test_device_identity", "not certifiable", pci_device_id=0x999910DE, capability=[9, 9]),
    nvidia("an H20-3e is no H200", "test_device_identity", "10de:232c", pci_device_id=0x232C10DE, memory=143771 << 20),
    nvidia("an H800 NVL is no H100", "test_device_identity", "10de:233a", pci_device_id=0x233A10DE, memory=95830 << 20),
    nvidia("one card without its bridge", "test_every_pair_is_linked", "device 0: joined with 0, others with 2", "invalid",
           pci_device_id=0x233B10DE, one={"p2p_nvlink": 1}),
    nvidia("a bridge with lanes down", "test_every_pair_is_linked", "12 active", "invalid", pci_device_id=0x233B10DE, links=12),
    nvidia("nobody knows what a bridge joins", "test_every_pair_is_linked", "link type: the library answered", pci_device_id=0x233B10DE, p2p_nvlink="unknown"),
    nvidia("access refused where a bridge may be", "test_peer_access_is_granted", "link type: the library answered",
           pci_device_id=0x233B10DE, p2p_nvlink="unknown", p2p_read=3),
    nvidia("cards without any bridge", "test_every_pair_is_linked", "no bridge joins", "skipped", pci_device_id=0x233B10DE, p2p_nvlink=1),
    nvidia("cards without any bridge", "test_peer_access_is_granted", "no bridge joins", "skipped", pci_device_id=0x233B10DE, p2p_nvlink=1),
    nvidia("mixed products", "test_device_identity", one={"pci_device_id": 0x233010DE, "memory": 81559 << 20}),
    nvidia("half of the multiprocessors", "test_device_identity", "compute units", one={"cores": 8448}),
    nvidia("memory is short", "test_device_identity", "less than", "invalid", one={"memory": 136000 << 20}),
    nvidia("library lists another GPU", "test_torch_and_the_library_mean_the_same_devices", "fits 0 of the library's", devices=2),
    Fault("torch names another GPU", device_check("test_torch_and_the_library_mean_the_same_devices"), vendor="nvidia", nvml={},
          says="fits 0 of the library's", patches=by_uuid(1)),
    nvidia("torch sees another arch", "test_torch_and_the_library_mean_the_same_devices", capability=[8, 0]),
    nvidia("driver too old", "test_driver_serves_the_runtime", "older than 580", driver="570.26", cuda=12080),
    nvidia("mixed firmware", "test_firmware_is_equal", "vbios", "invalid", one={"vbios": "95.00"}),
    nvidia("link x8", "test_pcie_link_is_full", "device 0: PCIe width 8, expected at least 16", "invalid", one={"pcie_width": 8}),
    nvidia("a riser of generation 3", "test_pcie_link_is_full", "PCIe generation 3, expected at least 5", "invalid", pcie_generation=3),
    nvidia("below an older slot too", "test_pcie_link_is_full", "PCIe generation 3, expected at least 4", "invalid", pcie_generation=3, pcie_max_generation=4),
    nvidia("an older slot", "test_pcie_link_is_full", outcome="passed", pcie_generation=4, pcie_max_generation=4),
    nvidia("a newer and wider link", "test_pcie_link_is_full", outcome="passed", pcie_generation=6, pcie_max_generation=6, pcie_width=32),
    nvidia("PCIe answers all ones", "test_pcie_link_is_full", "all ones", pcie_width=0xFFFFFFFF),
    nvidia("a pair on PCIe", "test_every_pair_is_linked", "0-1: pcie", "invalid", one={"p2p_nvlink": 1}),
    nvidia("six lanes down", "test_every_pair_is_linked", "12 active", "invalid", one={"links": 12}),
    nvidia("peer access refused", "test_peer_access_is_granted", "0-1", one={"p2p_read": 3}),
    nvidia("ECC off", "test_memory_is_healthy", "ECC is off", "invalid", one={"ecc": 0}),
    nvidia("uncorrectable errors", "test_memory_is_healthy", "uncorrectable", "invalid", one={"uncorrected": 2}),
    nvidia("rows wait for a reset", "test_memory_is_healthy", "pending", "invalid", one={"remapped": [0, 1, 1, 0]}),
    nvidia("remapping failed", "test_memory_is_healthy", "failed", "invalid", one={"remapped": [0, 1, 0, 1]}),
    nvidia("thermal slowdown", "test_nothing_throttles", "hardware thermal", "invalid", one={"reasons": 0x40}),
    nvidia("power cap lowered", "test_power_cap_is_the_default", "400", "invalid", one={"cap": 400000}),
    nvidia("one figure is an error", "test_power_cap_is_the_default", "answered NVML_ERROR_UNKNOWN", one={"cap": "unknown"}),
    nvidia("MIG on", "test_partition_is_the_reference", "enabled", "invalid", one={"mig": 1}),
    nvidia("another job", "test_devices_are_ours_alone", "shared with", "invalid", one={"processes": [4321]}),
    nvidia("another job that is just ending", "test_devices_are_ours_alone", "4321 N/A", "invalid", one={"processes": [4321], "process_name": "no_data"}),
    nvidia("nobody knows who is there", "test_devices_are_ours_alone", "processes: the library answered", one={"processes": "unknown"}),
    nvidia("nobody knows who comes during the run", "test_peer_bandwidth", "device 0: processes: the library answered", "invalid", one={"processes": "unknown"}),
    nvidia("nobody knows what throttles during a figure", "test_peer_bandwidth", "device 0: throttle reasons: the library answered",
           "invalid", one={"reasons": "unknown"}),
    nvidia("nobody knows what throttles during a check", "test_peer_copies_arrive", "device 0: throttle reasons: the library answered",
           "invalid", one={"reasons": "unknown"}),
    nvidia("touched memory", "test_devices_are_ours_alone", "in use", "invalid", one={"used": 9 << 30}),
    nvidia("another job begins during the run", "test_peer_bandwidth", "device 0 is shared with 4321 python3", "invalid", one={"processes_late": [4321]}),
    nvidia("another job's memory during the run", "test_peer_bandwidth", "device 0 has 7.4 GiB more in use", "invalid", one={"used_late": 8 << 30}),
    nvidia("the driver asks for a reset", "test_no_device_asks_for_recovery", "reset", "invalid", one={"recovery": 1}),
    nvidia("fabric manager not up", "test_switch_fabric_is_up", "in progress", "invalid", fabric_state=2),
    nvidia("a fabric of less bandwidth", "test_switch_fabric_is_up", "device 0: the fabric is completed, degraded bandwidth", "invalid", one={"fabric_health": 0x1A9}),
    nvidia("a route of the fabric is broken", "test_switch_fabric_is_up", "route unhealthy", "invalid", one={"fabric_health": 0x19A}),
    nvidia("a fabric in a wrong configuration", "test_switch_fabric_is_up", "incorrect configuration 5", "invalid", one={"fabric_health": 0x5AA}),
    nvidia("a skip of device 0 hides no fabric", "test_switch_fabric_is_up", "device 1: the fabric is in progress", "invalid", fabric_state=2, one={"fabric_state": 0}),
    nvidia("a skip of device 0 hides no heat", "test_nothing_throttles", "device 3 throttles: hardware thermal", "invalid", reasons=0x40, one={"reasons": "no_permission"}),
    nvidia("a skip of device 0 hides no MIG", "test_partition_is_the_reference", "device 1: mig enabled", "invalid", mig=1, one={"mig": "not_supported"}),
    nvidia("a skip of device 0 hides no reset", "test_no_device_asks_for_recovery", "device 1: the driver asks for: reset", "invalid", recovery=1, one={"recovery": "not_supported"}),
    nvidia("a skip of ECC hides no error", "test_memory_is_healthy", "device 1: 2 uncorrectable", "invalid", ecc="no_permission", uncorrected=2),
    Fault("a GPU that the library does not list", device_check("test_the_host_offers_what_devices_need"), vendor="nvidia", nvml={},
          outcome="invalid", env={"NVIDIA_VISIBLE_DEVICES": "all"}, says="0000:1f:00.0: on the PCI bus, and the library does not list it",
          patches=SEEN | {"vendors.nvidia_bus:gpus": "lambda: {'0000:1b:00.0': 'nvidia', '0000:1f:00.0': 'nvidia'}"}),
    Fault("a GPU that no driver holds", device_check("test_the_host_offers_what_devices_need"), vendor="nvidia", nvml={},
          outcome="invalid", says="0000:1f:00.0: on the PCI bus", patches=SEEN | {"vendors.nvidia_bus:gpus": "lambda: {'0000:1f:00.0': ''}"}),
    Fault("a part of a GPU is named", device_check("test_device_count"), vendor="nvidia", nvml={}, env={"CUDA_VISIBLE_DEVICES": "MIG-5c89c0a2"},
          says="CUDA_VISIBLE_DEVICES names MIG-5c89c0a2, an instance of a GPU in MIG mode"),
    Fault("a consumer GPU", device_check("test_device_identity"), vendor="nvidia", says="not certifiable: device 0 ('GeForce') is sm_86",
          nvml={"capability": [8, 6], "name": "GeForce", "pci_device_id": 0x220410DE, "cores": 10496, "memory": 24576 << 20}),
    nvidia("driver not loaded", "test_device_count", "no NVIDIA device is visible", init="driver_not_loaded"),
    nvidia("no device", "test_device_count", "no NVIDIA device is visible", devices=0),
    nvidia("no permission is a skip", "test_memory_is_healthy", "no permission", "skipped", ecc="no_permission"),
    nvidia("N/A is a skip", "test_no_device_asks_for_recovery", "not supported", "skipped", recovery="not_supported"),
    nvidia("a GPU was lost", "test_device_count", "no NVIDIA device is visible", one={"temperature": "lost"}),
    nvidia("links of NVLink 5 are trained again", "test_no_link_error_since_the_start", "link errors grew", "invalid", link_counters="not_supported",
           one={"recovering": 1}),
    nvidia("links are trained again", "test_no_link_error_since_the_start", "link errors grew", "invalid", one={"recovering": 1}),
    nvidia("an Xid of the hardware during the run", "test_no_fault_was_reported", "Xid 79: the GPU has fallen", "invalid", xid=79),
    nvidia("an Xid of a program during the run", "test_no_fault_was_reported", "Xid 31: memory page fault", xid=31),
    nvidia("an Xid that nobody knows", "test_no_fault_was_reported", "Xid 999: see the table", xid=999),
    nvidia("the listener loses its GPU", "test_no_fault_was_reported", "fault reports were not read to the end", xid="lost"),
    nvidia("events are not supported", "test_no_fault_was_reported", "not supported", "skipped", event_types=0),
    nvidia("an uncorrectable error during the run", "test_no_memory_error_since_the_start", "uncorrectable grew from 0 to 2", "invalid", one={"uncorrected_late": 2}),
    nvidia("repairs are not told at the end", "test_no_memory_error_since_the_start", "pending memory errors: the library answered", remapped_late="unknown"),
    Fault("throttling that no sample tells of", device_check("test_peer_bandwidth"), vendor="nvidia", nvml={}, outcome="invalid",
          says="device 0 gave no reading while the check ran: throttle reasons: the library answered",
          patches=SEEN | {"vendors.nvidia_device:sample": "lambda nvml, handle, index: __import__('dataclasses').replace("
          "original(nvml, handle, index), throttle=__import__('vendors').Throttle(reading=__import__('vendors').Absence.failed('X')))"}),
    Fault("a slow pair", device_check("test_peer_bandwidth"), vendor="nvidia", nvml={}, says="2 to 3 copies 350.0",
          patches=SEEN | {"workloads.devices:peer_speeds": speeds("4e-1 / 350 if (a, b) == (2, 3) else 1e-3")}),
    Fault("a slow pair of few lanes", device_check("test_peer_bandwidth"), "invalid", vendor="nvidia", nvml={"one": {"links": 9}},
          says="devices 0-1: nvlink, 9 active", patches=SEEN | {"workloads.devices:peer_speeds": speeds("4e-1 / 350 if 0 in (a, b) else 1e-3")}),
    Fault("a slow pair that sends again", device_check("test_peer_bandwidth"), "invalid", vendor="nvidia", nvml={"one": {"replaying": 1}},
          says="devices 0-1: replays grew", patches=SEEN | {"workloads.devices:peer_speeds": speeds("4e-1 / 350 if 0 in (a, b) else 1e-3")}),
    Fault("every pair is slow", device_check("test_peer_bandwidth"), vendor="nvidia", nvml={}, says="p2p_gb_per_s 50",
          patches=SEEN | {"workloads.devices:peer_speeds": speeds("8e-3")}),
    Fault("a pair was not measured", device_check("test_peer_bandwidth"), vendor="nvidia", nvml={}, says="measured",
          patches=SEEN | {"workloads.devices:peer_speeds": speeds("1e-3", "a < b")}),
    Fault("a fast copy of wrong data", device_check("test_peer_bandwidth"), vendor="nvidia", nvml={}, says="wrong_elements",
          patches=SEEN | {"workloads.devices:peer_speeds": speeds("1e-3", wrong=7)}),
    host_copies("every device is fed at half rate", "h2d_gb_per_s 25.6 GB/s < 48", h2d="1e-2"),
    host_copies("every device answers at half rate", "d2h_gb_per_s 25.6 GB/s < 49.7", d2h="1e-2"),
    replace(host_copies("one device of a narrow link", "device 0: PCIe width 8", "invalid", h2d="1e-2 if i == 0 else 5e-3"), nvml={"one": {"pcie_width": 8}}),
    replace(host_copies("fast for an older slot", outcome="passed", h2d="1e-2", d2h="1e-2"), nvml={"pcie_generation": 4, "pcie_max_generation": 4}),
    replace(host_copies("slow for an older slot", "h2d_gb_per_s 17.07 GB/s", h2d="1.5e-2", d2h="1e-2"), nvml={"pcie_generation": 4, "pcie_max_generation": 4}),
    host_copies("one device is fed slowly", "h2d_gb_per_s 20.48", h2d="1.25e-2 if i == 2 else 5e-3"),
    host_copies("one device answers slowly", "d2h: device 2 reaches 30.1 GB/s, the median of its node is 51.2", d2h="8.5e-3 if i == 2 else 5e-3"),
    host_copies("a copy to a device is wrong", "device 3: 9", wrong="9 * (i == 3)"),
    host_copies("a device was not fed", "3 of 4 devices", devices=3),
    host_copies("host copies in no time", "not a number", h2d="float('nan')"),
    Fault("a bit that sticks", device_check("test_memory_holds_patterns"), says="0x0000000000000020",
          patches={"workloads.memory:write": "lambda blocks, p: (original(blocks, p), blocks[-1][-1:].bitwise_or_(32))[0]"}),
    Fault("an address line is shorted", device_check("test_memory_holds_patterns"), says="own address",
          patches={"workloads.memory:write": "lambda blocks, p: (original(blocks, p), blocks[0][4096:8192].copy_(blocks[0][:4096]))[0]"}),
    Fault("a pattern is left out", device_check("test_memory_holds_patterns"), says="own address",
          patches={"workloads.memory:every_pattern": "lambda: list(original())[:1]"}),
    Fault("half of the memory is left out", device_check("test_memory_holds_patterns"), says="bytes were free",
          patches={"workloads.memory:taken": "lambda device, size: original(device, size // 2)"}),
    Fault("a NUMA node of others", device_check("test_numa_nodes_of_devices_are_ours"), vendor="nvidia", nvml={}, says="node 7",
          patches=SEEN | {"vendors.nvidia_device:_numa_node": "lambda bdf: 7"}),
    Fault("a peer copy is wrong", device_check("test_peer_copies_arrive"), vendor="nvidia", nvml={}, says="wrong_elements",
          patches=SEEN | {"workloads.devices:peer_copies":
                          "lambda: [{'from': a, 'to': b, 'access': True, 'wrong_elements': int(a == 2)}"
                          " for a in range(4) for b in range(4) if a != b]"}),
    Fault("throttling that only the samples see", device_check("test_peer_bandwidth"), vendor="nvidia", nvml={}, outcome="invalid",
          says="hardware thermal", patches=SEEN | {"vendors.nvidia_device:sample":
          "lambda *a: __import__('dataclasses').replace(original(*a), throttle=__import__('vendors').Throttle(unfit=('hardware thermal',), reading='0x40'))"}),
    Fault("the library fails beside a check", device_check("test_peer_copies_arrive"), vendor="nvidia", nvml={}, outcome="invalid",
          says="the library does not report", patches=SEEN | {READ: f"lambda self: {STUMBLES}"}),
    Fault("the library fails after every check", device_check("test_no_link_error_since_the_start"), vendor="nvidia", nvml={},
          outcome="invalid", says="the library does not report",
          patches=SEEN | {"harness.monitor:Monitor.read": f"lambda self, first=[1]: (first.pop(), original(self))[1] if first else {STUMBLES}"}),
    Fault("the library gives no sample", device_check("test_peer_bandwidth"), vendor="nvidia", nvml={}, outcome="invalid",
          says="gave no reading while the check ran: ", patches=SEEN | {SAMPLE: f"lambda self, indices: {STUMBLES}"}),
    Fault("no permission on a node", device_check("test_the_host_offers_what_devices_need"), vendor="nvidia", nvml={}, says="--gpus all"),
    Fault("tiny shared memory", device_check("test_the_host_offers_what_devices_need"), says="--shm-size", patches={"vendors.cpu:SHARED_MEMORY_BYTES": "original << 20"}),
    Fault("a CPU run shows a GPU", device_check("test_device_count"), patches={"workloads.devices:seen": "lambda: [{}]"}),
)  # fmt: skip


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.vendor == "cpu"], ids=str)
def test_planted_fault_of_a_processor_is_caught(fault, plant) -> None:
    """`test_nvidia_verdicts.py` plants the others, on a host that has the judge."""
    plant(fault)


@pytest.mark.parametrize(
    ("patches", "nvml", "cause"),
    [
        (SEEN | {"harness.readings:differs": "lambda *_: {}['x']"}, {}, "exception"),
        (SEEN, {"one": {"cores": 8448}}, None),
    ],
)
def test_an_exception_of_the_suites_is_told_apart_from_what_a_check_found(
    plant, patches, nvml, cause
) -> None:
    check = device_check("test_device_identity")
    found = plant(Fault("a defect", check, vendor="nvidia", nvml=nvml, patches=patches))
    assert found["checks"][0]["cause"] == cause


def test_a_process_without_memory_on_a_device_does_not_share_it(plant) -> None:
    """As amdsmi before 10.0 lists every process on every GPU."""
    idle = {"one": {"processes": [4321], "process_memory": 0}}
    check = device_check("test_devices_are_ours_alone")
    plant(Fault("nothing", check, vendor="nvidia", nvml=idle, outcome="passed", patches=SEEN))


def test_healthy_host_passes_every_device_check(plant) -> None:
    first, *others = sorted(ACCEPTANCE.glob("test_devices*.py"))
    patches = {**SEEN, "vendors.nvidia_device:_numa_node": "lambda bdf: 0"}
    fault = Fault("nothing", first.name, "passed", vendor="nvidia", nvml={}, patches=patches)
    result = plant(replace(fault, arguments=tuple(map(str, others))))
    assert {check["outcome"] for check in result["checks"]} == {"passed"}, result["output"]
    assert len(result["host"]["devices"]) == 4
    assert result["host"]["devices"][0]["model"] == "H200"


@pytest.mark.healthy
def test_check_of_the_soak_tier_says_how_long_it_lasts(plant, tmp_path) -> None:
    check = device_check("test_memory_holds_patterns")
    patches = SEEN | {"harness.order:Ended.add": "lambda self, number: None"}  # it takes the mark away
    plant(Fault("nothing", check, "passed", vendor="nvidia", nvml={}, tier="soak", patches=patches))
    assert list(tmp_path.glob("out/children/ended-*/lasts-1800-*"))


def without_bound(metric: str) -> dict[str, str]:
    """A checkout in which nobody has committed a bound of the metric."""
    found = f"None if metric == {metric!r} else original(entries, metric, conditions)"
    return {"harness.thresholds:find": f"lambda entries, metric, conditions: {found}"}


@pytest.mark.parametrize("way", ["h2d_gb_per_s", "d2h_gb_per_s"])
def test_missing_bound_of_a_way_fails(way, plant) -> None:
    fault = host_copies("no bound is committed", "GB/s has no bound")
    metrics = plant(replace(fault, patches={**fault.patches, **without_bound(way)}))["checks"][0]["metrics"]
    assert next(one for one in metrics if one["name"] == way)["verdict"] == "no_threshold"
    of_devices = way.replace("_gb", "_device_gb")
    assert [m["conditions"]["device"] for m in metrics if m["name"] == of_devices] == [0, 1, 2, 3]


@pytest.mark.healthy
def test_cores_beside_a_device_are_read_as_the_kernel_writes_them(tmp_path, monkeypatch) -> None:
    torch = pytest.importorskip("torch", reason="the suites need torch")
    from workloads import devices

    assert torch
    monkeypatch.setattr(devices, "BUS", tmp_path)
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "local_cpulist").write_text("0-3,8,10-11\n")
    assert devices.local_cores("0000:1b:00.0") == {0, 1, 2, 3, 8, 10, 11}
    assert devices.local_cores("0000:2b:00.0") == devices.local_cores(None) == set()


@pytest.mark.parametrize(
    ("check", "call", "arguments"),
    [("test_peer_copies_arrive", READ, "self"), ("test_peer_bandwidth", SAMPLE, "self, indices")],
)
def test_a_library_that_stumbles_once_costs_nothing(check, call, arguments, plant) -> None:
    once = f"lambda {arguments}, left=[1]: (left.pop(), {STUMBLES}) if left else original({arguments})"
    patches = SEEN | {call: once}
    plant(Fault("nothing", device_check(check), vendor="nvidia", nvml={}, outcome="passed", patches=patches))


CARDS = {
    "A100-PCIe": {"pci_device_id": 0x20B510DE, "memory": 81920 << 20, "capability": [8, 0], "cores": 6912},
    "A100-PCIe-40GB": {"pci_device_id": 0x20F110DE, "memory": 40960 << 20, "capability": [8, 0], "cores": 6912},
    "H100-PCIe": {"pci_device_id": 0x233110DE, "memory": 81559 << 20, "cores": 14592},
    "H100-NVL": {"pci_device_id": 0x232110DE, "memory": 95830 << 20},
    "H200-NVL": {"pci_device_id": 0x233B10DE},
}  # fmt: skip


MEMORY_TELLS = (
    "A100-PCIe-40GB"  # from another card of its chip; the slow half has those with a chip of their own
)


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=() if name == MEMORY_TELLS else pytest.mark.slow) for name in CARDS]
)
def test_cards_without_bridges_are_products_of_their_own(model, plant) -> None:
    chosen = ("-k", "identity or is_linked or peer_access or peer_copies")
    nvml = {**CARDS[model], "p2p_nvlink": 1, "p2p_read": 1}
    copies = SEEN["workloads.devices:peer_copies"].replace("'access': True", "'access': False")
    patches = SEEN | {"workloads.devices:peer_copies": copies}
    fault = Fault("nothing", "test_devices.py", vendor="nvidia", nvml=nvml, outcome="passed", patches=patches)
    result = plant(replace(fault, arguments=(str(ACCEPTANCE / "test_devices_links.py"), *chosen)))
    assert {device["model"] for device in result["host"]["devices"]} == {model}
    outcomes = {check["id"].rpartition("::")[2]: check["outcome"] for check in result["checks"]}
    unlinked = {"test_every_pair_is_linked": "skipped", "test_peer_access_is_granted": "skipped"}
    assert outcomes == {"test_device_identity": "passed", "test_peer_copies_arrive": "passed", **unlinked}


def test_devices_join_by_uuid_where_torch_tells_no_address(plant) -> None:
    check = device_check("test_torch_and_the_library_mean_the_same_devices")
    plant(Fault("nothing", check, vendor="nvidia", nvml={}, outcome="passed", patches=by_uuid(0)))


def test_healthy_memory_passes_however_little_time_there_is(plant) -> None:
    patches = {"workloads.memory:patterns": "lambda share, seconds: original(share, 0.0)"}
    check = device_check("test_memory_holds_patterns")
    plant(Fault("no time for patterns", check, outcome="passed", patches=patches))


def test_library_that_hangs_in_init_fails_the_run_in_time(plant) -> None:
    patches = SEEN | {"harness.monitor:TIMEOUT_S": "3.0"}
    fault = Fault(
        "init hangs",
        device_check("test_device_count"),
        vendor="nvidia",
        nvml={"init": "hang"},
        patches=patches,
    )
    result = plant(fault)
    assert "did not answer in" in result["checks"][0]["reason"]


def test_every_name_of_the_stub_is_one_of_nvidia_ml_py() -> None:
    real = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed beside the tool")
    stub = module_at(Path(STUBS / "pynvml.py"), "pynvml_stub")
    names = [name for name in vars(stub) if name.lower().startswith(("nvml", "c_nvml"))]
    assert not [name for name in names if not hasattr(real, name)]
    constants = [name for name in names if name.isupper() or name.startswith("nvmlEventType")]
    assert {name: getattr(stub, name) for name in constants} == {
        name: getattr(real, name) for name in constants
    }
