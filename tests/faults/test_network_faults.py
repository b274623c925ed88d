"""Faults of network cards, planted in a fabricated /sys, and hosts that must pass: healthy ones, and none."""

# ruff: noqa: E501 - a table of faults reads in rows
from dataclasses import replace
from pathlib import Path

import pytest

import network_cards
from device_hosts import SEEN
from harness import nics
from planting import FAULTS as HERE
from planting import Fault
from unfit_runs import assert_unfit
from vendors import amd_kernel, nvidia

CARDS = "__import__('network_cards')"
DOWN = {"state": "1: DOWN", "phys_state": "2: Polling"}


def on_cards(
    name: str, check: str, says: str = "", outcome: str = "invalid", *, cards: str = "root()"
) -> Fault:
    file = "test_devices_after.py" if "since_the_start" in check else "test_fabric.py"
    patches = {"harness.nics:read": f"lambda: original({CARDS}.{cards})"}
    target = f"{file}::{check}" if check else file  # without a check: all of the file
    return Fault(name, target, outcome, says, patches=patches, paths=(str(HERE),))


def with_gpus(
    name: str, says: str = "", outcome: str = "invalid", *, kernel: str, cards: str = "root()"
) -> Fault:
    """A host of four H200s; `kernel` is what the driver's files say."""
    made = on_cards(name, "test_gpus_reach_the_network", says, outcome, cards=cards)
    return replace(
        made,
        vendor="nvidia",
        nvml={},
        patches=SEEN | made.patches | {"vendors.nvidia:gpudirect": f"lambda root: {kernel}"},
    )


