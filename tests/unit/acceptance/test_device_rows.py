"""A device is the product of its PCI id; what the table does not list is nobody's."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from harness import models, thresholds
from stackcheck import vendors as host_side
from stackcheck.suite import skips
from vendors import Absence, Device
from workloads import large_job

ROOT = Path(__file__).resolve().parents[3]


def device(pci_id: str, *, arch: str, units: int, memory_bytes: int) -> Device:
    return Device(
        index=0,
        uuid="",
        bdf="",
        name="",
        arch=arch,
        compute_units=units,
        memory_bytes=memory_bytes,
        pci_id=pci_id,
    )


@pytest.mark.parametrize("pci_id", ["1002:74a1", "1002:74b5", Absence.NOT_SUPPORTED])
def test_an_mi300x_is_one_also_as_a_virtual_function_and_where_no_id_is_told(pci_id):
    one = device(pci_id, arch="gfx942", units=304, memory_bytes=192 << 30)
    assert models.identify("amd", one)["model"] == "MI300X"


@pytest.mark.parametrize("pci_id", ["10de:20f3", "10de:232c", Absence.NOT_AVAILABLE])
def test_an_nvidia_device_that_is_not_listed_asks_for_a_row(pci_id):
    one = device(pci_id, arch="sm_80", units=108, memory_bytes=80 << 30)
    with pytest.raises(models.UnknownDeviceError, match=f"fits no row.*add a row(.|\\n)*{pci_id}"):
        models.identify("nvidia", one)


def test_rows_that_share_a_pci_id_differ_in_compute_units_memory_or_partition():
    keys = [
        (pci_id, row["compute_units"], row["memory_bytes"], json.dumps(row.get("partition")))
        for row in models.table()
        for pci_id in row["pci_ids"]
    ]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("pci_id", "arch", "units", "gib", "partition", "model"),
    [
        ("1002:740c", "gfx90a", 110, 64, {}, "MI250X"),
        ("1002:740c", "gfx90a", 104, 64, {}, "MI250"),
        ("1002:7408", "gfx90a", 110, 64, {}, "MI250X"),
        ("1002:74b9", "gfx942", 304, 256, {"compute": "SPX", "memory": "NPS1"}, "MI325X"),
        ("1002:75b3", "gfx950", 256, 288, {}, "MI355X"),
        ("1002:74b6", "gfx942", 80, 192, {}, "MI308X"),
        ("1002:74a1", "gfx942", 38, 24, {"compute": "CPX", "memory": "NPS4"}, "MI300X-CPX-NPS4"),
        ("1002:74a1", "gfx942", 38, 24, {"compute": "CPX", "memory": "NPS1"}, "MI300X-CPX-NPS1"),
        ("1002:74a1", "gfx942", 152, 96, {"compute": "DPX", "memory": "NPS1"}, "MI300X-DPX-NPS1"),
        ("1002:74b5", "gfx942", 304, 192, {"compute": Absence.NOT_AVAILABLE}, "MI300X"),
    ],
)
def test_a_device_is_its_product_and_a_partition_is_one_of_its_own(
    pci_id, arch, units, gib, *, partition, model
):
    one = device(pci_id, arch=arch, units=units, memory_bytes=gib << 30)
    one = dataclasses.replace(one, partition=partition)
    assert models.identify("amd", one)["model"] == model
    known = {name: mode for name, mode in partition.items() if not isinstance(mode, Absence)}
    assert host_side.model_of(pci_id, gib << 30, units, known) == model


def test_a_partition_is_never_taken_for_a_whole_gpu():
    """A whole GPU's memory with a partition's mode, as an SMI library that knows no partitions reads it."""
    odd = device("1002:74a1", arch="gfx942", units=304, memory_bytes=192 << 30)
    odd = dataclasses.replace(odd, partition={"compute": "CPX", "memory": "NPS4"})
    with pytest.raises(models.UnknownDeviceError):
        models.identify("amd", odd)


@pytest.mark.parametrize(
    ("model", "ranks", "holds"),
    [("MI300X-CPX-NPS1", 1, False), ("A100-40GB", 1, True), ("A100-40GB", 8, True), ("MI300X", 2, True)],
)
def test_small_devices_skip_what_they_cannot_hold_and_the_host_confirms_it(model, ranks, *, holds):
    """Out of memory would count as a failure of the image; 24 GiB and 40 GiB are healthy devices."""
    row = models.row(model)
    present = row["memory_bytes"] / large_job.GIB
    needed = [large_job.proxy_gib(ranks), large_job.WIDE_GIB, 40.0]  # the last: beyond 32 bits
    assert (needed[0] <= present) is holds
    for memory_gib in needed:
        skip = {"kind": "not on this device", "needs": {"memory_gib": memory_gib}}
        usable = 0.97 * present
        assert (skips.problem(skip, skips.Facts(rows=[row])) is None) is (memory_gib > usable)
    if model == "A100-40GB":
        assert skips.problem(skip, skips.Facts(rows=[row])) is None


@pytest.mark.parametrize(("vendor", "arch"), [("nvidia", "sm_86"), ("nvidia", "sm_121"), ("amd", "gfx1100")])
def test_a_consumer_gpu_is_said_to_be_not_certifiable(vendor, arch):
    one = device("10de:2204", arch=arch, units=82, memory_bytes=24 << 30)
    with pytest.raises(models.UnknownDeviceError, match=f"not certifiable: .* is {arch}, and devices.json"):
        models.identify(vendor, one)  # type: ignore[arg-type]


@pytest.mark.parametrize("row", models.table(), ids=lambda row: row["model"])
def test_every_fact_of_a_row_has_a_source_and_every_absent_one_is_named(row):
    facts = ("pci_ids", "peak_tflops", "memory_gb_per_s", "compute_units", "memory_bytes", "power_w", "pcie")
    if row["vendor"] == "cpu" or "partition" in row:
        return
    unknown = row["sources"].get("unknown", "")
    for fact in (*facts, "link"):
        if not row[fact] and "link" not in row["lacks"] + [fact] * (fact != "link"):
            assert fact in unknown, f"{fact} is absent, and nothing says so"
        elif row[fact]:
            assert row["sources"].get(fact), f"{fact} has no source"
            assert fact not in re.findall(r"[a-z_]+", unknown), f"{fact} is known and said to be unknown"


@pytest.mark.parametrize("row", models.table(), ids=lambda row: row["model"])
def test_a_row_lacks_the_links_that_it_does_not_have(row):
    """Else its checks are skipped, and the judge refuses the skip: a healthy machine could never pass."""
    assert row["pcie"] is not None or "pcie" in row["lacks"]
    assert row["link"] is not None or "link" in row["lacks"]
    assert not row["pcie"] or ("pcie" not in row["lacks"] and row["pcie"]["width"] == thresholds.LANES)


@pytest.mark.parametrize(
    "row", [row for row in models.table() if row["pci_ids"]], ids=lambda row: row["model"]
)
def test_a_device_of_too_little_memory_is_still_its_product_and_one_of_more_is_not(row):
    """One row shares its id, units and mode with a larger product; a device of another id is nobody's."""
    one = device(row["pci_ids"][0], arch=row["arch"], units=row["compute_units"], memory_bytes=1)
    one = dataclasses.replace(one, partition=row.get("partition", {}))
    half, more = (
        dataclasses.replace(one, memory_bytes=int(row["memory_bytes"] * share)) for share in (0.5, 1.5)
    )
    found = models.short_of_memory(half)
    assert found in (None, row)
    assert models.short_of_memory(more) != row
    assert models.short_of_memory(dataclasses.replace(half, pci_id="10de:ffff")) is None
    if "partition" not in row:
        assert found == row


def test_trainers_look_for_amds_library_where_the_suites_do():
    """They share no code, so that a trainer can be read and run alone."""
    text = (ROOT / "trainers" / "energy.py").read_text(encoding="utf-8")
    begin = text.index("AMD_FOLDERS = (")
    folders = text[begin : text.index("\n)\n", begin)].splitlines()[1:]
    suites = (ROOT / "tests/acceptance/vendors/amd_library.py").read_text(encoding="utf-8")
    assert len(folders) == 3
    assert all(line in suites for line in folders)
