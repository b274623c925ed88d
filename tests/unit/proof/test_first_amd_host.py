"""The first hour on an AMD machine, with fabricated figures: from derived to measured bounds, one command.

The figures are made up: each lies a tenth above its derived bound. What is proven is the flow that
docs/guides/first-amd-host.md describes, and not a speed of any device.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harness import models, thresholds
from result_files import CONFIG_DIGEST, check, host, metric, result
from stackcheck.cli.baseline import app
from stackcheck.suite import bounds, results
from stackcheck.suite.requirements import Requirements
from stackcheck.suite.verdict import judge
from waits import run_program
from workloads import gated

ROOT = Path(__file__).resolve().parents[3]
MODEL, COUNT = "MI300X", 8
FACTORS = (0.99, 1.0, 1.01)


def figures() -> list[dict[str, Any]]:
    """Every figure that eight MI300X are judged by, a tenth better than its committed bound."""
    entries = thresholds.load(thresholds.path_of("amd", MODEL))
    found = []
    for name, conditions in gated.figures(models.row(MODEL), COUNT, "standard"):
        bound = thresholds.find(entries, name, conditions)
        assert bound, (name, conditions)
        better = bound.bound * 1.1 if bound.direction == "min" else bound.bound / 1.1
        found.append({"name": name, "value": better, "unit": bound.unit, "conditions": dict(conditions)})
        if conditions.get("backend") == "flash":  # what this vendor's default is
            default = {**conditions, "backend": "default", "resolved": "flash"}
            found.append({"name": name, "value": better, "unit": bound.unit, "conditions": default})
    return found


def entries_of(checkout: Path) -> tuple[thresholds.Threshold, ...]:
    """The bounds that the suites of a checkout judge by; none if the model has no file."""
    path = checkout / "tests/acceptance/thresholds/amd" / f"{MODEL}.json"
    entries = json.loads(path.read_text(encoding="utf-8"))["thresholds"] if path.exists() else []
    return tuple(thresholds.threshold(entry, file=path.name) for entry in entries)


def run(number: int, factor: float, checkout: Path = ROOT) -> dict[str, Any]:
    """A run on a healthy machine by the suites of a checkout."""
    entries = entries_of(checkout)
    metrics = [judged(figure, factor, entries) for figure in figures()]
    missing = {"outcome": "failed", "reason": "no bound", "cause": "no_threshold"}
    outcome = {} if entries else missing
    one = check("test_kernel_speed.py::test_gemm_speed", metrics=metrics, **outcome)
    machine = host("amd", *[MODEL] * COUNT, driver="6.16.13") | {"partition": "SPX/NPS1"}
    other = check("test_devices.py::test_device_identity")
    return result(one, other, host=machine, run_id=f"{number:032x}", tier="standard")


def judged(figure: dict[str, Any], factor: float, entries: Any) -> dict[str, Any]:
    value = figure["value"] * factor
    bound = thresholds.find(entries, figure["name"], figure["conditions"])
    verdict = {"direction": None, "bound": None, "source": None, "verdict": "no_threshold"}
    if bound:
        verdict = {
            "direction": bound.direction,
            "bound": bound.bound,
            "source": bound.file,
            "verdict": "pass",
        }
    return metric(**{**figure, "value": value, "repeats": [value] * 5, **verdict})


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A checkout's suites, into which bounds are written."""
    folder = tmp_path / "tests/acceptance"
    shutil.copytree(ROOT / "tests/acceptance", folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def written(checkout: Path, files: list[Path]) -> str:
    done = CliRunner().invoke(app, [*map(str, files), "--root", str(checkout), "--write"])
    assert done.exit_code == 0, done.output
    return done.stdout


def derive(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_program(
        (sys.executable, "-m", "harness.derive", *arguments),
        cwd=checkout / "tests/acceptance",
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )


def saved(folder: Path, checkout: Path = ROOT) -> list[Path]:
    paths = [folder / f"run-{number}.json" for number in range(len(FACTORS))]
    for number, (path, factor) in enumerate(zip(paths, FACTORS, strict=True)):
        path.write_text(json.dumps(run(number, factor, checkout)), encoding="utf-8")
    return paths


def verdict_of(checkout: Path, document: dict[str, Any]) -> Any:
    parsed = results.parse(json.dumps(document).encode())
    ids = tuple(one.id for one in parsed.checks)
    found = bounds.look_up(parsed, checkout)
    return judge(parsed, Requirements(checks=ids, image_config_digest=CONFIG_DIGEST), found)


def test_three_runs_replace_every_derived_bound_with_a_measured_one(checkout, tmp_path):
    before = verdict_of(checkout, run(0, 1.0))
    assert before.status == "PASSED", before.reasons
    assert before.bounds["derived"] > 20
    written(checkout, saved(tmp_path))
    again = derive(checkout)
    assert again.returncode == 0, again.stderr
    left = derive(checkout, "--check")
    assert left.returncode == 0, left.stdout + left.stderr
    after = verdict_of(checkout, run(0, 1.0, checkout))
    assert after.status == "PASSED", after.reasons
    # The host copies keep their published gate only if the machine was not measured; here all were.
    assert set(after.bounds) == {"measured"}
    assert after.bounds["measured"] == sum(before.bounds.values())


def test_a_slow_part_that_the_derived_bound_let_pass_is_then_refused(checkout, tmp_path):
    slow = run(0, 1.0)
    gemm = next(one for one in slow["checks"][0]["metrics"] if one["name"] == "gemm_tflops")
    gemm["value"] *= 0.92
    assert verdict_of(checkout, slow).status == "PASSED"
    written(checkout, saved(tmp_path))
    again = run(0, 1.0, checkout)
    gemm = next(one for one in again["checks"][0]["metrics"] if one["name"] == "gemm_tflops")
    gemm["value"] *= 0.92  # the image still says that its figure passes
    refused = verdict_of(checkout, again)
    assert refused.status == "FAILED"
    assert "gemm_tflops" in refused.reasons[0]


def test_a_model_without_a_bound_is_told_to_measure_and_then_has_its_file(checkout, tmp_path):
    target = checkout / "tests/acceptance/thresholds/amd" / f"{MODEL}.json"
    target.unlink()
    first = verdict_of(checkout, run(0, 1.0, checkout))
    assert (first.status, first.lacks_only_bounds) == ("FAILED", True), first.reasons
    assert "python -m harness.derive" in written(checkout, saved(tmp_path, checkout))
    assert verdict_of(checkout, run(0, 1.0, checkout)).status == "PASSED"


def test_one_throttled_run_is_no_baseline(checkout, tmp_path):
    files = saved(tmp_path)
    hot = run(2, 1.0)
    hot["checks"].append(check("test_devices.py::test_nothing_throttles", "invalid"))
    files[2].write_text(json.dumps(hot), encoding="utf-8")
    done = CliRunner().invoke(app, [*map(str, files), "--root", str(checkout), "--write"])
    assert done.exit_code != 0
    assert derive(checkout, "--check").returncode == 0  # nothing was written


def test_a_made_up_run_is_no_baseline(checkout, tmp_path):
    files = saved(tmp_path)
    files[1].write_text(json.dumps(run(1, 1.0) | {"made_up": True}), encoding="utf-8")
    done = CliRunner().invoke(app, [*map(str, files), "--root", str(checkout), "--write"])
    assert "a made-up result cannot be a baseline" in str(done.exception)
    assert derive(checkout, "--check").returncode == 0  # nothing was written
