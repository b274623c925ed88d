"""Memory of devices and host after every other check. In: readings of the whole run. Out: what stays."""

import time

import pytest

import vendors
from harness import host_memory
from harness.calls import CLEAN_WAIT_S, RecordMetric
from harness.check import Check
from harness.evidence import STAYS_BYTES, evidence, newly_shared, newly_used
from harness.readings import Findings, machine, of, only_with
from harness.session import AcceptanceSession
from vendors import Device, Host


@pytest.mark.tier("soak")
@pytest.mark.last
def test_no_memory_of_devices_stays(
    acceptance: AcceptanceSession,
    vendor: vendors.Vendor,
    devices: tuple[Device, ...],
    whole_run: Host,
    check: Check,
) -> None:
    """After the last check, each device has no more memory in use than before the first one."""
    only_with(vendor.VISIBILITY, "gpu", "the memory of a processor is the host's")
    assert whole_run.devices
    acceptance.worker.stop()
    early, most = acceptance.machine_at_start(), STAYS_BYTES[acceptance.vendor]
    deadline = time.monotonic() + CLEAN_WAIT_S
    while True:  # workers of other processes are just ending
        late = machine(acceptance.monitor.read_devices)
        others, stays = newly_shared(early, late, devices), newly_used(early, late, devices, most)
        if not (others or stays) or time.monotonic() > deadline:
            break
        time.sleep(1)
    check.after.update(evidence(late, devices))
    findings = Findings()
    findings.unfit += others  # somebody else has it, as far as this container sees
    for device in () if others else devices:
        findings.knows(of(late, device).memory_used_bytes, "memory in use")
        if more := stays.get(device.index):
            findings.wrong.append(
                f"device {device.index}: {more >> 20} MiB stay in use, and no process has them"
            )
    findings.conclude()


@pytest.mark.tier("soak")
@pytest.mark.last
def test_no_memory_of_the_host_is_lost(
    acceptance: AcceptanceSession, whole_run: Host, check: Check, record_metric: RecordMetric
) -> None:
    """The host's memory that no process owns did not grow all the time while the suites ran.
    Beside GPUs it is recorded: how much their drivers keep for later was measured nowhere.
    """
    assert whole_run.vendor == acceptance.vendor
    readings = acceptance.host_memory.readings()
    check.more_evidence["host memory"] = [*readings[:1], *readings[-1:]]
    host_memory.record(readings, record_metric)
    if acceptance.shares_devices:
        growing = host_memory.growing(readings)
        assert not growing, "\n".join(growing)
