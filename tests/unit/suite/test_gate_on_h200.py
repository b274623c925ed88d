"""The gate over a result from two H200s with torch 2.11: refused for public faults of torch and cuDNN.

It is PASSED only with a waiver for each of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from stackcheck import vendors
from stackcheck.matrix import matrix
from stackcheck.matrix.policy import Waiver
from stackcheck.suite import bounds, expected, results, skips, verdict
from stackcheck.suite.requirements import Requirements

ROOT = Path(__file__).resolve().parents[3]
RESULT = results.load(ROOT / "docs" / "results" / "suites-h200-x2-standard.json")
# What fails on that host -> why. The last one is about the bare host: nobody builds an image with such files.
KNOWN = {
    "test_attention.py::test_attention_of_models": "pytorch/pytorch#196678",
    "test_compiled.py::test_compiled_norms_sharing_a_table": "pytorch/pytorch#193061",
    "test_compiled.py::test_compiled_sums_in_place": "pytorch/pytorch#180642",
    "test_image.py::test_nothing_runs_unasked_when_python_starts": "https://docs.python.org/3/library/site.html",
}


def waiver(check: str, issue: str) -> Waiver:
    return Waiver.model_validate(
        {
            "check": check,
            "stacks": ["*"],
            "reason": "a fault of this version",
            "issue": issue,
            "by": "a name",
            "until": "2999-12-31",
        }
    )


WAIVERS = tuple(waiver(check, issue) for check, issue in KNOWN.items())


def judged(*waivers: Waiver) -> verdict.Verdict:
    rows = {row["model"]: row for row in vendors.device_table()}
    needed = Requirements(
        checks=tuple(expected.check_ids(ROOT, vendor="nvidia", tier="standard", count=2)),
        image_config_digest="no image",  # the bare host
        vendor="nvidia",
        devices=tuple(device.id for device in RESULT.host.devices),
        facts=skips.Facts(rows=[rows[device.model] for device in RESULT.host.devices]),
        advisory=matrix.load(ROOT / "matrix.yaml").policy.advisory,
        waivers=waivers,
    )
    return verdict.judge(RESULT, needed, bounds.look_up(RESULT, ROOT))


def checks_of(reasons: tuple[str, ...]) -> set[str]:
    return {reason.partition("[")[0].partition(" ")[0].rstrip(":") for reason in reasons}


def test_torch_2_11_on_h200_is_refused_for_what_is_known_to_be_broken_and_nothing_else() -> None:
    found = judged()
    assert (found.status, len(found.passed), len(found.skipped)) == ("FAILED", 203, 27)
    assert checks_of(found.reasons) == set(KNOWN)


@pytest.mark.parametrize("missing", range(len(WAIVERS)))
def test_each_of_them_needs_a_waiver_of_its_own(missing: int) -> None:
    found = judged(*(one for number, one in enumerate(WAIVERS) if number != missing))
    assert (found.status, checks_of(found.reasons)) == ("FAILED", {WAIVERS[missing].check})


def test_with_waivers_it_passes_and_the_certificate_names_them() -> None:
    found = judged(*WAIVERS)
    assert (found.status, found.reasons) == ("PASSED", ())
    assert {name.partition("[")[0] for name in found.warned} == set(KNOWN)
    assert found.waivers == WAIVERS


def test_every_gated_figure_of_two_h200s_was_measured() -> None:
    found = bounds.look_up(RESULT, ROOT)
    assert (len(found.of), found.unmeasured) == (52, ())
    assert all(found.of.values())


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
        checks=tuple(item.id for item in checks), image_config_digest="no image", waivers=WAIVERS
    )
    reasons = verdict.judge(forged, needed, bounds.look_up(forged, ROOT)).reasons
    assert any(reason.startswith(f"{check_id}: {edited.name} was judged by") for reason in reasons)
