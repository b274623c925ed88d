"""Peaks of every device model, operations per token and parameters, published rows: as their sources say."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from figures import figure

import flops
import options
import peaks
import presets
import rows
from errors import RefusedError
from models import mpt

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
def test_each_model_has_a_peak_by_name_by_id_and_without_either(row):
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
def test_a_name_decides_where_no_id_can_be_read(name, model):
    (row,) = (row for row in ROWS if row["model"] == model)
    assert peaks.of_device(seen(row, name, with_id=False)).model == model


def test_a_real_mi250_is_no_mi250x_though_its_name_says_both():
    (row,) = (row for row in ROWS if row["model"] == "MI250")
    assert peaks.of_device(seen(row, "AMD Instinct MI250X / MI250")).bf16 == 181


def test_an_unknown_device_is_refused():
    with pytest.raises(RefusedError, match="no peak known"):
        peaks.of_device(peaks.Seen(name="NVIDIA Z9000", arch="sm_42", compute_units=1, memory_bytes=1))
    with pytest.raises(RefusedError, match="no peak known for model 'Z9000'"):
        peaks.of_model("Z9000")


def test_the_suites_tell_the_model(monkeypatch):
    monkeypatch.setenv(peaks.VARIABLE, "MI300X-CPX-NPS4")
    found = peaks.find(SimpleNamespace(gpu=True, device=None))
    assert (found.model, found.unit) == ("MI300X-CPX-NPS4", "partition")
    assert found.bf16 == figure(1307.4 / 8, abs=0.001)


def test_the_id_is_the_kernels(tmp_path, monkeypatch):
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


# llm-foundry scripts/train/yamls/pretrain; vocabulary 50368, sequence 2048
FOUNDRY = {
    "125m": 125_311_488,
    "350m": 355_985_408,
    "760m": 760_470_528,
    "1b": 1_315_950_592,
    "3b": 2_651_837_440,
    "7b": 6_658_859_008,
    "13b": 12_853_954_560,
    "30b": 29_975_214_080,
    "70b": 64_862_437_376,
}
# GFLOP per token: (noncausal, causal)
PUBLISHED = {
    ("llama", "8b", 8192): (57.91, 51.47),
    ("llama", "8b", 4096): (51.47, 48.25),
    ("llama", "70b", 8192): (481.4, 449.2),
    ("mistral", "7b", 8192): (49.10, 47.49),
}
MPT_GFLOP = {"1b": 9.10, "3b": 17.92, "7b": 43.17, "13b": 82.14, "30b": 188.3, "70b": 405.2}


def per_token(model: str, size: str, seq_len: int) -> flops.Flops:
    return presets.flops_per_unit(presets.find(model, size), seq_len, recompute=0.0)


@pytest.mark.parametrize("size", FOUNDRY)
def test_mpt_has_exactly_the_parameters_of_llm_foundry(size):
    assert presets.find("mpt", size).config.parameters(2048) == FOUNDRY[size]


@pytest.mark.parametrize("alibi", [True, False], ids=["released", "benchmark"])
def test_the_formula_counts_what_the_model_holds(alibi):
    config = mpt.Config(layers=2, width=64, heads=4, vocab=256, positions=32, alibi=alibi, bias=not alibi)
    assert sum(p.numel() for p in mpt.Model(config).parameters()) == config.parameters(32)


@pytest.mark.parametrize("shape", PUBLISHED, ids=lambda s: "-".join(map(str, s)))
def test_both_conventions_match_the_published_counts(shape):
    got = per_token(*shape)
    noncausal, causal = PUBLISHED[shape]
    assert round(got.noncausal / 1e9, 1) == figure(noncausal, abs=0.06)
    assert got.causal / 1e9 == figure(causal, rel=5e-4)


def test_amd_counts_a_window_of_1024_for_mistral():
    assert per_token("mistral", "7b-window1024", 8192).noncausal / 1e9 == figure(44.27, abs=0.01)


@pytest.mark.parametrize("size", MPT_GFLOP)
def test_mpt_counts_as_llm_foundry_does(size):
    assert per_token("mpt", size, 2048).noncausal / 1e9 == figure(MPT_GFLOP[size], rel=1e-3)


def test_flux_costs_64_5_tflop_per_512_image():
    assert per_token("flux", "dev-512", 0).noncausal / 1e12 == figure(64.5, rel=5e-3)
    assert per_token("flux", "dev-1024", 0).noncausal / 1e12 == figure(223, rel=1e-2)


def test_hardware_flops_add_a_third_when_activations_are_recomputed():
    plain = per_token("gpt", "22b", 2048)
    again = presets.flops_per_unit(presets.find("gpt", "22b"), 2048, recompute=1.0)
    assert again.hardware == figure(plain.noncausal * 4 / 3)
    half = presets.flops_per_unit(presets.find("flux", "dev-512"), 0, recompute=0.5)
    assert half.hardware == figure(half.noncausal * 7 / 6)
    assert again.noncausal == plain.noncausal == plain.hardware


@pytest.mark.parametrize(("size", "billions"), [("22b", 21.7), ("175b", 173.9), ("1t", 1007)])
def test_frontiers_shapes_have_their_sizes(size, billions):
    config = presets.find("gpt", size).config
    assert 12 * config.layers * config.width**2 / 1e9 == figure(billions, rel=2e-3)


DEVICES = Path(__file__).parents[1] / "acceptance/devices.json"
AMD = {
    ("MI300X", "llama-70b", "bf16", 4, 8192): 426.79,
    ("MI300X", "llama-8b", "bf16", 3, 8192): 542.94,
    ("MI300X", "llama-8b", "fp8", 3, 8192): 737.40,
    ("MI300X", "llama-8b", "bf16", 6, 4096): 523.79,
    ("MI300X", "llama-8b", "fp8", 6, 4096): 735.44,
    ("MI300X", "mistral-7b", "bf16", 3, 8192): 483.17,
    ("MI300X", "mistral-7b", "fp8", 4, 8192): 723.30,
    ("MI300X", "flux-dev", "bf16", 10, None): 4.51,
    ("MI325X", "llama-70b", "bf16", 7, 8192): 526.13,
    ("MI325X", "llama-8b", "bf16", 3, 8192): 643.01,
    ("MI325X", "llama-8b", "fp8", 5, 8192): 893.68,
    ("MI325X", "llama-8b", "bf16", 8, 4096): 625.96,
    ("MI325X", "llama-8b", "fp8", 10, 4096): 894.98,
    ("MI325X", "mistral-7b", "bf16", 5, 8192): 590.23,
    ("MI325X", "mistral-7b", "fp8", 6, 8192): 860.39,
}


def test_every_document_has_its_figures():
    every = rows.load_rows()
    assert set(every) == {"amd-container", "mosaicml-june", "mosaicml-october", "frontier", "spheron"}
    amd = {
        (r.device, r.job, r.precision, r.micro_batch, r.seq_len): r.value for r in every["amd-container"].rows
    }
    assert amd == AMD
    assert all(row.count == 8 for row in every["amd-container"].rows)
    ratios = {row.value for row in every["mosaicml-june"].rows if row.metric.startswith("speed_ratio")}
    ratios |= {row.value for row in every["mosaicml-october"].rows if row.metric == "speed_ratio"}
    assert ratios == {80, 73, 94, 85, 77}
    scaling = {row.count: row.value for row in every["mosaicml-october"].rows if row.id.startswith("strong-")}
    assert scaling == {4: 166, 128: 159}


def test_the_convergence_table_has_seven_tasks_and_their_average():
    for model in ("cerebras-gpt-1.3b", "amd-mpt-1b", "cerebras-gpt-2.7b", "amd-mpt-3b"):
        found = {
            r.task: r.value
            for r in rows.document("mosaicml-october").rows
            if r.task and r.id.startswith(model)
        }
        assert list(found) == [*rows.TASKS, "average"]
        assert sum(found[task] for task in rows.TASKS) / 7 == figure(found["average"], abs=6e-4)


def test_every_job_is_one_that_train_py_takes_and_every_device_is_known():
    devices = {device["model"] for device in json.loads(DEVICES.read_text())["devices"]}
    for document in rows.load_rows().values():
        for row in document.rows:
            assert row.device is None or row.device in devices, row.id
            if row.flags:
                parsed = options.parse(list(row.flags))
                presets.find(parsed.model, parsed.size)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("value: 426.79", "value: .nan", "row mi300x-llama-70b-bf16-8192: value is nan"),
        ("value: 426.79", "value: [5, 4]", r"value is \[5, 4\]"),
        ("value: 426.79", "valeu: 426.79", r"unknown keys \['valeu'\], missing keys \['value'\]"),
        ("value: 426.79", "value: 426.79, value: 1", "value is there twice"),
        ("metric: tflops_noncausal", "metric: speed", "metric is 'speed', expected one of"),
        (
            "unit: TFLOP/s/GPU",
            "unit: images/s/GPU",
            "tflops_noncausal in 'images/s/GPU', expected TFLOP/s/GPU",
        ),
        ("job: llama-70b", "job: llama-71b", "no job llama-71b; jobs: llama-70b"),
        ("micro_batch: 4", "micro_batch: 0", "micro_batch is 0, expected a whole number"),
        ("id: mi325x-llama-70b-bf16-8192", "id: mi300x-llama-70b-bf16-8192", "twice: mi300x-llama-70b"),
    ],
)
def test_a_wrong_row_is_refused_with_its_place(old, new, said, tmp_path):
    text = rows.FILE.read_text()
    assert old in text
    (tmp_path / "rows.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(RefusedError, match=said):
        rows.load_rows(tmp_path / "rows.yaml")
