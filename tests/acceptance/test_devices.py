"""Devices: the right number and model, unmodified, and used by us only. In: readings of the machine. Out:
problems.

A missing reading (not supported, N/A, no permission) is a skip with that reason. All ones is a failure: a
device that answers 0xFF.. does not answer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import vendors
from harness import about, models, overdue, skips
from harness.asked import of_image
from harness.calls import RecordMetric
from harness.check import Check
from harness.evidence import occupants
from harness.readings import Findings, differs, known, only_with
from harness.session import AcceptanceSession
from harness.unfit import Unfit, invalid
from harness.worker import Worker
from vendors import Absence, Device, Host, is_known
from vendors.kernel_files import numbers

TOUCHED_BYTES = 2 << 30  # more than a driver reserves for itself, so another process uses the device
MEMORY_SHARE = 0.98  # of the nominal size; ECC and the driver reserve the rest
pytestmark = pytest.mark.gate


@pytest.fixture(scope="module")
def seen(
    acceptance: AcceptanceSession, vendor: vendors.Vendor, devices: tuple[Device, ...]
) -> Sequence[Mapping[str, Any]]:
    """All devices as torch sees them, from a separate child that may see every device."""
    worker = Worker(acceptance.result_dir / "children", acceptance.server)
    try:
        with overdue.failing():
            found: Sequence[Mapping[str, Any]] = worker.call(
                "workloads.devices:seen",
                {},
                environment=vendor.child_environment(devices),
                timeout_s=acceptance.limit_s(120, len(devices)),
            )
    finally:
        worker.stop()
    return found


def test_the_host_offers_what_devices_need(vendor: vendors.Vendor, host: Host, check: Check) -> None:
    """Device nodes can be opened, no device is missing, and shared and locked memory suffice."""
    findings = Findings()
    findings.wrong += [
        f"{need['name']}: {need['got']}, expected {need['expected']}; {need['next_step']}"
        for need in of_image(about.needs, vendor=vendor.NAME)
    ]
    check.more_evidence["missing"] = lost = list(host.unlisted)
    for bdf in lost:
        words = f"{bdf}: on the PCI bus, and the library does not list it; look at dmesg, then reset it"
        findings.machine("missing device", words)
    findings.conclude()


def test_device_count(
    vendor: vendors.Vendor, devices: tuple[Device, ...], seen: Sequence[Mapping[str, Any]]
) -> None:
    """torch sees exactly the devices that the management library lists; on a CPU, none."""
    expected = len(devices) if vendor.VISIBILITY else 0
    assert len(seen) == expected, f"torch sees {len(seen)} devices, expected {expected}"


def test_device_identity(vendor: vendors.Vendor, devices: tuple[Device, ...]) -> None:
    """Every device is a known model by PCI id, architecture, compute units and memory.
    All are the same model.
    """
    rows = [_row(vendor, device) for device in devices]
    found = [row["model"] for row in rows]
    odd = next((device for device in devices if models.partitioning(device)), None)
    if len(set(found)) > 1 and odd:  # the machine's mode, and no property of the image
        words = f"device {odd.index} is partitioned, {models.partitioning(odd)}, and others are not: {found}"
        invalid((Unfit("partition", words, odd.index),))
    assert len(set(found)) == 1, f"different device models: {found}"
    findings = Findings()
    for device in devices:
        if device.memory_bytes < MEMORY_SHARE * rows[0]["memory_bytes"]:
            least = f"{MEMORY_SHARE:.0%} of {rows[0]['memory_bytes']} bytes"
            words = f"device {device.index}: {device.memory_bytes} bytes of memory, less than {least}"
            findings.machine("short memory", words, device.index)
    expected = rows[0]["compute_units"]
    short = {
        d.index: d.compute_units for d in devices if vendor.VISIBILITY and differs(d.compute_units, expected)
    }
    known = "devices.json does not know them" if expected is None else f"expected {expected}"
    findings.wrong += [f"compute units {short}, {known}"] if short else []
    findings.conclude()


def test_torch_and_the_library_mean_the_same_devices(
    vendor: vendors.Vendor, devices: tuple[Device, ...], seen: Sequence[Mapping[str, Any]]
) -> None:
    """Each device of torch is one of the library's by address or UUID, with equal architecture and size."""
    only_with(seen, "gpu", "torch sees no GPU")
    for one in seen:
        matches = [device for device in devices if _same(vendor, device, one)]
        listed = [(device.bdf, device.uuid) for device in devices]
        alike = [other for other in seen if other["bdf"] == one["bdf"]] if one["bdf"] else [one]
        # The partitions of one GPU share its address, and torch and the library have to show as many of them.
        expected = len(alike) if matches and matches[0].partition.get("compute", "SPX") != "SPX" else 1
        words = f"torch lists {one}, which fits {len(matches)} of the library's {listed}"
        assert len(matches) == expected, words
        match = matches[0]
        assert match.arch == one["arch"]
        assert abs(match.memory_bytes - one["memory_bytes"]) <= 0.03 * match.memory_bytes
        assert not differs(match.compute_units, one["compute_units"])


