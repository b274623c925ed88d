"""The gate over a result from two H200s: refused for attention, and PASSED only with a waiver for it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from stackcheck import vendors
from stackcheck.matrix import matrix
from stackcheck.matrix.policy import Waiver
from stackcheck.suite import bounds, expected, results, skips, verdict
from stackcheck.suite.requirements import Requirements

ROOT = Path(__file__).resolve().parents[3]
RESULT = results.load(ROOT / "docs" / "results" / "suites-h200-x2-gate.json")
ATTENTION = "test_attention.py::test_attention_of_models"
CUDNN = Waiver.model_validate(
    {
        "check": ATTENTION,
        "stacks": ["*"],
        "reason": "cuDNN 9.19 returns NaN in dQ",
        "issue": "pytorch/pytorch#196678",
        "by": "a name",
        "until": "2999-12-31",
    }
)


RAN = {check.id for check in RESULT.checks}  # checks and bounds that were added since are not judged here


def judged(*waivers: Waiver) -> verdict.Verdict:
    rows = {row["model"]: row for row in vendors.device_table()}
    needed = Requirements(
        checks=tuple(name for name in needed_now() if name in RAN),
        image_config_digest="no image",  # the bare host
        vendor="nvidia",
        devices=tuple(device.id for device in RESULT.host.devices),
        facts=skips.Facts(rows=[rows[device.model] for device in RESULT.host.devices]),
        advisory=matrix.load(ROOT / "matrix.yaml").policy.advisory,
        waivers=waivers,
    )
    of_then = dataclasses.replace(bounds.look_up(RESULT, ROOT), unmeasured=())
    return verdict.judge(RESULT, needed, of_then)


def needed_now() -> tuple[str, ...]:
    return tuple(expected.check_ids(ROOT, vendor="nvidia", tier="standard", count=2))


def test_torch_2_11_on_h200_is_refused_for_attention_alone() -> None:
    found = judged()
    assert (found.status, len(found.passed), len(found.skipped)) == ("FAILED", 183, 16)
    assert {reason.partition("[")[0] for reason in found.reasons} == {ATTENTION}


def test_with_a_waiver_it_passes_and_the_certificate_names_it() -> None:
    found = judged(CUDNN)
    assert (found.status, found.reasons) == ("PASSED", ())
    assert [item for item in found.warned if not item.startswith(ATTENTION)] == []
    assert found.waivers == (CUDNN,)


def test_every_bound_of_two_h200s_was_measured_and_is_the_one_that_the_suites_used() -> None:
    found = bounds.look_up(RESULT, ROOT)
    added = [text for text in found.unmeasured if not text.startswith("train_fsdp2_")]
    assert (len(found.of), added) == (51, [])


@pytest.mark.parametrize("index", [0, 25, 50])
def test_a_result_with_one_edited_bound_is_refused(index: int) -> None:
    (check_id, place), bound = list(bounds.look_up(RESULT, ROOT).of.items())[index]
    assert bound
    check = next(item for item in RESULT.checks if item.id == check_id)
    edited = check.metrics[place].model_copy(update={"bound": bound.bound * 0.5})
    metrics = (*check.metrics[:place], edited, *check.metrics[place + 1 :])
    checks = [
        item if item is not check else check.model_copy(update={"metrics": metrics}) for item in RESULT.checks
    ]
    forged = RESULT.model_copy(update={"checks": tuple(checks)})
    needed = Requirements(
        checks=tuple(item.id for item in checks), image_config_digest="no image", waivers=(CUDNN,)
    )
    reasons = verdict.judge(forged, needed, bounds.look_up(forged, ROOT)).reasons
    assert any(reason.startswith(f"{check_id}: {edited.name} was judged by") for reason in reasons)
