"""Every machine that the matrix or devices.json names has a bound for every gated figure, and each bound
proves where it comes from.
"""

import functools
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from harness import bounds, derive, models, thresholds
from workloads import gated, speed_conditions

ROOT = Path(__file__).resolve().parents[3]
ACCEPTANCE = ROOT / "tests" / "acceptance"
RESULTS = ROOT / "docs" / "results"
GPUS = [row["model"] for row in models.table() if row["vendor"] != "cpu"]
every_gpu = pytest.mark.parametrize("model", GPUS)


SHAPE = {"m": 8192, "n": 8192, "k": 8192, "layout": "NT"}
MACHINES = [(model, count) for model in GPUS for count in (1, 2, 3, 4, 8, 16)]


@pytest.mark.parametrize(("model", "count"), MACHINES)
def test_a_machine_has_every_bound_or_each_missing_one_is_named(model, count):
    """The counts of derived.json can be certified, and of every other machine each gap is named."""
    row = models.row(model)
    missing = bounds.missing(row, count)
    gaps = [named for named in missing if count in derive.counts(model)]
    assert gaps == []
    entries = thresholds.load(thresholds.path_of(row["vendor"], model))
    listed = [f"{name} with {json.dumps(known, sort_keys=True)}" for name, known in gated.figures(row, count)]
    assert set(missing) <= set(listed)
    for named, (metric, conditions) in zip(listed, gated.figures(row, count), strict=True):
        held = [
            thresholds.find(entries, metric, {"devices": 1, **conditions, "nvls": state})
            for state in bounds.NVLS
        ]
        assert (named in missing) == (None in held)


@every_gpu
@pytest.mark.parametrize("position", [0, 0.5, 0.999])
def test_a_planted_missing_bound_is_named(model, position, monkeypatch):
    """Whichever entry is taken away, wherever it is the only one for its figure."""
    row = models.row(model)
    for count in derive.counts(model):
        figures = gated.figures(row, count)
        metric, conditions = figures[int(position * len(figures))]
        entries = thresholds.load(thresholds.path_of(row["vendor"], model))
        fewer = tuple(
            e for e in entries if not e.holds_for(metric, {"devices": 1, **conditions, "nvls": "off"})
        )
        monkeypatch.setattr(bounds, "_committed", lambda _row, fewer=fewer: fewer)
        assert f"{metric} with {json.dumps(conditions, sort_keys=True)}" in bounds.missing(row, count)
        monkeypatch.undo()


@every_gpu
def test_derived_bounds_are_what_the_rules_give_and_none_is_loose(model):
    assert list(derive.problems(model)) == []


def test_no_rule_is_idle(monkeypatch):
    used: set[int] = set()
    basis = derive._basis

    def noted(rule: derive.Rule, *rest: Any) -> Any:
        used.add(id(rule))
        return basis(rule, *rest)

    monkeypatch.setattr(derive, "_basis", noted)
    for model in GPUS:
        derive.derived(model)
    assert [rule for rule in derive.rules() if id(rule) not in used] == []


def test_margins_on_the_way_from_a_public_figure_together_keep_seventy_per_cent(monkeypatch):
    """Three margins of 85 % would keep 61 %: the last is cut to what the first two leave of 70 %."""
    shape = {"dtype": "bf16", "m": 8192, "n": 8192, "k": 8192, "layout": "NT"}
    public = {"metric": "gemm_tflops", "conditions": shape, "suggests": 1000.0, "source": "a page"}
    monkeypatch.setattr(derive, "published", lambda _model: (public,))
    monkeypatch.setattr(derive, "known", lambda _model: ())
    chain = ({"published": {}}, {"model": "MI300X"}, {"model": "MI325X"})
    names = ("MI300X", "MI325X", "MI308X")
    rules = tuple(
        derive.Rule(metrics=["gemm_tflops"], models=[name], where={}, of=of, share=0.85, because="a test")
        for name, of in zip(names, chain, strict=True)
    )
    monkeypatch.setattr(derive, "rules", lambda: rules)
    made = [derive._basis(rule, name, "gemm_tflops", shape) for rule, name in zip(rules, names, strict=True)]
    assert [(basis.share, basis.kept) for basis in made] == [(0.85, 0.85), (0.85, 0.7225), (0.9689, 0.7)]
    assert made[-1].bound("min") == 700.0


