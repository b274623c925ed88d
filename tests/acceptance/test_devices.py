"""The devices: there are as many as promised, they are what they should be, and ours alone.

A reading that is not there is a skip with its reason (not supported, N/A, no permission); all-ones is a
failure, because a device that answers 0xFF.. does not answer.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import vendors
from harness import models
from harness.check import invalid
from harness.evidence import occupants
from harness.readings import Findings, differs, known, only_with
from harness.session import AcceptanceSession
from harness.worker import Worker
from vendors import Absence, Device, Host
from vendors.kernel_files import numbers

TOUCHED_BYTES = 2 << 30  # more than a driver reserves for itself: somebody has memory on the device
MEMORY_SHARE = 0.98  # of the nominal size; ECC and the driver keep the rest


@pytest.fixture(scope="module")
def seen(
    acceptance: AcceptanceSession, vendor: vendors.Vendor, devices: tuple[Device, ...]
) -> Sequence[Mapping[str, Any]]:
    """All devices as torch sees them, in a child of its own that is shown every one of them."""
    worker = Worker(acceptance.result_dir / "children")
    try:
        found: Sequence[Mapping[str, Any]] = worker.call(
            "workloads.devices:seen", {}, environment=vendor.child_environment(devices), timeout_s=120
        )
    finally:
        worker.stop()
    return found


def test_the_host_offers_what_devices_need(vendor: vendors.Vendor, host: Host) -> None:
    """Device nodes can be opened, no device is missing, and shared and locked memory are large enough."""
    missing = [
        f"{requirement.name}: {requirement.got}, expected {requirement.expected}; {requirement.next_step}"
        for requirement in vendor.requirements()
        if not requirement.ok
    ]
    lost = [
        f"{bdf}: held by the driver, and the library does not list it; see dmesg" for bdf in host.unlisted
    ]
    assert not missing + lost, "\n".join(missing + lost)


def test_device_count(
    vendor: vendors.Vendor, devices: tuple[Device, ...], seen: Sequence[Mapping[str, Any]]
) -> None:
    """torch sees exactly the devices that the management library lists; on a CPU, none."""
    assert len(seen) == (len(devices) if vendor.VISIBILITY else 0)


def test_device_identity(vendor: vendors.Vendor, devices: tuple[Device, ...]) -> None:
    """Every device is a known product by PCI id, architecture, compute units and memory, and all are the
    same one.
    """
    try:
        rows = [models.identify(vendor.NAME, device) for device in devices]
    except models.UnknownDeviceError as error:
        pytest.fail(str(error), pytrace=False)
    assert len({row["model"] for row in rows}) == 1, [row["model"] for row in rows]
    small = [
        d.index
        for d, row in zip(devices, rows, strict=True)
        if d.memory_bytes < MEMORY_SHARE * row["memory_bytes"]
    ]
    assert not small, f"devices {small} have less than {MEMORY_SHARE:.0%} of {rows[0]['memory_bytes']} bytes"
    expected = rows[0]["compute_units"]
    short = {
        d.index: d.compute_units for d in devices if vendor.VISIBILITY and differs(d.compute_units, expected)
    }
    assert not short, f"compute units {short}, expected {expected}"


def test_torch_and_the_library_mean_the_same_devices(
    vendor: vendors.Vendor, devices: tuple[Device, ...], seen: Sequence[Mapping[str, Any]]
) -> None:
    """Each device of torch joins one of the library by address or UUID, with equal architecture and size."""
    only_with(seen, "torch sees no GPU")
    for one in seen:
        matches = [device for device in devices if _same(vendor, device, one)]
        listed = [(device.bdf, device.uuid) for device in devices]
        assert len(matches) == 1, f"torch lists {one}, which fits {len(matches)} of the library's {listed}"
        (match,) = matches
        assert match.arch == one["arch"]
        assert abs(match.memory_bytes - one["memory_bytes"]) <= 0.03 * match.memory_bytes
        assert not differs(match.compute_units, one["compute_units"])


def test_driver_serves_the_runtime(vendor: vendors.Vendor, host: Host) -> None:
    """The kernel driver is inside the support window of the runtime that torch was built with."""
    only_with(vendor.VISIBILITY, "a CPU has no driver")
    runtime = vendor.torch_runtime()
    assert runtime, f"this torch is not built for {vendor.NAME}"
    problem = vendor.driver_problem(host, runtime)
    assert problem is None, problem


def test_firmware_is_equal(devices: tuple[Device, ...]) -> None:
    """Every device runs the same firmware: a mixed node is slow and unreproducible."""
    names = sorted({name for device in devices for name in device.firmware})
    only_with(names, "no firmware version can be read")
    for name in names:
        versions = {device.index: device.firmware.get(name, Absence.NOT_AVAILABLE) for device in devices}
        assert len(set(versions.values())) == 1, f"{name}: {versions}"


def test_nothing_throttles(vendor: vendors.Vendor, devices: tuple[Device, ...]) -> None:
    """No device is slowed by heat, its regulators or the power brake before any work begins."""
    only_with(vendor.VISIBILITY, "a CPU's throttling is not read")
    findings = Findings()
    for device in devices:
        if findings.knows(device.throttle.reading, "throttle reasons") and device.throttle.unfit:
            findings.wrong.append(f"device {device.index}: {', '.join(device.throttle.unfit)}")
    findings.conclude()


def test_power_cap_is_the_default(vendor: vendors.Vendor, devices: tuple[Device, ...]) -> None:
    """Nobody lowered a power cap: a silent cut of every figure."""
    only_with(vendor.VISIBILITY, "a CPU has no power cap")
    # The second die of an MI250 has no cap of its own: the first one's is the module's.
    own = [device for device in devices if device.power.cap_w != Absence.NOT_AVAILABLE]
    only_with(own, "power cap: N/A")
    findings = Findings()
    for device in own:
        cap, default = device.power.cap_w, device.power.default_cap_w
        told = findings.knows(cap, "power cap") and findings.knows(default, "power cap")
        if told and not float(cap) >= float(default):
            findings.wrong.append(f"device {device.index}: {cap} W, default {default} W")
    findings.conclude()


def test_partition_is_the_reference(vendor: vendors.Vendor, devices: tuple[Device, ...]) -> None:
    """Every device is whole (SPX/NPS1, MIG off), as the thresholds assume."""
    only_with(vendor.REFERENCE_PARTITION, "a CPU has no partitions")
    findings = Findings()
    for device in devices:
        for name, expected in vendor.REFERENCE_PARTITION.items():
            got = device.partition.get(name, Absence.NOT_AVAILABLE)
            if findings.knows(got, f"{name} partition") and got != expected:
                findings.wrong.append(f"device {device.index}: {name} {got}, expected {expected}")
    findings.conclude()


def test_devices_are_ours_alone(vendor: vendors.Vendor, devices: tuple[Device, ...]) -> None:
    """Before the first check no other process holds memory on a device."""
    only_with(vendor.VISIBILITY, "a CPU is always shared")
    for device in devices:
        if isinstance(device.processes, Absence) and device.processes.is_failure:
            known(device.processes, "processes")
        if others := occupants(device):
            invalid(f"device {device.index} is shared with {', '.join(others.values())}")
        used = known(device.memory_used_bytes, "memory in use")
        if int(used) > TOUCHED_BYTES:
            invalid(f"device {device.index} has {int(used) / 2**30:.1f} GiB in use before the first check")


def test_no_device_asks_for_recovery(devices: tuple[Device, ...]) -> None:
    """The driver asks for no reset, reboot or drain."""
    findings = Findings()
    for device in devices:
        action = device.recovery_action
        if findings.knows(action, "recovery action") and action != "none":
            findings.wrong.append(f"device {device.index}: {action}")
    findings.conclude()


def test_numa_nodes_of_devices_are_ours(devices: tuple[Device, ...]) -> None:
    """This process may use the memory and some CPU of each device's NUMA node."""
    memory, findings = numbers(_status("Mems_allowed_list")), Findings()
    for device in devices:
        if not findings.knows(device.numa_node, "NUMA node"):
            continue
        node = int(device.numa_node)
        cpus = (
            numbers(Path(f"/sys/devices/system/node/node{node}/cpulist").read_text())
            if node in memory
            else set()
        )
        if node not in memory:
            findings.wrong.append(
                f"device {device.index} is on node {node}, this process may use {sorted(memory)}"
            )
        elif not cpus & os.sched_getaffinity(0):
            findings.wrong.append(f"no CPU of node {node} is in this process's CPU set")
    findings.conclude()


def _same(vendor: vendors.Vendor, device: Device, one: Mapping[str, Any]) -> bool:
    """By address; torch 2.6 on ROCm tells none."""
    bdf: str | None = one["bdf"]
    if bdf is not None:
        return device.bdf == bdf
    return one["uuid"] is not None and device.uuid.lower() == vendor.torch_uuid(one["uuid"]).lower()


def _status(field: str) -> str:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith(field + ":"))
