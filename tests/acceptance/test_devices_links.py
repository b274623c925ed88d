"""Links: full width, between every pair, equal both ways. In: readings, n devices.
Out: problems and metrics.
"""

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

import vendors
from harness import paths
from harness.calls import OnDevice, RecordMetric
from harness.check import Check
from harness.evidence import link_states
from harness.readings import Findings, links_of_pairs, machine, needs_pair, only_with, while_busy
from harness.session import AcceptanceSession
from harness.unfit import Unfit
from vendors import Device, Host, Link, is_known
from workloads import margins, speed_outliers

LOAD_S = 2.0
PEER_TIMEOUT_S = 300
# Of the median device's host copies: a remote NUMA node costs less than this, half a link costs more.
LEAST_OF_NODE = 0.7
SYMMETRY = 0.10  # more than devices and switches vary, less than two of eighteen lanes cost
RANKS = {"cpu": 1, "perf": True}  # `ranks` is every device of this run, alone on the machine
pytestmark = pytest.mark.gate


def test_pcie_link_is_full(
    acceptance: AcceptanceSession,
    vendor: vendors.Vendor,
    devices: tuple[Device, ...],
    device_row: Mapping[str, Any],
    *,
    on_device: OnDevice,
    check: Check,
) -> None:
    """Under load each PCIe link has the width and the generation that it should have.
    The width is at least the device model's; the generation is the highest that device and slot share. Idle
    links step down.
    """
    only_with(device_row["pcie"], "pcie", "a CPU has no PCIe link of its own")
    findings = Findings()
    findings.unfit += _bad_host_links(acceptance, vendor, devices, device_row, on_device, check=check)
    findings.conclude()


def test_every_pair_is_linked(vendor: vendors.Vendor, host: Host, device_row: Mapping[str, Any]) -> None:
    """Each pair of devices is joined by the vendor's link with every lane up.
    A pair on PCIe is 5 to 10 times slower. PCIe cards are joined by bridges in pairs or fours: all of them,
    or none.
    """
    needs_pair(len(host.devices))
    only_with(_expected(host, device_row), "link", "no bridge joins these cards")
    findings, least = Findings(), _least_links(vendor, device_row)
    for words in _without_bridge(host, device_row):
        findings.machine("link", words)
    for link in _expected(host, device_row):
        kind_is_known = findings.knows(link.kind, "link type")
        findings.knows(link.active, "active links")  # amdsmi before 6.4 does not report it
        if kind_is_known and not _is_linked(link, vendor.PEER_LINK, least):
            words = f"devices {link.a}-{link.b}: {link.kind}, {link.active} active"
            findings.machine("link", f"{words}, expected {vendor.PEER_LINK}, at least {least} active")
    findings.conclude()


def test_peer_access_is_granted(host: Host, device_row: Mapping[str, Any]) -> None:
    """The driver lets each device of a linked pair read the other's memory."""
    needs_pair(len(host.devices))
    only_with(_expected(host, device_row), "link", "no bridge joins these cards")
    findings = Findings()
    for link in _expected(host, device_row):
        refused = findings.knows(link.p2p, "peer status") and not link.p2p
        # Without a bridge the driver may refuse access; between two bridged cards that is a fault.
        if refused and (not _is_bridged(device_row) or findings.knows(link.kind, "link type")):
            findings.wrong.append(f"devices {link.a}-{link.b}: the driver refuses peer access")
    findings.conclude()


@pytest.mark.gpus(2, whole=False)
def test_peer_copies_arrive(
    vendor: vendors.Vendor,
    devices: tuple[Device, ...],
    host: Host,
    device_row: Mapping[str, Any],
    on_device: OnDevice,
    *,
    record_metric: RecordMetric,
) -> None:
    """A pattern copied between every ordered pair arrives bit for bit; linked pairs copy without the host."""
    needs_pair(len(devices))
    copies = on_device("workloads.devices:peer_copies", timeout_s=300, env=vendor.child_environment(devices))
    wrong_elements = sum(copy["wrong_elements"] for copy in copies)
    margins.record(record_metric, margins.of(wrong_elements, 0), len(copies))
    assert len(copies) == len(devices) * (len(devices) - 1)
    linked = {
        frozenset((link.a, link.b))
        for link in _expected(host, device_row)
        if is_known(link.kind) or not _is_bridged(device_row)
    }
    wrong = [
        copy
        for copy in copies
        if copy["wrong_elements"]
        or (frozenset(devices[copy[end]].index for end in ("from", "to")) in linked and not copy["access"])
    ]
    assert not wrong, f"wrong data, or a copy through the host: {wrong}"


