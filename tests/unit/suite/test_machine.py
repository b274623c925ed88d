"""UNFIT needs telemetry of the machine that a check names; a reading that no driver can give is a skip."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from result_files import CONFIG_DIGEST, check, result
from stackcheck import vendors
from stackcheck.matrix.matrix import TestTarget
from stackcheck.suite import requirements, results, skips
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
def test_invalid_with_evidence_about_the_machine_is_unfit(kind, before, after):
    device = None if kind in {"link", "firmware"} else 0
    verdict = judged(kind, before=before, after=after, device=device)
    assert (verdict.status, verdict.invalid) == ("UNFIT", (ONE,))


@pytest.mark.parametrize("kind", sorted({kind for kind, _, _ in SHOWN}))
def test_invalid_with_clean_telemetry_is_failed_and_says_what_no_reading_shows(kind):
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
def test_invalid_without_readings_is_failed(kind, junk):
    assert judged(kind, before=junk, after=junk).status == "FAILED"


def test_invalid_that_names_nothing_is_failed():
    verdict = judged(None, before={}, after={"0": CLEAN | {"unfit": ["hardware thermal"]}})
    assert verdict.status == "FAILED"
    assert "names no state of the machine" in verdict.reasons[0]


def test_a_library_of_the_image_that_answers_an_error_is_no_evidence_about_the_machine():
    silent = CLEAN | {"throttle_reading": "the library answered NVML_ERROR_UNKNOWN"}
    assert judged("no answer", before={}, after={"0": silent}).status == "FAILED"


TABLE = vendors.unreadable_table()
ROWS = [row for row in vendors.device_table() if row["vendor"] != "cpu"]
READINGS = sorted({entry["reading"] for entry in TABLE})
WHOLE = Path(__file__).resolve().parents[2] / "faults/fakeamd/whole/skips.json"
RELEASES = ("6.1.2", "6.2.4", "6.3.3", "6.4.3", "7.0.2", "7.2.1", "10.1")
rows = st.sampled_from(ROWS)
versions = st.tuples(st.integers(0, 700), st.integers(0, 300)).map(lambda pair: f"{pair[0]}.{pair[1]}")


def refusal(reading: str, row: dict[str, object], **host: object) -> str | None:
    """Why the judge refuses a skip for this reading; None if it accepts it."""
    machine = {"driver": None, "runtime": None} | host
    found = requirements.readings(TABLE, [row], **machine)  # type: ignore[arg-type]
    facts = skips.Facts(rows=[row], unreadable=found)
    return skips.problem({"kind": "not readable here", "needs": {"reading": reading}}, facts)


@given(row=rows, version=versions)
def test_what_no_entry_names_is_refused(row, version):
    found = refusal("fan speed", row, driver=version, runtime=version)
    assert found is not None
    assert str(row["model"]) in found


@given(row=rows, reading=st.sampled_from(READINGS), newer=versions, older=versions)
def test_an_older_driver_or_library_never_tells_more(row, reading, newer, older):
    low, high = sorted((newer, older), key=lambda version: [int(part) for part in version.split(".")])
    if refusal(reading, row, driver=high, runtime=high) is None:
        assert refusal(reading, row, driver=low, runtime=low) is None


# What a guest shows depends on what it was given: a whole device has all of these readings.
JUDGED = ("uncorrectable memory errors", "ECC mode", "power cap", "fault reports", "link errors")


@given(row=rows, reading=st.sampled_from(JUDGED), version=st.none() | versions)
def test_no_driver_or_library_excuses_a_hidden_fault(row, reading, version):
    assert refusal(reading, row, driver=version, runtime=version) is not None


@pytest.mark.parametrize("row", [row for row in ROWS if row["vendor"] == "amd"], ids=lambda row: row["model"])
@pytest.mark.parametrize("runtime", RELEASES)
def test_the_skips_of_a_healthy_amd_host_are_accepted(row, runtime):
    """Fabricated hosts show these skips; a real one has them too, with each release of the library."""
    listed = json.loads(WHOLE.read_text(encoding="utf-8"))
    of_model = {"MI210": "mi210", "MI250X": "mi250x-as-740c", "MI250": "mi250x-as-740c"}
    skipped = {**listed["every host"], **listed.get(of_model.get(str(row["model"]), ""), {})}
    named = {
        reason.partition(":")[0]
        for reason in skipped.values()
        if reason.endswith((": not supported", ": N/A"))
    }
    assert "recovery action" in named
    assert {
        reading: refusal(reading, row, driver="6.16", runtime=runtime) for reading in named
    } == dict.fromkeys(named)


@pytest.mark.parametrize(
    ("driver", "accepted"),
    [
        ("535.230.02", True),
        ("550.163.01", True),
        ("560.35.05", True),
        ("570.86.15", False),
        ("580.95.05", False),
    ],
)
def test_nvidias_recovery_action_is_asked_from_r570_on(driver, *, accepted):
    row = next(row for row in ROWS if row["model"] == "A100")
    assert (refusal("recovery action", row, driver=driver) is None) is accepted


@pytest.mark.parametrize(
    ("runtime", "accepted"), [("6.2.4", True), ("6.3.3", True), ("6.4.3", False), ("7.0.2", False)]
)
def test_link_states_are_asked_of_the_libraries_that_have_them(runtime, *, accepted):
    row = next(row for row in ROWS if row["model"] == "MI300X")
    assert (refusal("active links", row, driver="6.16.6", runtime=runtime) is None) is accepted


def test_every_entry_has_a_source_and_a_vendor_with_rows():
    assert all(entry["source"] and entry["vendor"] in {row["vendor"] for row in ROWS} for entry in TABLE)
