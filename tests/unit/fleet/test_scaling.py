"""The scaling model against what was measured and published, and against what must hold for any job."""

import csv
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from stackcheck.errors import ConfigurationError
from stackcheck.history.export import FIELDS

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "benchmarks" / "scaling"))

import measured  # noqa: E402  # programs, no package
import scale  # noqa: E402

FILE = scale.load_scaling()
ROWS = scale.known_rows(FILE)
FIT = scale.fit(FILE)
RECORDS = ROOT / "docs" / "results" / "training-h200.json"
LLAMA, HOPPER = FILE.jobs["llama-8b-bf16"], FILE.clusters["hopper-8x400"]


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_every_known_row_is_inside_its_interval(number):
    _, row, pair = ROWS[number]
    low, _, high = FIT.interval(pair)
    assert low <= row.efficiency <= high
    low, _, high = scale.fit(FILE, number).interval(pair)
    assert low - 0.01 < row.efficiency < high + 0.01, "by a fit that does not know it, within a point"


def test_the_page_has_the_rows_and_predictions_of_the_model():
    page = (ROOT / "docs" / "reference" / "scaling.md").read_text("utf-8")
    for line in scale.known_lines(FILE):
        assert line in page, "python benchmarks/scaling/scale.py prints it"
    for line in scale.table(FILE, "llama-8b-bf16", [8, 64, 512, 1024, 4096, 16384], weak=True):
        assert line in page


def test_the_measured_rows_are_those_of_the_committed_records():
    records = json.loads((ROOT / "docs" / "results" / "training-h200.json").read_text("utf-8"))["records"]
    found = {
        (one["name"], one["gpus"], one["plan"]["global_batch"]): one["performance"]["tokens_per_s_per_gpu"]
        for one in records
        if one["gpus"] > 1
    }
    measured = [(name, row) for name, row, _ in ROWS if row.source.partition(", ")[2].startswith("g")]
    assert len(measured) == 6
    for name, row in measured:
        job, (told, _, record) = FILE.jobs[name], row.source.partition(" tokens/s/GPU, ")
        rate = float(told.replace(",", ""))
        assert found[record, row.gpus, row.samples] == pytest.approx(rate, abs=1)
        alone = scale.step(job, HOPPER, 1, row.base_samples)
        assert row.efficiency == pytest.approx(rate * (alone.own + alone.added) / 8192, abs=1e-4)


def test_each_message_pays_its_latency_and_the_best_algorithm_is_taken():
    few, many = (scale.collective_s(1e6, nodes, 8, 1, HOPPER) for nodes in (2, 2048))
    assert many[1] == "hierarchical tree", "log n messages"
    assert many[0] - few[0] < 2048 * HOPPER.between.alpha_s
    alone, name = scale.collective_s(1e9, 1, 8, 1, HOPPER)
    assert (name, alone) == ("ring", pytest.approx(7 * 3e-6 + 7e9 / 8 / 355e9))
    slow = HOPPER.model_copy(update={"between": scale.Level(alpha_s=0.1, bytes_per_s=360e9)})
    fast, late = (scale.step(LLAMA, cluster, 1024, 2048).added for cluster in (HOPPER, slow))
    hidden = LLAMA.micro_batch_s  # at most a forward and a backward pass
    assert (late - fast) * 2048 / 1024 > 2 * 34 * 7 * 0.0999 - hidden, (
        "34 gathers and 34 scatters, of 7 steps"
    )


def test_more_gpus_are_never_better_in_weak_scaling():
    found = [scale.step(LLAMA, HOPPER, gpus, 2 * gpus).added for gpus in (1, 8, 64, 1024, 16384)]
    assert found == sorted(found)
    assert found[0] == 0


@pytest.mark.parametrize(
    ("name", "gpus", "samples"),
    [
        ("llama-405b", 10000, 2048),
        ("llama-405b", 8192, 2047),
        ("llama-8b-bf16", 12, 24),
        ("llama-8b-bf16", 16384, 2),
    ],
)
def test_what_a_trainer_refuses_is_refused(name, gpus, samples):
    with pytest.raises(ConfigurationError, match="does not run on so many"):
        scale.step(FILE.jobs[name], HOPPER, gpus, samples)


def test_the_share_of_useful_time_is_that_of_young():
    assert scale.useful(HOPPER, 16384) == pytest.approx(0.904, abs=0.001), "the Llama 3 paper: over 90 %"
    mean = 50700 * 3600 / 16384
    best = math.sqrt(2 * 10 * mean)
    assert 1 - scale.useful(HOPPER, 16384) == pytest.approx(10 / best + best / 2 / mean + 600 / mean)


