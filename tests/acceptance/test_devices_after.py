"""The devices after every other check. In: readings before and after the run.
Out: errors and faults in between.
"""

from collections.abc import Mapping
from typing import Any

import pytest

import vendors
from harness import nics, skips
from harness.check import Check
from harness.readings import Findings, is_unread, needs_pair, of, only_with
from harness.session import AcceptanceSession
from vendors import Device, Host

pytestmark = pytest.mark.gate


@pytest.mark.last
def test_no_link_error_since_the_start(host: Host, whole_run: Host, device_row: Mapping[str, Any]) -> None:
    """The error counts of the links between devices did not grow while the suites ran."""
    needs_pair(len(host.devices))
    only_with(device_row["link"], "link", "this device has no link to others")
    early = {(link.a, link.b): link for link in host.links}
    findings = Findings()
    for late in whole_run.links:
        before = 0 if late.errors_cleared else early[late.a, late.b].errors
        counted = findings.knows(before, "link errors") and findings.knows(late.errors, "link errors")
        if counted and int(late.errors) > int(before):
            findings.machine("link", f"{late.a}-{late.b}: link errors grew from {before} to {late.errors}")
    findings.conclude()


@pytest.mark.last
def test_no_network_error_since_the_start(
    acceptance: AcceptanceSession, whole_run: Host, check: Check
) -> None:
    """The ports for RDMA are still there, and counted no more errors than a healthy link does."""
    assert whole_run.vendor == acceptance.vendor
    early, late = acceptance.machine_at_start().nics, nics.read()
    check.before["nics"], check.more_evidence["nics"] = early, late
    findings = Findings()
    for words in nics.growing(dict(early), late):
        findings.machine("nic", words)
    findings.conclude()


@pytest.mark.last
def test_no_memory_error_since_the_start(
    vendor: vendors.Vendor, devices: tuple[Device, ...], whole_run: Host
) -> None:
    """No device counted an uncorrectable error, or gained a pending or failed repair, since the run began."""
    only_with(vendor.VISIBILITY, "gpu", "ECC of a CPU is not read")
    findings = Findings()
    for device in devices:
        early, late = device.ecc, of(whole_run, device).ecc
        for name in ("uncorrectable", "pending", "failed"):
            before, after = getattr(early, name), getattr(late, name)
            if name == "uncorrectable" or not is_unread(after):  # not every device repairs rows
                findings.knows(after, f"{name} memory errors")
            if isinstance(before, int) and isinstance(after, int) and after > before:
                words = f"device {device.index}: {name} grew from {before} to {after}"
                findings.machine("memory errors", words, device.index)
    findings.conclude()


@pytest.mark.last
def test_no_fault_was_reported(
    acceptance: AcceptanceSession,
    vendor: vendors.Vendor,
    devices: tuple[Device, ...],
    whole_run: Host,
    check: Check,
) -> None:
    """The driver reported no fault (Xid, page fault, reset, poison) while the suites ran."""
    only_with(vendor.VISIBILITY, "gpu", "a CPU reports no faults")
    assert whole_run.devices
    reports = acceptance.listener.reports()
    if reports.absence is not None:
        skips.unreadable("fault reports", f"fault reports: {reports.absence}")
    ours = {-1, *(device.index for device in devices)}
    faults = [fault for fault in reports.faults if fault["index"] in ours]
    check.more_evidence["faults"] = faults
    findings = Findings()
    for fault in faults:
        words = f"device {fault['index']} at {fault['time']}: {fault['what']}"
        if fault["machine"]:
            findings.machine("driver fault", words, fault["index"] if fault["index"] >= 0 else None)
        else:  # a program can cause it, so it may be the image's
            findings.wrong.append(words)
    findings.conclude()
    assert reports.listening, (
        f"fault reports were not read to the end: {reports.error or 'the listener ended'}"
    )
