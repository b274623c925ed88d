"""The node's network cards for RDMA: ports, rates, MTU, GPUDirect, plug-ins. In: /sys. Out: problems.

A host without such a card passes, and the evidence says so: on one node alone nothing needs it. What is wrong
with a card is the machine's; only a plug-in that an image lacks is the image's.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest

import vendors
from harness import nics
from harness.calls import InChild
from harness.check import Check
from harness.readings import Findings
from harness.session import AcceptanceSession
from vendors import Device
from workloads import network_plugins

pytestmark = pytest.mark.gate


@pytest.fixture
def ports(acceptance: AcceptanceSession, check: Check) -> nics.Ports:
    """The ports as they were when the run began; they are the evidence of each check here."""
    early = acceptance.machine_at_start().nics
    check.more_evidence["nics"] = early or "this host has no network card for RDMA"
    return dict(early)


def _conclude(faults: Iterable[str]) -> None:
    findings = Findings()
    for words in faults:
        findings.machine("nic", words)
    findings.conclude()


def test_network_ports_are_up(ports: nics.Ports) -> None:
    """Every port is active whose mates on equal cards are; on a host with cards at least one is."""
    _conclude(nics.down(ports))


def test_network_ports_are_fast(ports: nics.Ports) -> None:
    """Every active port has the rate and lanes of its mates, and its card the PCIe link that the slot can."""
    _conclude(nics.slow(ports))


def test_network_mtu_is_equal(ports: nics.Ports) -> None:
    """Active ports of equal cards have equal MTUs: a smaller one drops or splits what the others send."""
    _conclude(nics.unlike(ports))


def test_gpus_reach_the_network(
    vendor: vendors.Vendor, devices: tuple[Device, ...], ports: nics.Ports, check: Check
) -> None:
    """Cards of a fabric can read the memory of GPUs: by the driver's module, or by dma-buf."""
    if not (devices and vendor.VISIBILITY and nics.fabric(ports)):
        return
    ways = vendor.gpudirect(Path("/"))
    check.more_evidence["gpudirect"] = ways
    findings = Findings()
    if ways and not any(there is not False for there in ways.values()):
        words = f"{', '.join(nics.fabric(ports))} cannot reach the GPUs' memory: no {', no '.join(ways)}"
        findings.machine("gpudirect", words)
    findings.conclude()


def test_network_plugins_are_there(ports: nics.Ports, in_child: InChild, check: Check) -> None:
    """Where the cards are EFA, the image has libfabric and the plug-in for it; versions are evidence."""
    found = in_child(network_plugins.found)
    check.more_evidence["plugins"] = found
    if cards := nics.efa(ports):
        lacking = [name for name in network_plugins.OF_EFA if not found[name]]
        assert not lacking, (
            f"{', '.join(cards)} need {' and '.join(lacking)} in the image, else NCCL uses TCP"
        )