def test_driver_serves_the_runtime(vendor: vendors.Vendor, host: Host, record_metric: RecordMetric) -> None:
    """The kernel driver is not too old for the runtime that torch was built with.

    A driver that is newer than every list of its documents passes, and the result says that it is not listed.
    """
    only_with(vendor.VISIBILITY, "gpu", "a CPU has no driver")
    runtime = of_image(about.torch_runtime, vendor=vendor.NAME)
    assert runtime, f"this torch is not a build for {vendor.NAME}"
    support = vendor.driver_support(host, runtime)
    shown = {
        "driver": str(host.driver),
        "runtime": runtime,
        "serves": str(host.driver_runtime),
        "state": support.state,
        "says": support.says,
    }
    record_metric("driver_listed", float(support.state == "listed"), unit="", conditions=shown)
    assert support.state != "refused", support.says


def test_firmware_is_equal(devices: tuple[Device, ...]) -> None:
    """All devices have the same firmware: mixed firmware makes a node slow and its results unreproducible."""
    names = sorted({name for device in devices for name in device.firmware})
    read = {
        name: {
            d.index: d.firmware[name]
            for d in devices
            if is_known(d.firmware.get(name, Absence.NOT_AVAILABLE))
        }
        for name in names
    }
    if not any(read.values()):
        skips.unreadable("firmware", "no firmware version can be read")
    for name, versions in read.items():  # a version that one device does not tell is not another version
        if len(set(versions.values())) > 1:
            invalid((Unfit("firmware", f"devices have different {name} firmware: {versions}"),))


def test_nothing_throttles(vendor: vendors.Vendor, devices: tuple[Device, ...]) -> None:
    """Before any work begins, no device is throttled by heat, voltage regulators or the power brake."""
    only_with(vendor.VISIBILITY, "gpu", "throttling of a CPU is not read")
    findings = Findings()
    for device in devices:
        if findings.knows(device.throttle.reading, "throttle reasons") and device.throttle.unfit:
            words = f"device {device.index} throttles: {', '.join(device.throttle.unfit)}"
            findings.machine("throttled", words, device.index)
    findings.conclude()


def test_power_cap_is_the_default(vendor: vendors.Vendor, devices: tuple[Device, ...]) -> None:
    """No power cap was lowered, which would silently slow every check."""
    only_with(vendor.VISIBILITY, "gpu", "a CPU has no power cap")
    # The second die of an MI250 has no cap of its own: the first die has the module's.
    own = [device for device in devices if device.power.cap_w != Absence.NOT_AVAILABLE]
    if not own:
        skips.unreadable("power cap", "power cap: N/A")
    findings = Findings()
    for device in own:
        cap, default = device.power.cap_w, device.power.default_cap_w
        known_caps = findings.knows(cap, "power cap") and findings.knows(default, "power cap")
        if known_caps and not float(cap) >= float(default):
            words = f"device {device.index}: power cap {cap} W, expected the default {default} W"
            findings.machine("power cap", words, device.index)
    findings.conclude()