def test_the_factor_gives_the_known_efficiency():
    for _, row, pair in ROWS:
        assert scale.efficiency(pair, scale.factor_of(pair, row.efficiency)) == pytest.approx(row.efficiency)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("layout: fsdp", "layout: zero3"),
        ("bytes_per_s: 355.0e+9", "bytes_per_s: -1"),
        ("schema: 2", "schema: 1"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, old, new):
    text = scale.OWN.read_text("utf-8")
    assert old in text
    (tmp_path / "own.yaml").write_text(text.replace(old, new), "utf-8")
    with pytest.raises(ConfigurationError, match=r"own\.yaml"):
        scale.load_scaling(tmp_path / "own.yaml")


def exported(path: Path, figures: dict[str, list[float]], **more: Any) -> Path:
    """A history as `stackcheck history export` writes it: node -> values of one figure."""
    row = {"name": "train_tokens", "device_model": "H200", "direction": "min", "simulated": False} | more
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS["metrics"])
        writer.writeheader()
        for node, values in figures.items():
            writer.writerows(row | {"node": node, "value": value} for value in values)
        writer.writerow(row | {"node": "x", "name": "another", "value": 1.0})
    return path


def test_the_spread_of_a_history_is_that_of_its_nodes_times(tmp_path):
    figures = {f"n{number}": [100.0 / (1 + 0.01 * number), 1.0, 1e9] for number in range(9)}
    path = exported(tmp_path / "a.csv", figures)
    found = measured.with_spread(HOPPER, path, "train_tokens")
    assert found.chip_spread == pytest.approx(statistics.stdev(0.01 * n for n in range(9)) / 1.04)
    assert found.model_copy(update={"chip_spread": HOPPER.chip_spread}) == HOPPER
    figures["n8"] = [50.0]  # one straggler
    slower = measured.with_spread(HOPPER, exported(path, figures), "train_tokens")
    assert slower.chip_spread > 5 * found.chip_spread
    assert scale.step(LLAMA, slower, 8, 16).added > scale.step(LLAMA, found, 8, 16).added
    times = {node: [1 / value for value in values] for node, values in figures.items()}
    seconds = measured.with_spread(HOPPER, exported(path, times, direction="max"), "train_tokens")
    assert seconds.chip_spread == pytest.approx(slower.chip_spread)


@pytest.mark.parametrize(
    "more",
    [{"simulated": True}, {"direction": None, "device_model": None}, {"name": "something"}, {"node": 4}],
)
def test_a_history_that_measures_no_spread_is_refused(more, tmp_path):
    nodes = more.pop("node", 8)
    path = exported(tmp_path / "a.csv", {f"n{number}": [1.0] for number in range(nodes)}, **more)
    with pytest.raises(ConfigurationError, match="no spread of a fleet"):
        measured.with_spread(HOPPER, path, "train_tokens")


@pytest.mark.parametrize(("name", "job"), [("g4-bf16-b2", "llama-8b-bf16"), ("g2-bf16-b2", "llama-8b-bf16")])
@pytest.mark.parametrize("spread", [0.004, 0.03])
def test_known_rows_stay_inside_with_measured_inputs(name, job, spread, tmp_path):
    nodes = {f"n{number}": [1 / (1 + spread * z)] for number, z in enumerate((-1, -0.5, 0, 0.5, 1))}
    given = (str(exported(tmp_path / "a.csv", nodes)), "train_tokens")
    file = scale.with_measured(FILE, FILE.jobs[job], given, (str(RECORDS), name, "g1-bf16-b2"))
    cluster, fitted = file.clusters["hopper-8x400"], scale.fit(file)
    assert cluster.chip_spread != HOPPER.chip_spread
    assert cluster.contention != HOPPER.contention
    for _, row, pair in scale.known_rows(file):
        low, _, high = fitted.interval(pair)
        assert low <= row.efficiency <= high, row.source


def test_measured_overlap_is_near_the_assumed_one():
    found = measured.with_overlap(HOPPER, LLAMA, RECORDS, "g4-bf16-b2", "g1-bf16-b2")
    assert found.contention == pytest.approx(HOPPER.contention, rel=0.2)
    assert 0 < found.exposed_share < 0.5
    with pytest.raises(ConfigurationError, match="no such profiled record"):
        measured.with_overlap(HOPPER, LLAMA, RECORDS, "g4-bf16-b2x4", "g1-bf16-b2")
    with pytest.raises(ConfigurationError, match="not of one job"):
        measured.with_overlap(HOPPER, LLAMA, RECORDS, "g4-bf16-b2", "g1-fp8-b1")
    with pytest.raises(ConfigurationError, match="not of one job"):
        measured.with_overlap(HOPPER, FILE.jobs["llama-8b-fp8"], RECORDS, "g4-fp8-b2", "g1-bf16-b2")
    with pytest.raises(ConfigurationError, match="not of one job"):
        measured.with_overlap(HOPPER, LLAMA, RECORDS, "g1-bf16-b2", "g1-bf16-b2")
