"""A figure beyond a derived bound blames no image and certifies none; beyond any other it is FAILED."""

import contextlib
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import models, preflight, thresholds
from harness.check import Check
from result_files import CONFIG_DIGEST, check, host, metric, result
from small_verdicts import HEALTHY, REQUIRED, judged
from stackcheck.errors import ChecksFailedError
from stackcheck.matrix.matrix import TestTarget
from stackcheck.nightly.decide import outcome
from stackcheck.proof.baseline import propose
from stackcheck.suite import bounds, results
from stackcheck.suite.bounds import Bound, Bounds
from stackcheck.suite.guesses import FAR, GUESSED, OVERDUE
from stackcheck.suite.requirements import Requirements
from stackcheck.suite.verdict import UNBOUNDED, Verdict, judge, refusal
from workloads import gated

pytestmark = pytest.mark.usefixtures("suites_asked_here")
ROOT = Path(__file__).resolve().parents[3]
MACHINES = [
    (row["model"], row["vendor"], count)
    for row in models.table()
    for count in row.get("counts") or (1, 8)
    if row["vendor"] != "cpu" and thresholds.path_of(row["vendor"], row["model"]).exists()
]
SPEED = "test_b.py::test_speed"
DERIVED = Bound(bound=5.0, direction="min", unit="GB/s", kind="derived")
LOW = metric(value=4.0, verdict="fail")
BARE = metric(verdict="no_threshold", bound=None, direction=None)


TIMES = (0.95, 1.001, 1.1, 1.9, 1.999, 2.001, 4.0, 1000.0)  # beyond the bound; less than 1 satisfies it


def ended(model: str, vendor: Any, count: int, times: Iterator[float]) -> list[tuple[dict[str, Any], float]]:
    """A check for each figure of a machine, as the suites themselves end it, and how far it is beyond."""
    found = []
    entries = thresholds.load(thresholds.path_of(vendor, model))
    for number, (name, asked) in enumerate(gated.figures(models.row(model), count, "standard")):
        if (entry := thresholds.find(entries, name, {"devices": count, "nvls": "off", **asked})) is None:
            continue
        one, far = Check(vendor=vendor, model=model, count=count), next(times)
        value = entry.bound / far if entry.direction == "min" else entry.bound * far
        one.record(name, value, unit=entry.unit, conditions={"nvls": "off", **asked}, gate=True)
        with contextlib.nullcontext() if far < 1 else pytest.raises(pytest.fail.Exception):
            one.conclude()
        figures = [json.loads(json.dumps(vars(figure))) for figure in one.metrics]
        outcome = "passed" if far < 1 else "failed"
        made = check(f"test_{number}.py::test_x", outcome, cause=one.cause, metrics=figures)
        found.append((made, far))
    return found


def missed(model: str, vendor: Any, count: int) -> list[dict[str, Any]]:
    return [made for made, _ in ended(model, vendor, count, itertools.repeat(1.1))]


def judge_all(
    checks: list[dict[str, Any]], machine: dict[str, Any]
) -> tuple[Verdict, dict[str, Bound | None]]:
    document = result(*HEALTHY, *checks, host=machine, tier="standard")
    parsed = results.parse(json.dumps(document).encode())
    found = bounds.look_up(parsed, ROOT)
    required = Requirements(checks=tuple(one.id for one in parsed.checks), image_config_digest=CONFIG_DIGEST)
    return judge(parsed, required, found), {one["id"]: found.of[one["id"], 0] for one in checks}


@pytest.mark.parametrize("worst", [0.95, 1.1, FAR, 1000.0])
@pytest.mark.parametrize(("model", "vendor", "count"), MACHINES)
def test_of_every_machine_and_figure_class_and_distance_decide(model, vendor, count, worst):
    drawn = random.Random(f"{model} {count} {worst}")  # a repeatable choice, no secret
    some = [times for times in TIMES if times <= worst]
    made = ended(model, vendor, count, iter(lambda: drawn.choice(some), None))
    verdict, kinds = judge_all([one for one, _ in made], host(vendor, *[model] * count))
    beyond = {one["id"]: times for one, times in made if times > 1}
    derived = {name for name in beyond if (bound := kinds[name]) and bound.kind == "derived"}
    assert set(verdict.guessed) == derived
    known = beyond.keys() - derived or _others(verdict)
    assert verdict.status == ("FAILED" if known else "UNFIT" if derived else "PASSED")
    near = all(times <= FAR for times in beyond.values())
    assert verdict.only_bounds == (verdict.status == "UNFIT" and near)
    for name, times in beyond.items():
        (reason,) = [line for line in verdict.reasons if f"{name} " in line or f"{name}:" in line]
        assert reason.startswith(GUESSED) == (name in derived)
        assert ("no baseline takes it" in reason) == (name in derived and times > FAR)