@every_gpu
@pytest.mark.parametrize("better", [0.999, 1.0, 1.001])
def test_no_derived_bound_is_stricter_than_the_best_public_figure(model, better, monkeypatch):
    """For every derived bound in turn: a public figure just worse than it is found, an equal one is not."""
    entries = thresholds.load(thresholds.path_of(models.row(model)["vendor"], model))
    for entry in (entry for entry in entries if entry.kind == "derived"):
        value = entry.bound * (better if entry.direction == "min" else 1 / better)
        public = {"metric": entry.metric, "conditions": entry.conditions, "value": value, "source": "a page"}
        monkeypatch.setattr(derive, "published", lambda _model, public=public: (public,))
        found = list(derive.above_the_best(model, [entry]))
        assert len(found) == (1 if better < 1 else 0)
        assert all(f"bound {entry.bound:g} is stricter than" in line for line in found)


def test_the_best_of_all_shapes_counts_and_of_a_latency_its_own_size(monkeypatch):
    entries = thresholds.load(thresholds.path_of("amd", "MI300X"))
    (product,) = [e for e in entries if e.conditions == {**SHAPE, "dtype": "fp16"}]
    latency = next(e for e in entries if e.metric.endswith("_us") and e.conditions["bytes"] == 65536)

    def found(entry: thresholds.Threshold, **changed: Any) -> int:
        public = {"metric": entry.metric, "conditions": {**entry.conditions, **changed}, "source": "a page"}
        worse = entry.bound * (0.9 if entry.direction == "min" else 1.1)
        monkeypatch.setattr(derive, "published", lambda _model: ({**public, "value": worse},))
        return len(list(derive.above_the_best("MI300X", [entry])))

    assert (found(product), found(product, m=16384), found(product, dtype="bf16")) == (1, 1, 0)
    assert (found(latency), found(latency, bytes=1048576)) == (1, 0)


@pytest.fixture
def copied(tmp_path) -> Path:
    """What the program of the derived bounds reads and writes."""
    for name in ("harness", "vendors", "workloads", "thresholds", "published"):
        shutil.copytree(ACCEPTANCE / name, tmp_path / name)
    for name in ("devices.json", "derived.json"):
        shutil.copy(ACCEPTANCE / name, tmp_path / name)
    return tmp_path


def derived_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "harness.derive", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_an_edited_derived_bound_is_drift_and_the_program_makes_it_anew(copied):
    file = copied / "thresholds/amd/MI300X.json"
    before = file.read_text(encoding="utf-8")
    file.write_text(before.replace('"bound": 650.2', '"bound": 600.0'), encoding="utf-8")
    refused = derived_in(copied, "--check")
    assert refused.returncode == 1
    assert "bound 600, its basis gives 650.2" in refused.stderr
    assert file.read_text(encoding="utf-8") != before
    assert derived_in(copied).returncode == 0
    assert file.read_text(encoding="utf-8") == before


def test_a_measured_bound_replaces_the_derived_one_and_those_that_follow_from_it(copied):
    file = copied / "thresholds/nvidia/H200.json"
    text = file.read_text(encoding="utf-8")
    assert '"bound": 756.4' in text
    file.write_text(text.replace('"bound": 756.4', '"bound": 770.0'), encoding="utf-8")
    drifted = derived_in(copied, "--check").stderr
    assert "H100-PCIe: gemm_tflops" in drifted
    assert derived_in(copied).returncode == 0
    entries = json.loads((copied / "thresholds/nvidia/H100-PCIe.json").read_text(encoding="utf-8"))[
        "thresholds"
    ]
    (one,) = [e for e in entries if e["conditions"].get("k") == 8192 and e["conditions"]["dtype"] == "bf16"]
    assert (one["basis"]["reference"], one["bound"]) == (770.0, 441.4)