def test_switch_fabric_is_up(devices: tuple[Device, ...]) -> None:
    """Behind NVSwitch, every device has registered with the fabric manager."""
    findings = Findings()
    for device in devices:
        if findings.knows(device.fabric, "switch fabric") and device.fabric != "completed":
            words = f"device {device.index}: the fabric is {device.fabric}, expected completed"
            findings.machine("fabric", words, device.index)
    findings.conclude()


@pytest.mark.tier("standard")
def test_peer_bandwidth(
    ranks: int,
    devices: tuple[Device, ...],
    host: Host,
    device_row: Mapping[str, Any],
    on_device: OnDevice,
    *,
    acceptance: AcceptanceSession,
    vendor: vendors.Vendor,
    check: Check,
    record_metric: RecordMetric,
) -> None:
    """Every ordered pair copies at the device model's rate, equally fast both ways, without an error.
    It is as fast as the other pairs with the same number of links.
    """
    needs_pair(ranks)
    only_with(device_row["link"], "link", "this device has no link to others")
    found = on_device("workloads.devices:peer_speeds", timeout_s=PEER_TIMEOUT_S)
    rates = {
        (pair["from"], pair["to"]): [found["bytes"] / seconds / 1e9 for seconds in pair["seconds"]]
        for pair in found["pairs"]
    }
    assert set(rates) == set(itertools.permutations(range(ranks), 2)), (
        f"only these pairs were measured: {sorted(rates)}"
    )
    matrix = {pair: statistics.median(repeats) for pair, repeats in rates.items()}
    slowest = min(matrix, key=matrix.__getitem__)
    record_metric(
        "p2p_gb_per_s",
        matrix[slowest],
        unit="GB/s",
        repeats=rates[slowest],
        conditions={"bytes": found["bytes"], "matrix": {f"{a}-{b}": rate for (a, b), rate in matrix.items()}},
        gate=True,
    )
    wrong = [pair for pair in found["pairs"] if pair["wrong_elements"]]
    assert not wrong, f"wrong data arrived: {wrong}"
    usual = None if _is_bridged(device_row) else speed_outliers.medians(matrix, links_of_pairs(host, devices))
    uneven = list(_uneven(matrix, usual))
    if uneven or check.slow:
        check.doubts += _bad_peer_links(acceptance, vendor, host, device_row, check)
    check.require_even(uneven)


@pytest.mark.tier("standard")
def test_host_bandwidth(
    ranks: int,
    devices: tuple[Device, ...],
    device_row: Mapping[str, Any],
    on_device: OnDevice,
    *,
    acceptance: AcceptanceSession,
    vendor: vendors.Vendor,
    check: Check,
    record_metric: RecordMetric,
) -> None:
    """Each device copies to and from pinned host memory at its link's rate, without an error.
    All are equally fast.
    """
    only_with(device_row["pcie"], "pcie", "a CPU has no PCIe link of its own")
    found = on_device("workloads.devices:host_speeds", timeout_s=PEER_TIMEOUT_S)
    assert len(found["devices"]) == ranks, f"{len(found['devices'])} of {ranks} devices were measured"
    measured = {device.index: one for device, one in zip(devices, found["devices"], strict=True)}
    slow = []
    for way in ("h2d", "d2h"):
        repeats = {index: [found["bytes"] / s / 1e9 for s in one[way]] for index, one in measured.items()}
        rates = {index: statistics.median(figures) for index, figures in repeats.items()}
        conditions = {"bytes": found["bytes"], **paths.older_slot(devices, device_row)}
        for index, rate in rates.items():
            own, name = {**conditions, "device": index}, f"{way}_device_gb_per_s"
            record_metric(name, rate, unit="GB/s", repeats=repeats[index], conditions=own)
        slowest = min(rates, key=rates.__getitem__)  # judged by the bound for all of them
        record_metric(
            f"{way}_gb_per_s",
            rates[slowest],
            unit="GB/s",
            repeats=repeats[slowest],
            conditions=conditions,
            gate=True,
        )
        slow += [f"{way}: {line}" for line in speed_outliers.slow_devices(rates, LEAST_OF_NODE, "GB/s")]
    wrong = [
        f"device {index}: {one['wrong_elements']}" for index, one in measured.items() if one["wrong_elements"]
    ]
    assert not wrong, f"wrong elements: {', '.join(wrong)}"
    if slow or check.slow:
        check.doubts += _bad_host_links(acceptance, vendor, devices, device_row, on_device, check=check)
    check.require_even(slow)