def test_partition_is_the_reference(
    vendor: vendors.Vendor, devices: tuple[Device, ...], device_row: Mapping[str, Any]
) -> None:
    """Every device is partitioned as its device model says:
    a whole GPU is not (SPX/NPS1, MIG off), and one of MI300X-CPX-NPS4 is just so.
    """
    only_with(vendor.REFERENCE_PARTITION, "partitions", "a CPU has no partitions")
    findings = Findings()
    for device in devices:
        for name, expected in (device_row.get("partition") or vendor.REFERENCE_PARTITION).items():
            got = device.partition.get(name, Absence.NOT_AVAILABLE)
            if findings.knows(got, f"{name} partition") and got != expected:
                words = f"device {device.index}: {name} {got}, expected {expected}"
                findings.machine("partition", words, device.index)
    findings.conclude()


def test_devices_are_ours_alone(vendor: vendors.Vendor, devices: tuple[Device, ...]) -> None:
    """Before the first check, no other process holds memory on a device."""
    only_with(vendor.VISIBILITY, "gpu", "a CPU is always shared")
    for device in devices:
        if isinstance(device.processes, Absence) and device.processes.is_failure:
            known(device.processes, "processes")
        if others := occupants(device):
            words = f"device {device.index} is shared with {', '.join(others.values())}"
            invalid((Unfit("shared", words, device.index),))
        used = known(device.memory_used_bytes, "memory in use")
        if int(used) > TOUCHED_BYTES:
            words = f"device {device.index} has {int(used) / 2**30:.1f} GiB in use before the first check"
            invalid((Unfit("shared", words, device.index),))


def test_no_device_asks_for_recovery(devices: tuple[Device, ...]) -> None:
    """The driver does not ask for a reset, reboot or drain of any device."""
    findings = Findings()
    for device in devices:
        action = device.recovery_action
        if findings.knows(action, "recovery action") and action != "none":
            words = f"device {device.index}: the driver asks for: {action}"
            findings.machine("recovery", words, device.index)
    findings.conclude()


def test_numa_nodes_of_devices_are_ours(devices: tuple[Device, ...]) -> None:
    """This process may use the memory and at least one CPU of each device's NUMA node."""
    nodes = [int(device.numa_node) for device in devices if is_known(device.numa_node)]
    ours = of_image(about.places, fields=["Mems_allowed_list"], nodes=nodes)
    memory, findings = numbers(ours["status"]["Mems_allowed_list"]), Findings()
    for device in devices:
        if not findings.knows(device.numa_node, "NUMA node"):
            continue
        node = int(device.numa_node)
        cpus = numbers(ours["nodes"][str(node)]) if node in memory else set()
        if node not in memory:
            findings.wrong.append(
                f"device {device.index} is on NUMA node {node}, this process may use {sorted(memory)}"
            )
        elif not cpus & set(ours["cpus"]):
            findings.wrong.append(f"device {device.index}: this process may use no CPU of NUMA node {node}")
    findings.conclude()


def _row(vendor: vendors.Vendor, device: Device) -> Mapping[str, Any]:
    """The row of a device.
    A GPU in a mode that no row is for makes the machine unfit, as too little memory does.
    """
    try:
        return models.identify(vendor.NAME, device)
    except models.UnknownDeviceError as error:
        problem = str(error)
    if short := models.short_of_memory(device):
        return short
    if mode := models.partitioning(device):
        invalid((Unfit("partition", f"device {device.index}: {mode}; {problem}", device.index),))
    return pytest.fail(problem, pytrace=False)


def _same(vendor: vendors.Vendor, device: Device, one: Mapping[str, Any]) -> bool:
    """Whether two devices are one, by PCI address, or by UUID if torch gives no address, as 2.6 on ROCm."""
    bdf: str | None = one["bdf"]
    if bdf is not None:
        return device.bdf == bdf
    return one["uuid"] is not None and device.uuid.lower() == vendor.torch_uuid(one["uuid"]).lower()
