"""Device memory: error counts before the run, and test patterns. In: readings, devices. Out: problems."""

import pytest

import vendors
from harness.calls import OnDevice, RecordMetric
from harness.readings import Findings, only_with
from harness.session import AcceptanceSession
from vendors import Absence, Device
from workloads import margins

SHARE, LEAST_SHARE = 0.95, 0.85  # of the free memory: how much to test, and how much must be tested
SECONDS = {"smoke": 1.0, "standard": 10.0, "soak": 1800.0}  # after which no further pattern begins
CPU_SECONDS = 0.5
MARGIN_S = 120.0
RANKS = {"cpu": 1, "exclusive": True}  # `ranks` is every device; no other process may hold memory on them
pytestmark = pytest.mark.gate
PASSES = {"own address", "own address, complement"}  # they test every bit of every word in both states


def test_memory_is_healthy(vendor: vendors.Vendor, devices: tuple[Device, ...]) -> None:
    """ECC is on; there is no uncorrectable error, no pending repair and no failed one."""
    only_with(vendor.VISIBILITY, "gpu", "ECC of a CPU is not read")
    findings = Findings()
    for device in devices:
        if findings.knows(device.ecc.enabled, "ECC mode") and device.ecc.enabled is not True:
            findings.machine("memory errors", f"device {device.index}: ECC is off", device.index)
        for name in ("uncorrectable", "pending", "failed"):
            count = getattr(device.ecc, name)
            if count in (Absence.NOT_AVAILABLE, Absence.NOT_SUPPORTED) and name != "uncorrectable":
                continue  # not every device repairs rows
            if findings.knows(count, f"{name} memory errors") and int(count) != 0:
                words = f"device {device.index}: {count} {name} memory errors or repairs, expected 0"
                findings.machine("memory errors", words, device.index)
    findings.conclude()


@pytest.mark.tier("standard")
def test_memory_holds_patterns(
    ranks: int, acceptance: AcceptanceSession, on_device: OnDevice, record_metric: RecordMetric
) -> None:
    """Most of each device's free memory keeps what is written: own addresses, checkerboards, walking bits."""
    seconds = CPU_SECONDS if acceptance.shares_devices else SECONDS[acceptance.tier]
    acceptance.ended.expect(seconds)
    found = on_device(
        "workloads.memory:patterns", share=SHARE, seconds=seconds, timeout_s=4 * seconds + MARGIN_S
    )
    wrong = sum(one["errors"] for one in found)
    margins.record(record_metric, margins.of(wrong, 0), sum(len(one["passes"]) for one in found))
    assert len(found) == ranks, f"{len(found)} devices were tested, expected {ranks}"
    for one in found:
        covered = f"device {one['device']}: {one['bytes'] / 2**30:.1f} GiB, {len(one['passes'])} patterns"
        assert not one["errors"], f"{covered}, {one['errors']} wrong words: {one['first']}"
        assert one["bytes"] >= LEAST_SHARE * one["free_bytes"], (
            f"{covered}: {one['free_bytes']} bytes were free, at least {LEAST_SHARE:.0%} must be tested"
        )
        assert set(one["passes"]) >= PASSES, f"{covered}, expected at least {sorted(PASSES)}"
