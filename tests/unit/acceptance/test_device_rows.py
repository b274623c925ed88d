"""A device is the product of its PCI id; what the table does not list is nobody's."""

import pytest

from harness import models
from vendors import Absence, Device


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
def test_an_mi300x_is_one_also_as_a_virtual_function_and_where_no_id_is_told(pci_id: str) -> None:
    one = device(pci_id, arch="gfx942", units=304, memory_bytes=192 << 30)
    assert models.identify("amd", one)["model"] == "MI300X"


@pytest.mark.parametrize("pci_id", ["10de:20f3", "10de:2342", Absence.NOT_AVAILABLE])
def test_an_nvidia_device_that_is_not_listed_asks_for_a_row(pci_id: str) -> None:
    one = device(pci_id, arch="sm_80", units=108, memory_bytes=80 << 30)
    with pytest.raises(models.UnknownDeviceError, match=f"fits no row.*add a row(.|\\n)*{pci_id}"):
        models.identify("nvidia", one)


def test_no_two_rows_share_a_pci_id() -> None:
    ids = [pci_id for row in models.table() for pci_id in row["pci_ids"]]
    assert len(ids) == len(set(ids))
