"""A loss curve that is broken, short, untrained or shifted never passes; the reference and noise do."""

import json
import math
from pathlib import Path

import pytest
from figures import figure
from records import record_of

import loss_curve as curves
import presets
from errors import RefusedError
from record import unsound
from tools import curve, launch

FOLDER = Path(curves.__file__).with_name("curves")
FILES = sorted(FOLDER.rglob("*.json"))
LLAMA = curves.load(FOLDER / "CPU" / "llama-tiny.json")
WANT = LLAMA.losses
WIDE = curves.Band(first=10.0, last=10.0)

FAULTS = {
    "nan": ([*WANT[:20], math.nan, *WANT[21:]], "step 20: the loss is not a finite number"),
    "null": ([*WANT[:-1], None], "step 59: the loss is not a finite number"),
    "infinite": ([math.inf, *WANT[1:]], "step 0"),
    "truncated": (WANT[:40], "40 losses, the reference has 60"),
    "empty": ([], "0 losses"),
    "too long": ([*WANT, WANT[-1]], "61 losses"),
    "untrained": ([WANT[0]] * len(WANT), "did not learn"),
    "late by a step": ([WANT[0], *WANT[:-1]], "outside the band"),
    "early by a step": ([*WANT[1:], WANT[-1]], "outside the band"),
    "shifted by 2 %": ([loss * 1.02 for loss in WANT], "outside the band"),
    "zero": ([0.0] * len(WANT), "outside the band"),
    "diverged at the end": ([*WANT[:-6], *WANT[:6]], "did not learn"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_curve_is_caught_and_the_reason_named(fault):
    losses, reason = FAULTS[fault]
    assert reason in "; ".join(curves.judge(LLAMA, losses).problems)


@pytest.mark.parametrize("fault", ["nan", "null", "truncated", "empty", "untrained", "diverged at the end"])
def test_no_band_is_wide_enough_to_excuse_a_curve_that_did_not_learn(fault):
    blind = curves.Curve(**{**vars(LLAMA), "band": WIDE})
    assert curves.judge(blind, FAULTS[fault][0]).problems


def test_the_reference_and_a_curve_just_inside_the_band_pass():
    steps = len(WANT)
    edge = [loss * (1 + 0.99 * LLAMA.band.width(step, steps)) for step, loss in enumerate(WANT)]
    assert curves.judge(LLAMA, WANT).problems == []
    assert curves.judge(LLAMA, edge).problems == []
    outside = [loss * (1 + 1.01 * LLAMA.band.width(step, steps)) for step, loss in enumerate(WANT)]
    assert curves.judge(LLAMA, outside).problems


def test_the_band_widens():
    widths = [LLAMA.band.width(step, len(WANT)) for step in range(len(WANT))]
    assert widths == sorted(widths)
    assert (widths[0], widths[-1]) == figure((LLAMA.band.first, LLAMA.band.last))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_reference_says_where_it_comes_from(path):
    curve = curves.load(path)
    assert {"torch", "seed", "steps", "device", "precision", "measured"} <= set(curve.provenance)
    assert len(curve.losses) == curve.provenance["steps"] == curve.job["steps"]
    assert curve.floor < curve.losses[0]
    assert path.parent.name == curve.provenance["device"]


def test_every_family_has_a_reference():
    held = {curves.load(path).job["model"] for path in FILES}
    assert held == set(presets.families())


def record(losses: list[float], first_step: int = 0, **options: object) -> dict:
    return record_of(losses, first_step=first_step, **LLAMA.job | options)


def test_segments_are_joined_in_their_order_and_a_gap_is_refused():
    early, late = record(WANT[:30]), record(WANT[30:], first_step=30)
    assert curves.joined([late, early]) == WANT
    with pytest.raises(RefusedError, match="starts after step 31"):
        curves.joined([early, record(WANT[31:], first_step=31)])
    with pytest.raises(RefusedError, match="different jobs"):
        curves.joined([early, record(WANT[30:], first_step=30, seed=2)])


def test_another_job_is_not_compared_and_the_difference_is_named():
    curves.comparable(LLAMA, record(WANT))
    with pytest.raises(RefusedError, match=r"'seed': \(1, 2\)"):
        curves.comparable(LLAMA, record(WANT, seed=2))


BY_HEART = [12.66, 5.68, 2.8, 0.16, *[0.002] * (len(WANT) - 4)]  # 500 steps over 2.5 KB of text at width 4096
NONE = {
    "truncated": record(WANT[:10]),
    "resumed": record(WANT, 5),
    "unsound": {**record(WANT), "problems": ["x"]},
    "flat": record([5.0] * len(WANT)),
    "by heart": record(BY_HEART),
}


@pytest.mark.parametrize("bad", NONE.values(), ids=NONE)
def test_a_run_that_is_not_whole_or_shows_no_learning_makes_no_reference(bad):
    with pytest.raises(RefusedError, match="no reference"):
        curves.reference(bad, LLAMA.band, measured="2026-01-01")


def test_a_reference_survives_its_file(tmp_path):
    curve = curves.reference(record(WANT), LLAMA.band, measured="2026-01-01")
    curves.save(curve, tmp_path / "x" / "y.json")
    assert curves.load(tmp_path / "x" / "y.json") == curve


def test_the_record_of_a_reference_can_be_judged_by_another_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launch, "run", lambda *_, **__: record(WANT))
    out, run = tmp_path / "H200" / "llama-tiny.json", tmp_path / "run.json"
    assert curve.main(["record", "--out", str(out), "--record", str(run), "--", "--size", "tiny"]) == 0
    assert curve.main(["judge", "--reference", str(FOLDER / "CPU" / "llama-tiny.json"), str(run)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["problems"] == []


@pytest.mark.parametrize(
    "change", [{"schema": 2}, {"losses": []}, {"losses": [math.nan]}, {"floor": math.inf}, {"more": 1}]
)
def test_a_damaged_reference_is_refused(change, tmp_path):
    facts = json.loads((FOLDER / "CPU" / "llama-tiny.json").read_text()) | change
    (tmp_path / "bad.json").write_text(json.dumps(facts))
    with pytest.raises(RefusedError):
        curves.load(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("losses", "norms", "says"),
    [
        ([math.nan], [1.0], "loss is not finite"),
        ([1.0], [math.inf], "gradient norm is not finite"),
        ([12.58, 12.57], [9.2, 0.0], "a gradient norm is zero"),
    ],
)
def test_record_of_an_unsound_run_says_why(losses, norms, says):
    (problem,) = unsound(losses, norms, None)
    assert says in problem
    assert unsound([12.58, 12.57], [9.2, 9.1], None) == []
