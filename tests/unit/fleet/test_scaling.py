"""The scaling model against what was measured and published, and against what must hold for any job."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner

from stackcheck.errors import ConfigurationError

sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "scaling"))

import scaling
import scaling_data
from scale import app

SVG = "{http://www.w3.org/2000/svg}"
PICTURES = {
    "scaling-weak.svg": ("llama-8b-bf16", "--weak"),
    "scaling-strong.svg": ("mpt-7b-mi250", "--gpus", "8,16,32,64,128,256"),
}
ROOT = Path(__file__).parents[3]
KNOWN = scaling_data.load()
MEASURED = [(name, row) for name, job in KNOWN.jobs.items() for row in job.measured]
PUBLISHED = [(name, row) for name, job in KNOWN.jobs.items() for row in job.published]
LLAMA, H200 = KNOWN.of("llama-8b-bf16")[0].job(), KNOWN.of("llama-8b-bf16")[1]


@pytest.mark.parametrize(
    ("name", "row"), MEASURED, ids=lambda value: str(getattr(value, "source", value))[:20]
)
def test_two_and_four_gpus_are_predicted_within_three_percent(name: str, row: scaling_data.MeasuredRate):
    job, cluster = KNOWN.of(name)
    found = scaling.predict(job.job(), cluster, row.gpus, row.samples)
    assert found.samples_per_s_per_gpu * job.tokens_per_sample == pytest.approx(row.rate, rel=0.03)


def test_the_measured_rows_are_those_of_the_committed_records():
    records = json.loads((ROOT / "docs" / "results" / "training-h200.json").read_text("utf-8"))["records"]
    found = {
        (one["name"], one["gpus"], one["plan"]["global_batch"]): one["performance"]["tokens_per_s_per_gpu"]
        for one in records
        if one["gpus"] > 1
    }
    for _, row in MEASURED:
        assert found[row.source.partition(",")[0], row.gpus, row.samples] == pytest.approx(row.rate, abs=1)


@pytest.mark.parametrize(
    ("name", "points"), [("mpt-7b-mi250", (0, 5)), ("frontier-175b", (5, 6)), ("frontier-1t", (8, 9))]
)
def test_published_efficiencies_differ_by_what_the_page_says(name: str, points: tuple[int, int]):
    (row,) = KNOWN.jobs[name].published
    job, cluster = KNOWN.of(name)
    one, base = scaling.strong(job.job(), cluster, (row.gpus, row.base), job.global_batch)
    assert points[0] < 100 * (scaling.efficiency(one, base) - row.efficiency) < points[1]
    assert len(PUBLISHED) == 3


def test_one_gpu_is_what_was_measured_on_it():
    one = scaling.predict(LLAMA, H200, 1, 2)
    assert one.step_s == LLAMA.micro_batch_s + LLAMA.optimizer_s
    assert (one.exposed_s, one.contention_s, one.slowest_s, one.limit) == (0, 0, 0, None)


@pytest.mark.parametrize("counts", [(1, 2, 4, 8, 16, 1024, 16384)])
def test_no_gpu_gets_faster_by_more_gpus_in_weak_scaling(counts: tuple[int, ...]):
    job = dataclasses.replace(LLAMA, optimizer_s=0.0)
    rates = [one.samples_per_s_per_gpu for one in scaling.weak(job, H200, counts, 2)]
    assert rates == sorted(rates, reverse=True)


def test_a_slow_network_between_nodes_is_named():
    slow = dataclasses.replace(H200, between=scaling.Curve(latency_s=1e-5, bytes_per_s=5e9))
    assert scaling.predict(LLAMA, slow, 8, 16).limit is None
    found = scaling.predict(LLAMA, slow, 16, 32)
    assert found.limit == "between nodes"
    # 16 GB each way at 5 GB/s over two nodes: 1.6 s each for gather and scatter, of which 1.4 s are hidden.
    assert found.exposed_s == pytest.approx(2 * 1.606 - LLAMA.micro_batch_s, rel=0.1)


def test_full_sharding_travels_for_each_micro_batch():
    one = dataclasses.replace(LLAMA, layout="fsdp")
    few, many = (scaling.predict(one, H200, 8, samples) for samples in (16, 64))
    assert many.contention_s == pytest.approx(4 * few.contention_s)
    assert few.contention_s == pytest.approx(1.5 * scaling.predict(LLAMA, H200, 8, 16).contention_s, rel=0.01)


def test_a_pipeline_waits_for_its_stages():
    job, cluster = KNOWN.of("frontier-1t")
    found = scaling.predict(job.job(), cluster, 3072, 8000)
    assert found.bubble_s / found.compute_s == pytest.approx(63 / (8000 / 6))


def test_the_slowest_of_many_is_further_away():
    found = [scaling.slowest_of(count) for count in (1, 2, 4, 8, 1024)]
    assert found == pytest.approx([0, 0.59, 1.05, 1.43, 3.23], abs=0.02)


@pytest.mark.parametrize(
    ("gpus", "samples", "message"), [(600, 8000, "multiple of 512"), (3072, 2, "at least 6 samples")]
)
def test_what_does_not_divide_is_refused(gpus: int, samples: float, message: str):
    job, cluster = KNOWN.of("frontier-1t")
    with pytest.raises(ConfigurationError, match=message):
        scaling.predict(job.job(), cluster, gpus, samples)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("cluster: frontier", "cluster: fronteer", "fronteer is not under `clusters`"),
        ("contention: 0.5", "contention: 1.5", "contention"),
        ("bytes_per_s: 355.0e+9", "bytes_per_s: nan", "bytes_per_s"),
        ("layout: fsdp", "layout: zero3", "layout"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(tmp_path: Path, old: str, new: str, message: str):
    text = scaling_data.OWN.read_text("utf-8")
    assert old in text
    (tmp_path / "own.yaml").write_text(text.replace(old, new), "utf-8")
    with pytest.raises(ConfigurationError, match=message):
        scaling_data.load(tmp_path / "own.yaml")


@pytest.mark.parametrize("name", PICTURES)
def test_the_committed_pictures_are_drawn_again_and_tell_what_is_measured(name: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*PICTURES[name], "--plot", str(tmp_path / name)])
    assert done.exit_code == 0, done.output
    text = (tmp_path / name).read_text("utf-8")
    committed = (ROOT / "docs" / "reference" / name).read_text("utf-8")
    assert text == committed, "benchmarks/scaling/scale.py --plot draws it"
    titles = {found.text or "" for found in ET.fromstring(text).iter(f"{SVG}title")}
    other = {
        "scaling-weak.svg": "measured: 2 GPUs, 96.0 %",
        "scaling-strong.svg": "published: 256 GPUs, 95.8 %",
    }
    assert any(title.startswith(other[name]) for title in titles), titles
    absent = "published" if "weak" in name else "measured"
    assert not any(title.startswith(absent) for title in titles), "nothing is drawn that nobody saw"
