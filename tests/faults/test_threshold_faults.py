"""Thresholds: the lint refuses entries that would let a bad figure pass; each bound fails half of its
reference.
"""

import math

import pytest

from harness import bounds, derive, models, thresholds
from workloads import speed_conditions

GOOD = {
    "metric": "copy_gb_per_s",
    "conditions": {},
    "bound": 4000.0,
    "unit": "GB/s",
    "direction": "min",
    "ceiling": 4800.0,
    "source": "measured on one host, 2026",
    "tolerance": "median minus 5 %",
    "class": "measured",
    "basis": {"file": "docs/results/suites-h200.md"},
}
EXPECTED = {
    "of": "a published figure", "reference": 5000.0, "ratio": 0.9, "expected": 0.98, "share": 0.9,
    "kept": 0.72,
}  # fmt: skip
DERIVED = {"class": "derived", "basis": EXPECTED, "bound": 3969.0}
pytestmark = pytest.mark.catches("the lint of thresholds")
CONDITIONS = {"gemm_tflops": {"dtype": "bf16"}, "copy_gb_per_s": {}}
FILES = sorted(thresholds.FOLDER.rglob("*.json"))


@pytest.mark.healthy
def test_good_entry_has_no_problem():
    assert not list(thresholds.lint([GOOD]))
    assert not list(thresholds.lint([GOOD | DERIVED]))
    assert not list(thresholds.lint([GOOD | {"class": "measured", "basis": {"runs": ["a run id"]}}]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"unit": ""}, "missing ['unit']"),
        ({"source": None}, "missing ['source']"),
        ({"unit": "TB/s"}, "unit 'TB/s'"),
        ({"bound": 4.0}, "30 % to 100 %"),  # the unit mixed up: a bound a thousand times too low
        ({"bound": 5000.0}, "30 % to 100 %"),  # above what the hardware can do
        ({"bound": math.nan}, "not a finite positive number"),
        ({"bound": 0}, "not a finite positive number"),
        ({"bound": "lambda x: x > 0"}, "not a finite positive number"),
        ({"ceiling": math.inf}, "not a finite positive number"),
        ({"direction": "max"}, "wrong direction"),
        ({"metric": "copy_bandwidth"}, "unreachable"),
        ({"conditions": {"colour": "red"}}, "unreachable"),
        ({"conditions": {"bytes": 8 << 30}}, "no check measures it"),
        ({"source": "TODO: measure it"}, "placeholder"),
        ({"tolerance": "tbd by somebody"}, "placeholder"),
        ({"slack": 0.1}, "unknown ['slack']"),
        ({"class": None}, "missing ['class']"),
        ({"class": "guessed"}, "class 'guessed', expected one of measured, published, derived"),
        ({"class": "published"}, "the basis of a published bound has ['file'], expected method"),
        ({"class": "published", "basis": {"method": "by them"}}, "method is a placeholder"),
        ({"basis": {"method": "nvbandwidth on one node"}}, "expected file or runs"),
        (DERIVED | {"basis": {"share": 0.9}}, "the basis of a derived bound has ['share']"),
        (DERIVED | {"bound": 3968.0}, "bound 3968, its basis gives 3969"),
        (DERIVED | {"basis": EXPECTED | {"share": 0.69}}, "share 69% of what is expected"),
        (DERIVED | {"basis": EXPECTED | {"share": 1.2}}, "share 120% of what is expected"),
        (DERIVED | {"basis": EXPECTED | {"kept": 0.69}}, "all margins together keep 69.0%, expected 70 %"),
        (DERIVED | {"basis": EXPECTED | {"kept": 0.91}}, "all margins together keep 91.0%"),
        (DERIVED | {"basis": EXPECTED | {"ratio": "most"}}, "expected positive numbers"),
        (DERIVED | {"basis": EXPECTED | {"reference": math.nan}}, "expected positive numbers"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_lint_refuses(change, says):
    problems = "\n".join(thresholds.lint([GOOD | change]))
    assert says in problems


def test_lint_refuses_an_entry_that_another_hides():
    assert any("unreachable" in problem for problem in thresholds.lint([GOOD, GOOD]))


def test_file_with_a_problem_is_not_loaded(tmp_path):
    path = tmp_path / "X.json"
    path.write_text('{"thresholds": [{"metric": "copy_gb_per_s"}]}', encoding="utf-8")
    with pytest.raises(thresholds.ThresholdError, match="entry 1"):
        thresholds.load(path)


@pytest.mark.healthy
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_committed_file_is_clean_and_of_a_known_device(path):
    assert thresholds.load(path)
    assert models.row(path.stem)["vendor"] == path.parent.name


@pytest.mark.parametrize(
    ("metric", "conditions", "reached"),
    [
        ("gemm_tflops", {"dtype": "fp8", "m": 16384, "n": 8192, "k": 4096}, True),
        ("gemm_tflops", {"m": 16384, "n": 16384, "k": 16384}, False),
        ("attention_forward_tflops", {"backend": "cudnn"}, True),
        ("attention_forward_tflops", {"backend": "fa3"}, False),
        ("all_reduce_busbw", {"devices": 8, "bytes": 4 << 30, "nvls": "on"}, True),
        ("all_reduce_busbw", {"devices": 8, "bytes": 16 << 30}, False),
        ("all_reduce_busbw", {"devices": 8, "bytes": 1 << 20}, False),  # its latency in a graph is
        ("all_reduce_latency_us", {"devices": 8, "bytes": 1 << 20}, True),
        ("train_tokens_per_s_per_gpu", {"model": "llama", "devices": 8, "micro_batch": 1}, True),
        ("train_tokens_per_s_per_gpu", {"devices": 8, "micro_batch": 4}, False),
        ("train_tokens_per_s_per_gpu", {"model": "llama", "precision": "fp8"}, False),
    ],
    ids=str,
)
def test_entry_that_no_check_measures_is_unreachable(metric, conditions, reached):
    assert speed_conditions.reaches(metric, conditions) is reached


@pytest.mark.healthy
def test_every_metric_of_the_rules_says_what_is_measured():
    assert set(speed_conditions.CONDITIONS) == set(thresholds.METRICS)
    for metric, (_, _, keys) in thresholds.METRICS.items():
        assert all(set(known) <= keys for known in speed_conditions.CONDITIONS[metric])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_committed_bound_refuses_half_of_its_reference(path):
    for entry in thresholds.load(path):
        half = entry.bound / 2 if entry.direction == "min" else entry.bound * 2
        assert entry.accepts(entry.bound)
        assert not entry.accepts(half)
        assert not entry.accepts(math.nan)


@pytest.mark.parametrize("metric", ["gemm_tflops", "copy_gb_per_s"])
def test_bound_under_seventy_per_cent_of_the_best_public_figure_is_named(metric, monkeypatch):
    public = {"metric": metric, "conditions": CONDITIONS[metric], "suggests": 5000.0, "source": "a page"}
    monkeypatch.setattr(derive, "published", lambda _model: (public,))
    loose, tight = (
        thresholds.threshold(GOOD | {"metric": metric, "bound": bound, "conditions": {}})
        for bound in (3499.0, 3500.0)
    )
    assert "looser than 3500, 70 % of what a page suggests" in next(derive.too_loose("H200", [loose]))
    assert not list(derive.too_loose("H200", [tight]))


def test_latency_over_that_of_the_best_public_figure_is_named(monkeypatch):
    public = {"metric": "all_reduce_latency_us", "conditions": {}, "suggests": 7.0, "source": "a page"}
    monkeypatch.setattr(derive, "published", lambda _model: (public,))
    entry = GOOD | {"metric": "all_reduce_latency_us", "direction": "max"}
    slow, fast = (thresholds.threshold(entry | {"bound": bound}) for bound in (10.1, 10.0))
    assert list(derive.too_loose("H200", [slow]))
    assert not list(derive.too_loose("H200", [fast]))


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_bound_of_a_job_over_all_devices_must_be_measured_with_all_of_them(devices):
    job = "train_fsdp2_tokens_per_s_per_gpu"
    row, asked = models.row("H200"), {"devices": devices, "nvls": "off", "tier": "standard", "figures": []}
    missing = [text for text in bounds.unmeasured(row, asked) if text.startswith(job)]
    assert [f'"devices": {devices},' in text for text in missing] == [True]


@pytest.mark.healthy
def test_most_specific_entry_wins():
    wide = thresholds.threshold(GOOD)
    narrow = thresholds.threshold(GOOD | {"conditions": {"bytes": 8}, "bound": 4400.0})
    assert thresholds.find([wide, narrow], "copy_gb_per_s", {"bytes": 8}) is narrow
    assert thresholds.find([wide, narrow], "copy_gb_per_s", {"bytes": 9}) is wide
    assert thresholds.find([narrow], "copy_gb_per_s", {}) is None


@pytest.mark.healthy
@pytest.mark.parametrize("row", models.table(), ids=lambda row: row["model"])
def test_every_device_figure_has_a_source(row):
    figures = (
        "peak_tflops",
        "memory_gb_per_s",
        "link",
        "power_w",
        "pcie",
        "compute_units",
        "memory_bytes",
        "pci_ids",
    )
    without = [name for name in figures if row[name] and not row["sources"].get(name)]
    assert not without
