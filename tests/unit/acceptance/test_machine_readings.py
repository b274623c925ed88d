"""Readings of healthy machines that were once taken for faults, and the faults beside them that still are."""

from pathlib import Path
from typing import Any

import pytest

import test_devices
import test_devices_links
from harness import paths
from harness.readings import links_of_pairs
from harness.unfit import InvalidRun
from vendors import Absence, Device, Host, Link, amd_device, amd_kernel, container
from workloads import speed_outliers

GIB = 1 << 30


def device(index: int, **changes: Any) -> Device:
    plain: dict[str, Any] = {"name": "", "arch": "gfx90a", "compute_units": 104, "memory_bytes": 64 * GIB}
    bdf = f"0000:0{index}:00.0"
    return Device(index=index, uuid=f"GPU-{index}", bdf=bdf, **{**plain, **changes})


# ---- Locked memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cards", "needed"), [((), False), (("mlx5_0",), True)])
def test_locked_memory_is_asked_for_only_where_a_network_card_can_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, cards: tuple[str, ...], needed: bool
) -> None:
    for card in cards:
        (tmp_path / card).mkdir()
    monkeypatch.setattr(container, "INFINIBAND", tmp_path)
    monkeypatch.setattr(container.resource, "getrlimit", lambda _kind: (8 << 20, 8 << 20))
    found = container.locked_memory(32 * GIB)
    assert bool(found) is needed
    assert all(not requirement.ok for requirement in found)


# ---- Firmware ----------------------------------------------------------------------------------------------


def test_firmware_that_one_device_does_not_tell_is_not_mixed() -> None:
    versions = [{"smc": "85"}, {"smc": Absence.NOT_AVAILABLE}, {"smc": "85"}, {}]
    test_devices.test_firmware_is_equal(tuple(device(i, firmware=one) for i, one in enumerate(versions)))


def test_firmware_that_differs_makes_a_machine_unfit() -> None:
    versions = [{"smc": "85"}, {"smc": Absence.NOT_AVAILABLE}, {"smc": "86"}]
    with pytest.raises(InvalidRun, match="different smc firmware"):
        test_devices.test_firmware_is_equal(tuple(device(i, firmware=one) for i, one in enumerate(versions)))


# ---- PCI Express -------------------------------------------------------------------------------------------


def test_a_link_that_sleeps_is_read_while_it_works() -> None:
    asleep = amd_device._generation(0)
    assert asleep == "0 MT/s"
    assert paths._most([asleep, 5, asleep], "PCIe generation") == 5


def test_a_link_that_never_wakes_fails_in_words_and_not_by_a_crash() -> None:
    with pytest.raises(pytest.fail.Exception, match="PCIe generation: 0 MT/s"):
        paths._most(["0 MT/s", "0 MT/s"], "PCIe generation")


# ---- Links of MI250: 1, 2 or 4 to a pair ----------------------------------------------------------------

PAIRS = {(0, 1): 4, (0, 2): 1, (0, 3): 2, (1, 2): 2, (1, 3): 1, (2, 3): 4}
ONE_LINK = 37.0  # GB/s


def node(slow: tuple[int, int] | None = None) -> tuple[Host, dict[tuple[int, int], float]]:
    links = tuple(Link(a=a, b=b, kind="xgmi", links=count) for (a, b), count in PAIRS.items())
    rates = {pair: ONE_LINK * count for (a, b), count in PAIRS.items() for pair in ((a, b), (b, a))}
    for pair in (slow, slow[::-1]) if slow else ():
        rates[pair[0], pair[1]] *= 0.2
    return Host(vendor="amd", library="", driver="", links=links), rates


def test_pairs_with_fewer_links_are_compared_with_their_like() -> None:
    host, rates = node()
    counted = links_of_pairs(host, [device(index) for index in range(4)])
    assert counted[3, 2] == 4
    assert speed_outliers.odd_pairs(rates, counted) == []
    usual = speed_outliers.medians(rates, counted)
    assert list(test_devices_links._uneven(rates, usual)) == []
    # Without the number of links, the same healthy node would fail.
    assert list(test_devices_links._uneven(rates, speed_outliers.medians(rates)))


def test_a_slow_pair_is_seen_among_its_like() -> None:
    host, rates = node(slow=(2, 3))
    counted = links_of_pairs(host, [device(index) for index in range(4)])
    odd = speed_outliers.odd_pairs(rates, counted)
    assert {line.split(" GB/s")[0].rsplit(" ", 1)[0] for line in odd} == {"2 to 3", "3 to 2"}


# ---- A part of a node -----------------------------------------------------------------------------------


def test_only_what_the_container_was_given_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two of eight render nodes, a library that lists all eight is cut down to two."""
    (tmp_path / "dri").mkdir()
    for minor in (130, 133):
        (tmp_path / "dri" / f"renderD{minor}").touch()
    monkeypatch.setattr(amd_kernel, "DEV", tmp_path)
    nodes = tuple(
        amd_kernel.Node(2 + i, f"0000:0{i}:00.0", 0, {"drm_render_minor": 128 + i}, 1) for i in range(8)
    )
    monkeypatch.setattr(amd_kernel, "nodes", lambda: nodes)
    ours = [i for i in range(8) if amd_kernel.is_ours(amd_kernel.node_of(f"0000:0{i}:00.0", 0))]
    assert ours == [2, 5]
    assert not amd_kernel.is_ours(amd_kernel.node_of("0000:09:00.0", 0))  # the KFD hides it
