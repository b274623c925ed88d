"""The bound of PyTorch's default attention is that of the backend which this torch takes on this device."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness import bounds, models, thresholds
from stackcheck.matrix import resolve
from stackcheck.suite import bounds as host_bounds
from stackcheck.suite import results
from stackcheck.suite.judgement import judge_file
from workloads import attention_default, speed_conditions

pytestmark = pytest.mark.usefixtures("frozen_once", "suites_asked_here")
ROOT = Path(__file__).resolve().parents[3]
RESULT = ROOT / "docs" / "results" / "suites-h100-x1-standard.json"
CUDA = [stack for stack in resolve.load_stacks(ROOT) if stack.runtime == "cuda"]


@pytest.mark.parametrize(
    ("arch", "torch", "cuda", "backend"),
    [
        *(("sm_90", version, "12.6", "flash") for version in ("2.4.1", "2.5.1", "2.7.1", "2.8.0")),
        *(("sm_90", "2.5.0", "12.4", "cudnn"), ("sm_90", "2.9.1", "12.8", "cudnn")),
        *(("sm_90", "2.10.0", "12.8", "flash"), ("sm_90", "2.11.0", "12.6", "flash")),
        *(("sm_90", "2.11.0", "13.0", "cudnn"), ("sm_90", "2.11.0+cu128", "12.8", "cudnn")),
        *(("sm_100", "2.13.0", "13.0", "cudnn"), ("sm_103", "2.15.0", "13.2", "cudnn")),
        *(("sm_103", "2.9.1", "13.0", "flash"), ("sm_120", "2.13.0", "13.0", "flash")),
        *(("sm_80", "2.13.0", "13.0", "flash"), ("sm_89", "2.13.0", "13.0", "flash")),
        *(("gfx942", "2.13.0", None, "flash"), ("gfx950", None, None, "flash")),
        *(("sm_90", None, None, "cudnn"), ("sm_90", "2.11.0", None, "cudnn"), ("sm_100", "?", "?", "cudnn")),
    ],
)
def test_the_backend_follows_the_device_and_the_versions_and_nothing_said_is_the_faster_one(
    arch, torch, cuda, backend
):
    assert attention_default.expected(arch, torch, cuda) == backend


@pytest.mark.parametrize(
    "row", [row for row in models.table() if row["vendor"] != "cpu"], ids=lambda r: r["model"]
)
@pytest.mark.parametrize("torch", [None, *sorted({stack.torch or "" for stack in CUDA})])
def test_no_machine_has_a_default_that_it_lacks(row, torch):
    assert f"attention: {attention_default.expected(row['arch'], torch, None)}" not in row["lacks"]


def asked(torch: str, said: str | None) -> dict[str, Any]:
    conditions = {"dtype": "bf16", "backend": "default", "causal": True, "sequence": 8192}
    if said is not None:
        conditions |= {"resolved": said}
    figure = {"metric": "attention_forward_tflops", "conditions": conditions}
    machine = {"model": "H200", "devices": 1, "nvls": "off", "tier": "standard", "torch": torch}
    return {**machine, "entries": [], "figures": [figure]}


def answer(question: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(host_bounds.ask_suites(ROOT, question))
    return found


def test_each_torch_is_judged_by_the_bound_of_its_own_backend():
    entries = thresholds.load(thresholds.path_of("nvidia", "H200"))
    known = {
        backend: thresholds.find(
            entries,
            "attention_forward_tflops",
            {"dtype": "bf16", "backend": backend, "causal": True, "sequence": 8192},
        )
        for backend in ("flash", "cudnn")
    }
    for torch, backend in (("2.8.0", "flash"), ("2.11.0", "cudnn")):
        found = answer(asked(torch, backend))
        entry = known[backend]
        assert entry is not None
        assert (found["bounds"][0]["bound"], found["defaults"]) == (entry.bound, [])


@pytest.mark.parametrize(("torch", "said"), [("2.11.0", "flash"), ("2.11.0", ""), ("2.8.0", "efficient")])
def test_a_run_cannot_choose_a_lower_bound_by_what_it_says(torch, said):
    honest, other = answer(asked(torch, None)), answer(asked(torch, said))
    assert other["bounds"] == honest["bounds"]
    assert "attention took" in other["defaults"][0]


def test_a_run_without_the_default_has_not_measured_it():
    question = asked("2.11.0", None) | {"figures": []}
    assert "attention_forward_tflops of the default backend" in answer(question)["unmeasured"]
    assert bounds.missing(models.row("H200"), 1) == []


def test_a_bound_of_an_optional_package_is_asked_for_where_its_check_ran():
    question = asked("2.11.0", None) | {"figures": []}
    told = [text for text in answer(question)["unmeasured"] if "flash-attn-4" in text]
    assert len(told) == 2
    skipped = question | {"skipped": [speed_conditions.OPTIONAL_CHECK]}
    assert not [text for text in answer(skipped)["unmeasured"] if "flash-attn-4" in text]


@pytest.mark.parametrize("said", [None, "cudnn", "flash", "math"])
def test_the_verdict_fails_where_the_run_and_the_rules_differ(said, tmp_path):
    document = json.loads(RESULT.read_text(encoding="utf-8"))
    for check in document["checks"]:
        for metric in check["metrics"]:
            if metric["conditions"].get("backend") == "default" and said is not None:
                metric["conditions"]["resolved"] = said
        if check["outcome"] == "failed":
            check.update(outcome="passed")
    path = tmp_path / "result.json"
    path.write_text(json.dumps(document))
    results.load_result(path)
    reasons = judge_file(path, ROOT, None).verdict.reasons
    assert any("attention took" in reason for reason in reasons) == (said in {"flash", "math"})