def _others(verdict: Any) -> list[str]:
    """Failures that are not of the figures: NVLS of this host, for example."""
    return [line for line in verdict.reasons if line.startswith("no check measured")]


def low(**changes: Any) -> dict[str, Any]:
    claimed: dict[str, Any] = check(SPEED, "failed", **{"cause": "bound", "metrics": [LOW], **changes})
    return claimed


@pytest.mark.parametrize(
    "claim",
    [
        {"cause": None},  # an assertion of the check failed, or older suites wrote it
        {"cause": "no_threshold"},
        {"cause": "exception"},
        {"metrics": []},
        {"metrics": [metric()]},  # nothing violates a bound
        {"metrics": [LOW | {"value": None}]},
        {"metrics": [LOW | {"bound": 9.0}]},  # not the bound of this host
        {"metrics": [LOW | {"value": 6.0}]},  # this host's bound accepts it
        {"metrics": [LOW, LOW]},  # the second has no bound here
    ],
    ids=str,
)
def test_a_check_that_only_claims_it_is_failed(claim):
    verdict = judged(*HEALTHY, low(**claim), bounds=Bounds({(SPEED, 0): DERIVED}))
    assert (verdict.status, verdict.guessed) == ("FAILED", ())


PASSED = check(SPEED, metrics=[metric(value=4.0, bound=3.0, verdict="pass")])
OTHERS = {"same_thresholds": False}  # the run was judged by the bounds of then


@pytest.mark.parametrize("then", [PASSED, low(), low(metrics=[LOW | {"bound": 9.0}])], ids=str)
@pytest.mark.parametrize(
    ("now", "status"), [({}, "UNFIT"), ({"kind": "measured"}, "FAILED"), ({"kind": "published"}, "FAILED")]
)
def test_an_old_result_follows_the_bounds_of_now(then, now, status):
    known = Bounds({(SPEED, 0): DERIVED.model_copy(update=now)})
    verdict = judged(*HEALTHY, then, bounds=known, held_to=OTHERS)
    assert (verdict.status, verdict.only_bounds) == (status, status == "UNFIT"), verdict.reasons
    assert verdict.guessed == ((SPEED,) if status == "UNFIT" else ())


@pytest.mark.parametrize(
    "flaw", [{"value": None}, {"bound": 4.5}, {"verdict": "no_threshold"}, {"verdict": "fail"}], ids=str
)
def test_an_old_pass_that_its_own_figures_deny_is_failed(flaw):
    then = check(SPEED, metrics=[metric(value=4.0, bound=3.0, verdict="pass") | flaw])
    assert judged(*HEALTHY, then, bounds=Bounds({(SPEED, 0): DERIVED}), held_to=OTHERS).status == "FAILED"


@pytest.mark.parametrize(
    "besides",
    [
        {"held_to": {"machines": (TestTarget(device="H200", count=8),)}},
        {"state": "running"},
        {"made_up": True},
    ],
    ids=str,
)
def test_only_bounds_is_said_of_nothing_else(besides):
    alone = judged(*HEALTHY, low(), bounds=Bounds({(SPEED, 0): DERIVED}))
    assert alone.only_bounds
    verdict = judged(*HEALTHY, low(), bounds=Bounds({(SPEED, 0): DERIVED}), **besides)
    assert (bool(verdict.guessed), verdict.only_bounds) == (True, False)


@pytest.mark.parametrize("begins", [GUESSED, UNBOUNDED, f"{UNBOUNDED} x bounds missing:"])
def test_the_name_of_a_check_cannot_make_a_failure_one_of_bounds(begins):
    named = check(f"{begins} test_x.py::test_y", "failed", cause="no_threshold", metrics=[BARE])
    verdict = judged(
        *HEALTHY, low(), named, required=(*REQUIRED, SPEED), bounds=Bounds({(SPEED, 0): DERIVED})
    )
    assert (verdict.status, verdict.only_bounds, verdict.lacks_only_bounds) == ("FAILED", False, False)


def test_a_night_still_asks_whether_the_image_became_slower():
    verdict = judged(*HEALTHY, low(), bounds=Bounds({(SPEED, 0): DERIVED}))
    parsed = results.parse(json.dumps(result(*HEALTHY, low())).encode())
    assert (outcome(verdict, parsed).status, outcome(verdict, parsed).failed) == ("FAILED", (SPEED,))


LATE = check("test_c.py::test_slow", "failed", cause="time_limit", reason="did not end in 360 s\nstacks")
GUESSED_LIMITS = Bounds(limits_are_guessed=True)


def test_a_check_that_a_guessed_limit_ended_is_unfit_and_names_what_to_read():
    verdict = judged(*HEALTHY, LATE, bounds=GUESSED_LIMITS)
    assert (verdict.status, verdict.guessed, verdict.only_bounds) == ("UNFIT", (LATE["id"],), False)
    assert verdict.reasons[0].startswith(f"{OVERDUE} {LATE['id']}: did not end in 360 s; nobody has measured")
    assert "TIME_LIMIT_FACTOR" in str(refusal(verdict, ROOT))