UP, FAST, MTU = "test_network_ports_are_up", "test_network_ports_are_fast", "test_network_mtu_is_equal"
PLUGINS, LATE = "test_network_plugins_are_there", "test_no_network_error_since_the_start"
NEITHER = "{'nvidia-peermem': False, 'dma-buf': False}"
FAULTS = (
    on_cards("a port is down", UP, "mlx5_3/1 at 0000:43:00.0: state DOWN, physical Polling", cards=f"root({DOWN})"),
    on_cards("every port is down", UP, "mlx5_0/1", cards=f"root(**{DOWN})"),
    on_cards("a port of lower rate", FAST, "mlx5_3/1 at 0000:43:00.0: rate 200, its mates have 400", cards="root({'rate': '200 Gb/sec (4X HDR)'})"),
    on_cards("a port of one lane", FAST, "lanes 1, its mates have 4 lanes", cards="root({'rate': '100 Gb/sec (1X NDR)'})"),
    on_cards("a card of eight PCIe lanes", FAST, "PCIe width 8, card and slot can 16", cards="root({'width': 8})"),
    on_cards("a card of slow PCIe", FAST, "PCIe speed 16, card and slot can 32 GT/s", cards="root({'speed': '16.0 GT/s PCIe'})"),
    on_cards("a smaller MTU", MTU, "mlx5_3/1 at 0000:43:00.0: MTU 2044, its mates have 4092", cards="root({'mtu': 2044})"),
    on_cards("symbol errors grow", LATE, "symbol_error grew from 0 to 7", cards="growing({'errors': {'symbol_error': 7}})"),
    with_gpus("no peermem and no dma-buf", "cannot reach the GPUs' memory: no nvidia-peermem, no dma-buf", kernel=NEITHER),
    on_cards("EFA without its plug-in", PLUGINS, "in the image, else NCCL uses TCP", "failed", cards="root(driver='efa')"),
    # Chosen when the checks were done.
    on_cards("a card is gone at the end", LATE, "mlx5_3/1 at 0000:43:00.0: it was there when the run began, and is gone", cards="growing({'gone': True})"),
    on_cards("a link went down and came back", LATE, "link_downed grew from 0 to 1", cards="growing({'errors': {'link_downed': 1}})"),
    on_cards("a counter that counts no further", LATE, "symbol_error stands at its end, 65535", cards="root({'errors': {'symbol_error': 65535}})"),
)  # fmt: skip
HEALTHY = (
    *(replace(on_cards(name, check, outcome="passed", cards=cards), arguments=("-k", "network_"))
      for name, cards in (("equal cards", "root()"), ("no card", "root(cards=0)")) for check in ("", LATE)),
    on_cards("a second kind without a cable", UP, outcome="passed", cards=f"root({DOWN | {'device': '0x1017'}})"),
    on_cards("a slower card of another kind", FAST, outcome="passed", cards="root({'device': '0x1017', 'rate': '100 Gb/sec (4X EDR)'})"),
    on_cards("a slot of eight lanes", FAST, outcome="passed", cards="root({'width': 8, 'slot_width': 8})"),
    on_cards("a virtual function that is down", UP, outcome="passed", cards=f"root({DOWN | {'virtual': True}})"),
    on_cards("old errors", LATE, outcome="passed", cards="root(errors={'symbol_error': 12, 'link_downed': 3})"),
    with_gpus("dma-buf alone", outcome="passed", kernel="{'nvidia-peermem': False, 'dma-buf': True}"),
    with_gpus("files that a container does not show", outcome="passed", kernel="{'nvidia-peermem': False, 'dma-buf': None}"),
    with_gpus("one card of Ethernet", outcome="passed", kernel=NEITHER, cards="root(cards=1, link_layer='Ethernet')"),
    with_gpus("no card", outcome="passed", kernel=NEITHER, cards="root(cards=0)"),
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_of_a_network_card_is_caught(fault, plant):
    result = plant(fault)
    if fault.outcome == "invalid":
        assert_unfit(result)


@pytest.mark.healthy
@pytest.mark.parametrize("fault", HEALTHY, ids=str)
def test_healthy_network_cards_pass(fault, plant):
    plant(fault)


@pytest.mark.healthy
def test_a_host_without_cards_says_so(plant):
    found = plant(on_cards("no card", UP, outcome="passed", cards="root(cards=0)"))
    assert found["checks"][0]["evidence"]["after"]["nics"] == "this host has no network card for RDMA"


@pytest.mark.catches("test_no_network_error_since_the_start")
def test_a_few_symbol_errors_in_a_long_run_are_usual(tmp_path, monkeypatch):
    monkeypatch.setenv("STACKCHECK_FAKE_FOLDER", str(tmp_path))
    early = nics.read(network_cards.root())
    late = nics.read(network_cards.root({"errors": {"symbol_error": 9}}))
    for port in late.values():
        port["read"] = next(iter(early.values()))["read"] + 3600
    assert not list(nics.growing(early, late))
    late["mlx5_3/1"]["errors"]["symbol_error"] = 11
    assert list(nics.growing(early, late))


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


@pytest.mark.catches("test_gpus_reach_the_network")
def test_gpudirect_is_read_from_the_kernels_files(tmp_path):
    kernel = {"proc/sys/kernel/osrelease": "6.8.0-45-generic\n"}
    own = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04\n"
    free = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04\n"
    one = written(tmp_path / "own", kernel | {"proc/driver/nvidia/version": own})
    assert nvidia.gpudirect(one) == {"nvidia-peermem": False, "dma-buf": False}
    (one / "sys/module/nvidia_peermem").mkdir(parents=True)
    assert nvidia.gpudirect(one)["nvidia-peermem"]
    two = written(tmp_path / "free", kernel | {"proc/driver/nvidia/version": free})
    assert nvidia.gpudirect(two)["dma-buf"]
    old = written(
        tmp_path / "old", {"proc/sys/kernel/osrelease": "5.4.0\n", "proc/driver/nvidia/version": free}
    )
    assert nvidia.gpudirect(old)["dma-buf"] is False
    assert amd_kernel.gpudirect(one) == {"amdkfd peer memory": False, "dma-buf": None}
    config = "CONFIG_PCI_P2PDMA=y\n# CONFIG_DMABUF_MOVE_NOTIFY is not set\n"
    three = written(tmp_path / "amd", kernel | {"boot/config-6.8.0-45-generic": config})
    assert amd_kernel.gpudirect(three)["dma-buf"] is False
    written(three, {"boot/config-6.8.0-45-generic": config + "CONFIG_DMABUF_MOVE_NOTIFY=y\n"})
    assert amd_kernel.gpudirect(three)["dma-buf"]
