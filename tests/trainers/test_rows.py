"""The published figures as data: all there, as published, and read strictly."""

import json
from pathlib import Path

import pytest
from figures import figure

import options
import presets
import rows
from errors import RefusedError

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


def test_every_document_has_its_figures() -> None:
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


def test_the_convergence_table_has_seven_tasks_and_their_average() -> None:
    for model in ("cerebras-gpt-1.3b", "amd-mpt-1b", "cerebras-gpt-2.7b", "amd-mpt-3b"):
        found = {
            r.task: r.value
            for r in rows.document("mosaicml-october").rows
            if r.task and r.id.startswith(model)
        }
        assert list(found) == [*rows.TASKS, "average"]
        assert sum(found[task] for task in rows.TASKS) / 7 == figure(found["average"], abs=6e-4)


def test_every_job_is_one_that_train_py_takes_and_every_device_is_known() -> None:
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
def test_a_wrong_row_is_refused_with_its_place(old: str, new: str, said: str, tmp_path: Path) -> None:
    text = rows.FILE.read_text()
    assert old in text
    (tmp_path / "rows.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(RefusedError, match=said):
        rows.load_rows(tmp_path / "rows.yaml")
