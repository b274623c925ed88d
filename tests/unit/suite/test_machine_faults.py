"""The machine's faults are the machine's: UNFIT on every device model and driver, and never by a word alone.

Fabricated runs of whole check lists, through the judge: a generator draws the fault, the device, the driver.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import models, thresholds
from result_files import CONFIG_DIGEST, check, host, metric, result
from stackcheck import vendors
from stackcheck.suite import expected, machine, results
from stackcheck.suite.judgement import judge_file
from stackcheck.suite.requirements import Requirements
from stackcheck.suite.skips import Facts
from stackcheck.suite.verdict import Verdict, judge
from stackcheck.vendors.seen import HostLink, Seen
from vendors import Event, amd_events, nvidia_events
from workloads import attention_default, gated

pytestmark = pytest.mark.usefixtures("frozen_once", "suites_asked_here")
ROOT = Path(__file__).resolve().parents[3]
ROWS = [row for row in vendors.device_table() if row["vendor"] != "cpu"]
ON_PCIE = [row for row in ROWS if row["pcie"]]
DRIVERS = {
    "nvidia": ("535.230.02", "550.163.01", "580.95.05", "590.44.01"),
    "amd": ("6.10.5", "6.14.14", "6.16.13"),
}
RECOVERY = "test_devices.py::test_no_device_asks_for_recovery"
FULL = HostLink(width=16, generation=6, max_generation=6)
NOTHING = Seen()
HEALTHY = {"width": 16, "generation": 6, "max_generation": 6}


@dataclasses.dataclass(frozen=True)
class Planted:
    """A fault of the machine: what a check claims, the evidence, and what this host sees of it."""

    kind: str
    device: int | None
    after: dict[str, Any]
    seen: Seen = NOTHING
    denied: Seen | None = None  # what this host sees if the claim is false; None: it cannot see the part


def fault_of_the_link(row: dict[str, Any], draw: Any) -> Planted:
    wide, fast = row["pcie"]["width"], row["pcie"]["generation"]
    slot = draw(st.integers(2, 6))
    narrow = {"width": draw(st.integers(1, wide - 1)), "generation": min(fast, slot), "max_generation": slot}
    slow = {"width": wide, "generation": draw(st.integers(1, min(fast, slot) - 1)), "max_generation": slot}
    link = draw(st.sampled_from((narrow, slow)))
    return Planted("pcie", 0, {"pcie": {"0": link}}, Seen(links=(HostLink(**link),)), Seen(links=(FULL,)))


def fault_of_the_driver(row: dict[str, Any], draw: Any) -> Planted:
    xids = [f"Xid {number}: {nvidia_events.XIDS[number]}" for number in sorted(nvidia_events.MACHINE)]
    resets = [f"{amd_events.FAULTS[name]} (because)" for name in amd_events.MACHINE]
    words = draw(st.sampled_from(xids if row["vendor"] == "nvidia" else resets))
    return Planted(
        "driver fault", 0, {"faults": [{"index": 0, "what": words, "machine": True, "time": "now"}]}
    )


def fault_of_memory(row: dict[str, Any], draw: Any) -> Planted:
    held = int(row["memory_bytes"] * draw(st.floats(0.5, 0.979)))
    whole = Seen(memory_bytes=(row["memory_bytes"],))
    return Planted(
        "short memory", 0, {"start": {"0": {"memory_bytes": held}}}, Seen(memory_bytes=(held,)), whole
    )


def fault_of_presence(_row: dict[str, Any], _draw: Any) -> Planted:
    lost = "0000:1f:00.0"
    return Planted("missing device", None, {"missing": [lost]}, Seen(unlisted=(lost,)), Seen())


def fault_between_devices(row: dict[str, Any], draw: Any) -> Planted:
    kind = (row["link"] or {"kind": "nvlink"})["kind"]
    good = {"kind": kind, "active": 18, "errors": 0, "replays": 0}
    bad = good | draw(st.sampled_from(({"kind": "pcie"}, {"active": "down"}, {"active": 0}, {"active": 17})))
    return Planted("link", None, {"links": {"0-1": good, "0-2": bad}})


FAULTS = (fault_of_the_link, fault_of_the_driver, fault_of_memory, fault_of_presence, fault_between_devices)


def verdict(
    row: dict[str, Any], driver: str, planted: Planted, seen: Seen | None, *others: dict[str, Any]
) -> Verdict:
    claim = {"kind": planted.kind, "words": f"{planted.kind}!", "device": planted.device}
    evidence = {"before": {}, "after": planted.after}
    found = check("test_devices.py::test_x", "invalid", machine=[claim], evidence=evidence)
    checks = (check("test_a.py::test_b"), found, *others)
    run = results.parse(
        json.dumps(result(*checks, host=host(row["vendor"], row["model"], driver=driver))).encode()
    )
    needed = Requirements(
        checks=tuple(str(one["id"]) for one in checks),
        image_config_digest=CONFIG_DIGEST,
        facts=Facts(rows=[row]),
        seen=seen,
    )
    return judge(run, needed)


@st.composite
def cases(draw: Any) -> tuple[dict[str, Any], str, Planted]:
    make = draw(st.sampled_from(FAULTS))
    row = draw(st.sampled_from(ON_PCIE if make is fault_of_the_link else ROWS))
    return row, draw(st.sampled_from(DRIVERS[row["vendor"]])), make(row, draw)


@given(case=cases())
def test_a_fault_of_the_machine_is_unfit_with_its_evidence(case):
    row, driver, planted = case
    for seen in (planted.seen, None):  # on this host, and of a file from another one
        found = verdict(row, driver, planted, seen)
        assert (found.status, found.invalid) == ("UNFIT", ("test_devices.py::test_x",)), planted


@given(case=cases())
def test_a_claim_without_evidence_or_against_what_this_host_sees_is_failed(case):
    row, driver, planted = case
    for after in ({}, {"pcie": {"0": HEALTHY}, "missing": [], "faults": [], "links": {}}):
        bare = dataclasses.replace(planted, after=after)
        assert verdict(row, driver, bare, planted.seen).status == "FAILED"
    if planted.denied:
        assert verdict(row, driver, planted, planted.denied).status == "FAILED"


@given(case=cases())
def test_a_check_that_failed_beside_it_fails_the_image_unless_the_host_lost_a_device(case):
    row, driver, planted = case
    wrong = check("test_kernels.py::test_gemm", "failed")
    assert verdict(row, driver, planted, planted.seen, wrong).status == "FAILED"
    lost = dataclasses.replace(planted.seen, gone=("d0",))
    found = verdict(row, driver, planted, lost, wrong)
    assert (found.status, found.failed) == ("UNFIT", ("test_kernels.py::test_gemm",))
    assert "device d0 was there when the run began" in found.reasons[0]


def every_event() -> list[Event]:
    xids = [
        Event(index=0, what=f"Xid {number}: {words}", machine=number in nvidia_events.MACHINE)
        for number, words in nvidia_events.XIDS.items()
    ]
    others = [
        Event(index=0, what=words, machine=True) for words in nvidia_events.TYPES.values() if words != "Xid"
    ]
    resets = [
        Event(index=0, what=f"{words} (x)", machine=name in amd_events.MACHINE)
        for name, words in amd_events.FAULTS.items()
    ]
    return [*xids, *others, *resets, Event(index=0, what="Xid 999: x"), Event(index=0, what="event 0x40")]


@pytest.mark.parametrize("event", every_event(), ids=lambda event: event.what)
def test_suites_and_host_blame_the_same_reports_on_the_machine(event):
    assert event.what.startswith(machine.MACHINE_FAULTS) is event.machine


def test_a_report_that_a_program_can_cause_hides_behind_no_other():
    faults = [{"index": 0, "what": "Xid 79: x"}, {"index": 0, "what": "Xid 31: memory page fault"}]
    row = models.row("H200")
    assert verdict(dict(row), "580", Planted("driver fault", 0, {"faults": faults}), None).status == "FAILED"
    assert (
        verdict(dict(row), "580", Planted("driver fault", 1, {"faults": faults[:1]}), None).status == "FAILED"
    )


def figures(model: str, vendor: str, slot: dict[str, int]) -> list[dict[str, Any]]:
    """Every figure that one device is judged by, a tenth better than its bound."""
    found = []
    entries = thresholds.load(thresholds.path_of(vendor, model))  # type: ignore[arg-type]
    row = models.row(model)
    backend = attention_default.expected(row["arch"], "2.11.0", "12.4")
    for name, conditions in gated.figures(row, 1, "standard"):
        where = {"devices": 1, "nvls": "unavailable", **conditions}
        where |= slot if name in thresholds.HOST_COPIES else {}
        bound = thresholds.find(entries, name, where)
        assert bound, (name, conditions)
        value = bound.bound * 1.1 if bound.direction == "min" else bound.bound / 1.1
        given = {"unit": bound.unit, "direction": bound.direction, "bound": bound.bound, "conditions": where}
        found.append(metric(name, value, **given))
        if conditions.get("backend") == backend:
            found.append(
                metric(
                    name,
                    value,
                    **given | {"conditions": {**where, "backend": "default", "resolved": backend}},
                )
            )
    return found


def healthy(model: str, driver: str, slot: dict[str, int] | None = None) -> dict[str, Any]:
    """A run of every check on one healthy device; the recovery action is skipped below R570."""
    vendor = models.row(model)["vendor"]
    ids = expected.check_ids(ROOT, vendor=vendor, tier="standard", count=1)
    told = metric("driver_listed", 1.0, verdict="recorded", direction=None, bound=None, unit="",
                  conditions={"runtime": "12.4", "serves": "12.4"})  # fmt: skip
    checks = [check(name) for name in ids]
    checks[0]["metrics"] = [told, *figures(model, vendor, slot or {})]
    old = int(driver.partition(".")[0]) < 570
    skip = {"kind": "not readable here", "needs": {"reading": "recovery action"}}
    checks = [
        check(RECOVERY, "skipped", skip=skip) if old and one["id"] == RECOVERY else one for one in checks
    ]
    return result(
        *checks,
        tier="standard",
        host=host(vendor, model, driver=driver),
        software={"python": "3.11.2", "torch": "2.11.0"},
    )


def judged(document: dict[str, Any], folder: Path) -> Verdict:
    """As `stackcheck judge` has it."""
    path = folder / "result.json"
    path.write_text(json.dumps(document))
    return judge_file(path, ROOT, None).verdict


@pytest.mark.parametrize(
    ("model", "driver", "slot"),
    [
        ("A100", "550.163.01", None),
        ("A100-PCIe", "535.230.02", None),
        ("H100-PCIe", "580.95.05", {"pcie_generation": 4}),
        ("H100-NVL", "560.35.05", {"pcie_generation": 4}),
        ("A100-40GB", "550.163.01", None),
        ("H100-PCIe", "590.44.01", {"pcie_generation": 3}),
    ],
)
def test_healthy_machines_that_the_project_never_met_pass(model, driver, slot, tmp_path):
    found = judged(healthy(model, driver, slot), tmp_path)
    assert (found.status, found.reasons) == ("PASSED", ())


def test_a_copy_that_is_slow_for_an_older_slot_too_is_failed(tmp_path):
    document = healthy("H100-PCIe", "580.95.05", {"pcie_generation": 4})
    copy = next(one for one in document["checks"][0]["metrics"] if one["name"] == "h2d_gb_per_s")
    copy["value"] = copy["bound"] * 0.9
    assert judged(document, tmp_path).status == "FAILED"


@given(claimed=st.integers(1, 6), has=st.integers(1, 6))
def test_an_image_cannot_make_its_host_an_older_one(claimed, has):
    link = HostLink(width=16, generation=1, max_generation=has)
    conditions = {thresholds.OLDER_SLOT: claimed}
    assert (machine.slot_problem(conditions, Seen(links=(None, link))) is None) is (claimed >= has)
    assert machine.slot_problem(conditions, None) is machine.slot_problem({}, Seen(links=(link,))) is None
