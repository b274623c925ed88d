"""Comparisons that hold on every processor still find what is wrong; a family has its reference's curve."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import agree
import pytest
import torch
from agree import in_the_band, out_of_the_band

import loss_curve as curves
from tools import launch

WANT = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
FP8, OUTSIDE = torch.float8_e4m3fn, ["outside the band at 3 steps"]
verdict = dataclasses.make_dataclass("Verdict", ["problems", "worst_share"])
RECORD = {"losses": [5.5, 5.2, 4.9], "gradient_norms": [2.0, 2.5, 3.0]}


def record(**factors: float) -> dict[str, list[float]]:
    """The record with each loss or norm times a factor."""
    return {name: [value * factors.get(name, 1.0) for value in values] for name, values in RECORD.items()}


def test_another_order_of_a_sum_is_the_same_sum_and_not_the_same_bits():
    x, y = (torch.randn(64, 512, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    order = torch.randperm(512, generator=torch.Generator().manual_seed(3))
    whole = x @ y.t()
    turned = sum(x[:, order[at : at + 7]] @ y[:, order[at : at + 7]].t() for at in range(0, 512, 7))
    agree.same_sums(turned, whole, terms=512)
    with pytest.raises(AssertionError, match="other bits"):
        agree.same_bits(turned, whole)


def test_what_agrees_is_accepted():
    agree.same_training(RECORD, RECORD)
    agree.same_loss_in_half([5.505], [5.5])
    agree.rounded(WANT.to(FP8).float(), WANT, FP8)
    agree.nearer([1.0, 2.01], to=[1.0, 2.0], than=[1.0, 3.0])
    agree.same_scales([1.125], [1.0])
    agree.in_the_band(verdict([], 0.1))
    agree.out_of_the_band(verdict(OUTSIDE, 2.0))


WRONG: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    **{
        f"sums, {name}": (agree.same_sums, ({"a": WANT, "b": got}, {"a": WANT, "b": WANT}))
        for name, got in {
            "factor": WANT * 1.001,
            "shift": WANT + 1e-3,
            "order": WANT.flip(0),
            "not a number": WANT * math.nan,
            "nothing": torch.zeros_like(WANT),
            "half": WANT[:4],
            "rounded": WANT.bfloat16(),
        }.items()
    },
    **{
        f"{compare.__name__}, {len(got)} of {len(want)}, {type(got).__name__}": (compare, (got, want))
        for got, want in (({"a": WANT}, {"a": WANT, "b": WANT}), ([], []), ({}, {}))
        for compare in (agree.same_sums, agree.same_bits)
    },
    "training, losses": (agree.same_training, (record(losses=1.002), RECORD)),
    "training, norms": (agree.same_training, (record(gradient_norms=0.99), RECORD)),
    "training, not a number": (agree.same_training, (record(losses=math.nan), RECORD)),
    "training, shorter": (agree.same_training, ({"losses": [5.5]}, RECORD)),
    **{
        f"half, {wrong}": (agree.same_loss_in_half, (wrong, [5.5]))
        for wrong in ([5.53], [5.47], [math.nan], [])
    },
    "rounded, not at all": (agree.rounded, (WANT, WANT, FP8)),
    "rounded, otherwise": (agree.rounded, (WANT.to(torch.float8_e5m2).float() * 1.1, WANT, FP8)),
    "rounded, not a number": (agree.rounded, (WANT * math.nan, WANT, FP8)),
    "nearer, in the middle": (agree.nearer, ([1.0, 2.5], [1.0, 2.0], [1.0, 3.0])),
    "nearer, to the control": (agree.nearer, ([1.0, 3.0], [1.0, 2.0], [1.0, 3.0])),
    "nearer, no control": (agree.nearer, ([1.0, 2.0], [1.0, 2.0], [1.0, 2.0])),
    "scales": (agree.same_scales, ([1.25], [1.0])),
    "band, half of it": (agree.in_the_band, (verdict([], 0.5),)),
    "band, a problem": (agree.in_the_band, (verdict(["did not learn"], 0.0),)),
    "band, hardly outside": (agree.out_of_the_band, (verdict(OUTSIDE, 1.1),)),
    "band, no problem": (agree.out_of_the_band, (verdict([], 2.0),)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name):
    compare, given = WRONG[name]
    with pytest.raises((AssertionError, KeyError)):
        compare(*given)


FILES = sorted(Path(curves.__file__).with_name("curves").glob("CPU/*.json"))


def job(curve: curves.Curve) -> list[str]:
    """The flags of the reference's job."""
    given = {name: value for name, value in curve.job.items() if value is not None and name != "portable"}
    flags = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", f"{value}")]
    return ["--device", "cpu", *launch.COMPARABLE, *flags]


# Every layer has code of its own in one of these; the other families put the same layers together.
QUICK = {"llama-tiny", "moe-tiny", "flux-tiny"}


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.stem in QUICK else pytest.mark.slow) for path in FILES],
    ids=lambda path: path.stem,
)
def test_the_job_of_a_reference_stays_in_its_band(path, record):
    curve = curves.load(path)
    found = record(1, *job(curve))
    curves.comparable(curve, found)
    in_the_band(curves.judge(curve, found["losses"]))


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_learning_rate_a_tenth_too_large_leaves_the_band(path, record):
    curve = curves.load(path)
    found = record(1, *job(curve), "--lr", f"{1.1 * curve.job['lr']}")
    out_of_the_band(curves.judge(curve, found["losses"]))
