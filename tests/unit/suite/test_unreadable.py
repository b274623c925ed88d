"""A reading that a driver or library cannot give is an accepted skip; others are refused."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackcheck import vendors
from stackcheck.suite import requirements, skips

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
def test_what_no_entry_names_is_refused(row: dict[str, object], version: str) -> None:
    found = refusal("fan speed", row, driver=version, runtime=version)
    assert found is not None
    assert str(row["model"]) in found


@given(row=rows, reading=st.sampled_from(READINGS), newer=versions, older=versions)
def test_an_older_driver_or_library_never_tells_more(
    row: dict[str, object], reading: str, newer: str, older: str
) -> None:
    low, high = sorted((newer, older), key=lambda version: [int(part) for part in version.split(".")])
    if refusal(reading, row, driver=high, runtime=high) is None:
        assert refusal(reading, row, driver=low, runtime=low) is None


# What a guest shows depends on what it was given: a whole device has all of these readings.
JUDGED = ("uncorrectable memory errors", "ECC mode", "power cap", "fault reports", "link errors")


@given(row=rows, reading=st.sampled_from(JUDGED), version=st.none() | versions)
def test_no_driver_or_library_excuses_a_hidden_fault(
    row: dict[str, object], reading: str, version: str | None
) -> None:
    assert refusal(reading, row, driver=version, runtime=version) is not None


@pytest.mark.parametrize("row", [row for row in ROWS if row["vendor"] == "amd"], ids=lambda row: row["model"])
@pytest.mark.parametrize("runtime", RELEASES)
def test_the_skips_of_a_healthy_amd_host_are_accepted(row: dict[str, object], runtime: str) -> None:
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
def test_nvidias_recovery_action_is_asked_from_r570_on(driver: str, *, accepted: bool) -> None:
    row = next(row for row in ROWS if row["model"] == "A100")
    assert (refusal("recovery action", row, driver=driver) is None) is accepted


@pytest.mark.parametrize(
    ("runtime", "accepted"), [("6.2.4", True), ("6.3.3", True), ("6.4.3", False), ("7.0.2", False)]
)
def test_link_states_are_asked_of_the_libraries_that_have_them(runtime: str, *, accepted: bool) -> None:
    row = next(row for row in ROWS if row["model"] == "MI300X")
    assert (refusal("active links", row, driver="6.16.6", runtime=runtime) is None) is accepted


def test_every_entry_has_a_source_and_a_vendor_with_rows() -> None:
    assert all(entry["source"] and entry["vendor"] in {row["vendor"] for row in ROWS} for entry in TABLE)