@pytest.mark.parametrize(
    ("late", "known"),
    [
        (LATE, Bounds()),  # the limits of this vendor were measured
        (LATE | {"cause": None}, GUESSED_LIMITS),
        (LATE | {"outcome": "error"}, GUESSED_LIMITS),
        (LATE | {"metrics": [LOW]}, GUESSED_LIMITS),
        (LATE | {"metrics": [metric(value=None)]}, GUESSED_LIMITS),
    ],
    ids=str,
)
def test_any_other_check_that_did_not_end_is_failed(late, known):
    assert judged(*HEALTHY, late, bounds=known).status == "FAILED"


def test_a_hang_of_a_certified_image_counts_in_a_night():
    verdict = judged(*HEALTHY, LATE, bounds=GUESSED_LIMITS)
    parsed = results.parse(json.dumps(result(*HEALTHY, LATE)).encode())
    assert outcome(verdict, parsed).status == "FAILED"


@pytest.mark.parametrize("times", TIMES[1:])
@pytest.mark.parametrize("model", ["MI210", "MI300X", "MI355X", "B200"])
def test_runs_far_beyond_a_guess_become_no_bound(model, times):
    vendor: Any = models.row(model)["vendor"]
    count = 1 if model == "MI210" else 8
    checks = [
        one for one in (made for made, _ in ended(model, vendor, count, itertools.repeat(times)))
        if bounds_kind(one, vendor, model) == "derived"
    ]  # fmt: skip
    machine = host(vendor, *[model] * count)
    runs = [result(*HEALTHY, *checks, host=machine, run_id=f"{n:032x}", tier="standard") for n in range(3)]
    parsed = [results.parse(json.dumps(run).encode()) for run in runs]
    if times > FAR:
        with pytest.raises(ChecksFailedError, match="far beyond a derived bound") as refused:
            propose(parsed, root=ROOT)
        assert str(refused.value).count("the derived bound is") == len(
            {json.dumps(one["metrics"][0]["conditions"]) + one["metrics"][0]["name"] for one in checks}
        )
        return
    for proposal in propose(parsed, root=ROOT).proposals:
        assert proposal.now
        assert "which was a guess" in proposal.entry.source
        assert 1 < proposal.times_beyond <= FAR


def test_such_runs_may_become_the_measured_bounds_and_other_failures_may_not():
    slow = next(one for one in missed("MI300X", "amd", 8) if one["metrics"][0]["name"] == "gemm_tflops"
                and bounds_kind(one, "amd", "MI300X") == "derived")  # fmt: skip
    machine = host("amd", *["MI300X"] * 8)
    runs = [result(*HEALTHY, slow, host=machine, run_id=f"{n:032x}", tier="standard") for n in range(3)]
    parsed = [results.parse(json.dumps(run).encode()) for run in runs]
    (proposal,) = propose(parsed, root=ROOT).proposals
    assert proposal.entry.metric == "gemm_tflops"
    for run in runs:
        run["checks"][-1] = slow | {"cause": None}
    with pytest.raises(ChecksFailedError, match="cannot be a baseline"):
        propose([results.parse(json.dumps(run).encode()) for run in runs], root=ROOT)


def bounds_kind(one: dict[str, Any], vendor: Any, model: str) -> str:
    figure = one["metrics"][0]
    entries = thresholds.load(thresholds.path_of(vendor, model))
    found = thresholds.find(entries, figure["name"], figure["conditions"])
    assert found
    return found.kind


@pytest.mark.parametrize(("vendor", "model", "fails"), [("nvidia", "H200", True), ("amd", "MI325X", False)])
def test_a_job_is_not_refused_beforehand_for_a_guess(vendor, model, *, fails, monkeypatch):
    monkeypatch.setattr(preflight, "doubts", lambda *_: [])
    session: Any = SimpleNamespace(vendor=vendor, model=model, machine_at_start=lambda: None, devices=[])
    entries = thresholds.load(thresholds.path_of(vendor, model))
    copy = next(one for one in entries if one.metric == "copy_gb_per_s")
    assert (copy.kind == "measured") is fails
    moved = {"bytes": copy.conditions.get("bytes", 4 << 30), "gb_per_s": copy.bound / 2}
    found = {"problems": [], "gemm": [], "copy": moved, "collectives": []}
    if not fails:
        return preflight.require_usual(found, 1, session, Check(vendor=vendor, model=model))
    with pytest.raises(pytest.fail.Exception, match="copy_gb_per_s"):
        preflight.require_usual(found, 1, session, Check(vendor=vendor, model=model))
    return None
