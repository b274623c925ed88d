"""Every device model of the suites has a peak in the trainers, whatever torch can say of the device."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from figures import figure

import peaks
from errors import RefusedError

ROWS = [row for row in json.loads(peaks.TABLE.read_text())["devices"] if row["vendor"] != "cpu"]
UNNAMED = "AMD Radeon Graphics"


def seen(row: dict, name: str = UNNAMED, *, with_id: bool = True) -> peaks.Seen:
    return peaks.Seen(
        name=name,
        arch=row["arch"],
        compute_units=row["compute_units"] or 150,
        memory_bytes=int(row["memory_bytes"] * 0.99),
        pci_id=row["pci_ids"][-1] if with_id else None,
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["model"])
def test_each_model_has_a_peak_by_name_by_id_and_without_either(row: dict) -> None:
    bf16, fp8 = (row["peak_tflops"].get(name) for name in ("bf16", "fp8"))
    found, named = peaks.of_device(seen(row)), peaks.of_model(row["model"])
    assert (found.bf16, found.fp8) == (named.bf16, named.fp8) == (bf16, fp8)
    assert found.unit == row.get("unit", "card")
    assert found.fnuz == row["arch"].startswith("gfx94")
    assert ("nobody publishes" in found.source) == (bf16 is None)
    # Without an id several products fit; then the highest peak is told, so that no share is too high, and
    # none where one of them has no published peak.
    unnamed = peaks.of_device(seen(row, with_id=False)).bf16
    assert unnamed is None or (bf16 is not None and unnamed >= bf16)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200-NVL"),
        ("AMD Instinct MI210", "MI210"),
        ("AMD Instinct MI308X", "MI308X"),
        ("AMD Instinct MI350X", "MI350X"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe"),
    ],
)
def test_a_name_decides_where_no_id_can_be_read(name: str, model: str) -> None:
    (row,) = (row for row in ROWS if row["model"] == model)
    assert peaks.of_device(seen(row, name, with_id=False)).model == model


def test_a_real_mi250_is_no_mi250x_though_its_name_says_both() -> None:
    (row,) = (row for row in ROWS if row["model"] == "MI250")
    assert peaks.of_device(seen(row, "AMD Instinct MI250X / MI250")).bf16 == 181


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(RefusedError, match="no peak known"):
        peaks.of_device(peaks.Seen(name="NVIDIA Z9000", arch="sm_42", compute_units=1, memory_bytes=1))
    with pytest.raises(RefusedError, match="no peak known for model 'Z9000'"):
        peaks.of_model("Z9000")


def test_the_suites_tell_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(peaks.VARIABLE, "MI300X-CPX-NPS4")
    found = peaks.find(SimpleNamespace(gpu=True, device=None))
    assert (found.model, found.unit) == ("MI300X-CPX-NPS4", "partition")
    assert found.bf16 == figure(1307.4 / 8, abs=0.001)


def test_the_id_is_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bus/pci/devices/0000:05:00.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text("0x1002\n")
    (folder / "device").write_text("0x75a0\n")
    monkeypatch.setattr(peaks, "SYS", tmp_path)
    shown = SimpleNamespace(
        name=UNNAMED, gcnArchName="gfx950:sramecc+:xnack-", multi_processor_count=256,
        total_memory=288 << 30, pci_domain_id=0, pci_bus_id=5, pci_device_id=0,
    )  # fmt: skip
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _device: shown)
    assert peaks.of_device(peaks.seen(None)).model == "MI350X"