def _bad_host_links(
    acceptance: AcceptanceSession,
    vendor: vendors.Vendor,
    devices: Sequence[Device],
    device_row: Mapping[str, Any],
    on_device: OnDevice,
    *,
    check: Check,
) -> list[Unfit]:
    """What is wrong with the PCIe links while copies run; the readings become evidence."""
    environment = vendor.child_environment(devices)
    readings = while_busy(
        acceptance.monitor, lambda: on_device("workloads.devices:busy_links", seconds=LOAD_S, env=environment)
    )
    links = {device.index: paths.busiest(readings, device) for device in devices}
    check.more_evidence["pcie"] = {str(index): asdict(link) for index, link in links.items()}
    return [bad for index, link in links.items() for bad in paths.too_little(index, link, device_row)]


def _bad_peer_links(
    acceptance: AcceptanceSession,
    vendor: vendors.Vendor,
    host: Host,
    device_row: Mapping[str, Any],
    check: Check,
) -> list[Unfit]:
    """What is wrong with the links between devices after copies; the readings become evidence."""
    late = machine(acceptance.monitor.read, attempts=1)
    check.before["links"], check.more_evidence["links"] = link_states(host), link_states(late)
    expected = {(link.a, link.b) for link in _expected(host, device_row)}
    least = _least_links(vendor, device_row)
    late = replace(late, links=tuple(link for link in late.links if (link.a, link.b) in expected))
    return list(paths.bad_links(host, late, lambda link: not _is_linked(link, vendor.PEER_LINK, least)))


def _is_linked(link: Link, kind: str, least: int) -> bool:
    """Whether what is known of a link is as it should be."""
    active = link.active
    enough = active == "up" or not is_known(active) or (isinstance(active, int) and active >= least)
    return enough and (link.kind == kind or not is_known(link.kind))


def _is_bridged(row: Mapping[str, Any]) -> bool:
    return bool(row["link"] and row["link"].get("bridged"))


def _expected(host: Host, row: Mapping[str, Any]) -> list[Link]:
    """Pairs that must be linked: all, or between bridged cards those that a bridge joins or may join.
    No pairs of a device model without links, as partitions of one GPU are.
    """
    if not row["link"]:
        return []
    return [
        link
        for link in host.links
        if not _is_bridged(row) or not is_known(link.kind) or link.kind == row["link"]["kind"]
    ]


def _without_bridge(host: Host, row: Mapping[str, Any]) -> Iterator[str]:
    """Bridged cards that are joined with fewer cards than the others are."""
    ends = [index for link in _expected(host, row) for index in (link.a, link.b)]
    partners = {device.index: ends.count(device.index) for device in host.devices}
    most = max(partners.values())
    if _is_bridged(row):
        yield from (
            f"device {index}: joined with {count}, others with {most}"
            for index, count in partners.items()
            if count < most
        )


def _uneven(
    matrix: Mapping[tuple[int, int], float], usual: Mapping[tuple[int, int], float] | None
) -> Iterator[str]:
    """Pairs that are slower than their way back, or, where pairs are alike, than is `usual` for them."""
    for (a, b), rate in matrix.items():
        back = matrix[b, a]
        if not rate >= (1 - SYMMETRY) * back:  # so that NaN is uneven too
            yield f"{a} to {b} copies {rate:.1f} GB/s, the way back {back:.1f} GB/s"
        elif usual and not rate >= (1 - SYMMETRY) * usual[a, b]:
            yield f"{a} to {b} copies {rate:.1f} GB/s, the median of such pairs is {usual[a, b]:.1f} GB/s"


def _least_links(vendor: vendors.Vendor, row: Mapping[str, Any]) -> int:
    """The fewest links that must be up: every one to a switch; one to each neighbour in a direct mesh."""
    return int(row["link"]["links"]) if row["link"]["kind"] == "nvlink" == vendor.PEER_LINK else 1