def test_a_new_gated_figure_needs_one_rule_for_all_models(monkeypatch):
    new, known = "train_other_tokens_per_s_per_gpu", "train_tokens_per_s_per_gpu"
    monkeypatch.setitem(thresholds.METRICS, new, thresholds.METRICS[known])
    monkeypatch.setitem(speed_conditions.CONDITIONS, new, speed_conditions.CONDITIONS[known])
    monkeypatch.setitem(gated.JOBS, new, gated.JOBS[known])
    with pytest.raises(derive.DeriveError, match=f"no rule of derived.json is for {new}"):
        derive.derived("H200")
    rule = derive.Rule(metrics=[new], where={}, of={"metric": known}, share=0.8, because="a slower path")
    rules = (*derive.rules(), rule)
    monkeypatch.setattr(derive, "rules", lambda: rules)
    made = {model: [e for e in derive.derived(model) if e["metric"] == new] for model in GPUS}
    assert [entry["bound"] for entry in made["H200"]] == [8240.0, 8216.0, 7726.0]
    assert {model for model, entries in made.items() if entries} >= {"MI300X", "B200", "A100"}


@functools.cache
def kept_runs() -> frozenset[str]:
    """The ids of the runs whose results are kept here, which are long to read."""
    results = (json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.rglob("suites*.json"))
    return frozenset(result["run_id"] for result in results)


@every_gpu
def test_measured_bounds_have_their_results_here(model):
    runs = kept_runs()
    for entry in derive.known(model):
        if entry.kind == "measured":
            assert set(entry.basis.get("runs", ())) <= runs, "their results are not in docs/results"
            assert (ROOT / entry.basis.get("file", "docs/results")).exists()


@every_gpu
def test_public_figures_say_how_they_were_measured(model):
    for row in derive.published(model):
        assert row["unit"] == thresholds.METRICS[row["metric"]][0]
        assert len(row["source"]) > 12
        assert len(row["method"]) > 12
        assert row["value"] > 0 < row["suggests"]


# The first run measured in windows that met the power cap; no bound comes from it.
EARLIER = {"suites-h200-x1-speed.json"}
RUNS = [
    *(path for path in sorted(RESULTS.glob("suites-h?00-*.json")) if path.name not in EARLIER),
    RESULTS / "certificate-h200-x2" / "result.json",
]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_committed_figure_of_a_healthy_machine_meets_its_bound(path):
    document = json.loads(path.read_text(encoding="utf-8"))
    (model,) = {device["model"] for device in document["host"]["devices"]}
    entries = thresholds.load(thresholds.path_of("nvidia", model))
    low = [
        f"{metric['name']} {metric['value']} {entry.bound}"
        for check in document["checks"]
        for metric in check["metrics"]
        if metric["verdict"] == "pass"
        and speed_conditions.reaches(metric["name"], metric["conditions"])
        and (entry := thresholds.find(entries, metric["name"], metric["conditions"]))
        and not entry.accepts(metric["value"])
    ]
    assert low == []


# The job of FSDP2 came after the run on two.
@pytest.mark.parametrize(("count", "run", "later"), [(1, "again", 0), (2, "gate", 1)])
def test_the_list_of_gated_figures_is_what_a_run_judged(count, run, later):
    """The list is made without a device, and the run was on H200s: both must name the same figures."""
    document = json.loads((RESULTS / f"suites-h200-x{count}-{run}.json").read_text(encoding="utf-8"))
    judged = [
        (metric["name"], metric["conditions"])
        for check in document["checks"]
        for metric in check["metrics"]
        if metric["verdict"] in {"pass", "fail", "no_threshold"}
        and metric["name"] in thresholds.METRICS
        and metric["conditions"].get("backend") != "default"  # has the bound of the backend that it took
    ]
    every = gated.figures(models.row("H200"), count, "standard")
    listed = [figure for figure in every if not later or figure[0] != "train_fsdp2_tokens_per_s_per_gpu"]
    assert len(every) == len(listed) + later
    found = Counter(
        (metric, json.dumps(conditions, sort_keys=True))
        for metric, recorded in judged
        for metric_listed, conditions in listed
        if metric == metric_listed and all(recorded.get(key) == value for key, value in conditions.items())
    )
    assert found == Counter((metric, json.dumps(known, sort_keys=True)) for metric, known in listed)
    assert len(judged) == len(listed)


def test_nothing_is_gated_on_a_cpu_or_in_smoke():
    assert gated.figures(models.row("CPU"), 1, "standard") == []
    assert gated.figures(models.row("H200"), 8, "smoke") == []
    listed = {metric for metric, _ in gated.figures(models.row("H200"), 8, "standard")}
    assert listed == set(thresholds.METRICS)
