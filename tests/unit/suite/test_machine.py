"""UNFIT needs telemetry that shows the state of the machine that a check names."""

import json
from typing import Any

import pytest

from result_files import CONFIG_DIGEST, check, result
from stackcheck.matrix.matrix import TestTarget
from stackcheck.suite import results
from stackcheck.suite.requirements import Requirements
from stackcheck.suite.verdict import Verdict, judge

CLEAN = {
    "unfit": [],
    "normal": ["software power cap"],
    "throttle_reading": "0x4",
    "accumulators": {},
    "enabled": True,
    "uncorrectable": 0,
    "pending": 0,
    "failed": 0,
    "memory_used_bytes": 600 << 20,
    "processes": [],
    "power_cap_w": 700.0,
    "power_cap_default_w": 700.0,
    "partition": {"mig": "disabled"},
    "firmware": {"vbios": "96.00.AA"},
    "fabric": "completed",
    "recovery_action": "none",
}
LINK = {"kind": "nvlink", "active": 18, "errors": 0, "replays": 0}
ONE = "test_c.py::test_x"


def judged(
    kind: str | None, *, before: dict[str, Any], after: dict[str, Any], device: int | None = 0
) -> Verdict:
    """The verdict on a run in which one check ended invalid with this claim and these readings."""
    claims = [{"kind": kind, "words": f"device 0: {kind}", "device": device}] if kind else []
    bad = check(ONE, "invalid", machine=claims, evidence={"before": before, "after": after})
    checks = (check("test_a.py::test_b"), bad)
    run = results.parse(json.dumps(result(*checks)).encode())
    cpu = (TestTarget(device="CPU", count=1),)
    ids = tuple(str(item["id"]) for item in checks)
    return judge(run, Requirements(checks=ids, image_config_digest=CONFIG_DIGEST, machines=cpu))


SHOWN: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("throttled", {}, {"0": CLEAN | {"unfit": ["hardware thermal"]}}),
    ("throttled", {"0": CLEAN | {"accumulators": {"hot": 3}}}, {"0": CLEAN | {"accumulators": {"hot": 4}}}),
    ("throttled", {"0": CLEAN}, {"0": CLEAN, "during": {"unfit": {"0": ["hardware thermal"]}}}),
    ("shared", {"0": CLEAN | {"processes": [4321]}}, {}),
    ("shared", {}, {"start": {"0": CLEAN | {"memory_used_bytes": 9 << 30}}}),
    ("memory errors", {"0": CLEAN}, {"0": CLEAN | {"uncorrectable": 2}}),
    ("memory errors", {}, {"start": {"0": CLEAN | {"enabled": False}}}),
    ("power cap", {"0": CLEAN | {"power_cap_w": 400.0}}, {}),
    ("clocks", {}, {"0": CLEAN, "during": {"throttle": ["application clocks", "idle"]}}),
    ("clocks", {"0": CLEAN | {"normal": ["application clocks"]}}, {}),
    ("partition", {}, {"start": {"0": CLEAN | {"partition": {"mig": "enabled"}}}}),
    ("firmware", {}, {"start": {"0": CLEAN, "1": CLEAN | {"firmware": {"vbios": "95"}}}}),
    ("link", {}, {"start": {"links": {"0-1": LINK, "0-2": LINK | {"active": 12}}}}),
    ("link", {}, {"start": {"links": {"0-1": LINK | {"kind": "pcie"}}}}),
    ("link", {}, {"links": {"0-1": LINK | {"errors": 4, "errors_cleared": True}}}),
    ("link", {"links": {"0-1": LINK}}, {"links": {"0-1": LINK | {"errors": 4}}}),
    ("fabric", {}, {"start": {"0": CLEAN | {"fabric": "in progress"}}}),
    ("recovery", {}, {"start": {"0": CLEAN | {"recovery_action": "reset"}}}),
    ("no answer", {}, {"0": CLEAN | {"throttle_reading": "all ones"}}),
    ("no answer", {}, {"0": CLEAN | {"throttle_reading": "the library answered NVML_ERROR_GPU_IS_LOST"}}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "before", "after"), SHOWN)
def test_invalid_with_evidence_about_the_machine_is_unfit(
    kind: str, before: dict[str, Any], after: dict[str, Any]
) -> None:
    device = None if kind in {"link", "firmware"} else 0
    verdict = judged(kind, before=before, after=after, device=device)
    assert (verdict.status, verdict.invalid) == ("UNFIT", (ONE,))


@pytest.mark.parametrize("kind", sorted({kind for kind, _, _ in SHOWN}))
def test_invalid_with_clean_telemetry_is_failed_and_says_what_no_reading_shows(kind: str) -> None:
    links = {"0-1": LINK, "0-2": LINK}
    clean = {"0": CLEAN, "1": CLEAN, "links": links}
    start = {"start": clean, "during": {"unfit": {"0": []}}}
    verdict = judged(kind, before=clean, after=clean | start)
    assert verdict.status == "FAILED"
    assert f"no reading shows '{kind}' on device 0" in verdict.reasons[0]


@pytest.mark.parametrize("kind", sorted({kind for kind, _, _ in SHOWN}))
@pytest.mark.parametrize(
    "junk", [{}, {"0": 7}, {"0": {}}, {"start": 3}, {"links": {"0-1": 5}}, {"during": []}]
)
def test_invalid_without_readings_is_failed(kind: str, junk: dict[str, Any]) -> None:
    assert judged(kind, before=junk, after=junk).status == "FAILED"


def test_invalid_that_names_nothing_is_failed() -> None:
    verdict = judged(None, before={}, after={"0": CLEAN | {"unfit": ["hardware thermal"]}})
    assert verdict.status == "FAILED"
    assert "names no state of the machine" in verdict.reasons[0]


def test_a_library_of_the_image_that_answers_an_error_is_no_evidence_about_the_machine() -> None:
    silent = CLEAN | {"throttle_reading": "the library answered NVML_ERROR_UNKNOWN"}
    assert judged("no answer", before={}, after={"0": silent}).status == "FAILED"
