"""Thresholds: the lint refuses what would let a bad figure pass, and each committed bound fails half of its
reference.
"""

import math

import pytest

from harness import models, thresholds

GOOD = {
    "metric": "copy_gb_per_s",
    "conditions": {},
    "bound": 4000.0,
    "unit": "GB/s",
    "direction": "min",
    "ceiling": 4800.0,
    "source": "measured on one host, 2026",
    "tolerance": "median minus 5 %",
}
pytestmark = pytest.mark.catches("the lint of thresholds")
FILES = sorted(thresholds.FOLDER.rglob("*.json"))


@pytest.mark.healthy
def test_good_entry_has_no_problem() -> None:
    assert not list(thresholds.lint([GOOD]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"unit": ""}, "missing ['unit']"),
        ({"source": None}, "missing ['source']"),
        ({"unit": "TB/s"}, "unit 'TB/s'"),
        ({"bound": 4.0}, "30 % to 100 %"),  # the unit mixed up: a bound a thousand times too low
        ({"bound": 5000.0}, "30 % to 100 %"),  # above what the hardware can do
        ({"bound": math.nan}, "no finite positive number"),
        ({"bound": 0}, "no finite positive number"),
        ({"bound": "lambda x: x > 0"}, "no finite positive number"),
        ({"ceiling": math.inf}, "no finite positive number"),
        ({"direction": "max"}, "wrong direction"),
        ({"metric": "copy_bandwidth"}, "unreachable"),
        ({"conditions": {"colour": "red"}}, "unreachable"),
        ({"source": "TODO: measure it"}, "placeholder"),
        ({"tolerance": "tbd by somebody"}, "placeholder"),
        ({"slack": 0.1}, "unknown ['slack']"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_lint_refuses(change, says) -> None:
    problems = "\n".join(thresholds.lint([GOOD | change]))
    assert says in problems


def test_lint_refuses_an_entry_that_another_hides() -> None:
    assert any("unreachable" in problem for problem in thresholds.lint([GOOD, GOOD]))


def test_file_with_a_problem_is_not_loaded(tmp_path) -> None:
    path = tmp_path / "X.json"
    path.write_text('{"thresholds": [{"metric": "copy_gb_per_s"}]}', encoding="utf-8")
    with pytest.raises(thresholds.ThresholdError, match="entry 1"):
        thresholds.load(path)


@pytest.mark.healthy
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_committed_file_is_clean_and_of_a_known_device(path) -> None:
    assert thresholds.load(path)
    assert models.row(path.stem)["vendor"] == path.parent.name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_committed_bound_refuses_half_of_its_reference(path) -> None:
    for entry in thresholds.load(path):
        half = entry.bound / 2 if entry.direction == "min" else entry.bound * 2
        assert entry.accepts(entry.bound)
        assert not entry.accepts(half)
        assert not entry.accepts(math.nan)


@pytest.mark.healthy
def test_most_specific_entry_wins() -> None:
    wide = thresholds.Threshold(**GOOD)
    narrow = thresholds.Threshold(**(GOOD | {"conditions": {"bytes": 8}, "bound": 4400.0}))
    assert thresholds.find([wide, narrow], "copy_gb_per_s", {"bytes": 8}) is narrow
    assert thresholds.find([wide, narrow], "copy_gb_per_s", {"bytes": 9}) is wide
    assert thresholds.find([narrow], "copy_gb_per_s", {}) is None


@pytest.mark.healthy
@pytest.mark.parametrize("row", models.table(), ids=lambda row: row["model"])
def test_every_device_figure_has_a_source(row) -> None:
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
