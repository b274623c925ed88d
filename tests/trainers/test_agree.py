"""Comparisons that hold on every processor still find what is wrong: each of them can fail."""

import dataclasses
import math

import agree
import pytest
import torch

WANT = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
RECORD = {"losses": [5.5, 5.2, 4.9], "gradient_norms": [2.0, 2.5, 3.0]}


def record(**factors: float) -> dict[str, list[float]]:
    """The record with each loss or norm times a factor."""
    return {name: [value * factors.get(name, 1.0) for value in values] for name, values in RECORD.items()}


def test_another_order_of_a_sum_is_the_same_sum_and_not_the_same_bits() -> None:
    x, y = (torch.randn(64, 512, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    order = torch.randperm(512, generator=torch.Generator().manual_seed(3))
    whole = x @ y.t()
    turned = sum(x[:, order[at : at + 7]] @ y[:, order[at : at + 7]].t() for at in range(0, 512, 7))
    agree.same_sums(turned, whole, terms=512)
    with pytest.raises(AssertionError, match="other bits"):
        agree.same_bits(turned, whole)


@pytest.mark.parametrize(
    "got",
    [
        WANT * 1.001,
        WANT + 1e-3,
        WANT.flip(0),
        WANT * math.nan,
        torch.zeros_like(WANT),
        WANT[:4],
        WANT.bfloat16(),
    ],
    ids=["factor", "shift", "order", "not a number", "nothing", "half", "rounded"],
)
def test_other_values_are_not_the_same_sums(got: torch.Tensor) -> None:
    with pytest.raises(AssertionError):
        agree.same_sums({"a": WANT, "b": got}, {"a": WANT, "b": WANT})


def test_a_part_that_is_missing_or_none_at_all_is_found() -> None:
    for got, want in (({"a": WANT}, {"a": WANT, "b": WANT}), ([], []), ({}, {})):
        for compare in (agree.same_sums, agree.same_bits):
            with pytest.raises(AssertionError):
                compare(got, want)


@pytest.mark.parametrize(
    "wrong", [record(losses=1.002), record(gradient_norms=0.99), record(losses=math.nan), {"losses": [5.5]}]
)
def test_another_training_is_found(wrong: dict[str, list[float]]) -> None:
    agree.same_training(RECORD, RECORD)
    with pytest.raises((AssertionError, KeyError)):
        agree.same_training(wrong, RECORD)


def test_losses_in_half_may_differ_by_a_fifth_of_a_percent() -> None:
    agree.same_loss_in_half([5.505], [5.5])
    for wrong in ([5.53], [5.47], [math.nan], []):
        with pytest.raises(AssertionError):
            agree.same_loss_in_half(wrong, [5.5])


def test_only_what_was_rounded_to_the_type_is_rounded() -> None:
    fp8 = torch.float8_e4m3fn
    agree.rounded(WANT.to(fp8).float(), WANT, fp8)
    for wrong in (WANT, WANT.to(torch.float8_e5m2).float() * 1.1, WANT * math.nan):
        with pytest.raises(AssertionError):
            agree.rounded(wrong, WANT, fp8)


def test_nearer_to_the_control_or_in_the_middle_is_not_near() -> None:
    agree.nearer([1.0, 2.01], to=[1.0, 2.0], than=[1.0, 3.0])
    for wrong, control in (([1.0, 2.5], [1.0, 3.0]), ([1.0, 3.0], [1.0, 3.0]), ([1.0, 2.0], [1.0, 2.0])):
        with pytest.raises(AssertionError):
            agree.nearer(wrong, to=[1.0, 2.0], than=control)


def test_scales_and_bands_have_edges() -> None:
    agree.same_scales([1.125], [1.0])
    with pytest.raises(AssertionError):
        agree.same_scales([1.25], [1.0])
    verdict = dataclasses.make_dataclass("Verdict", ["problems", "worst_share"])
    outside = ["outside the band at 3 steps"]
    agree.in_the_band(verdict([], 0.1))
    agree.out_of_the_band(verdict(outside, 2.0))
    for compare, wrong in (
        (agree.in_the_band, verdict([], 0.5)),
        (agree.in_the_band, verdict(["did not learn"], 0.0)),
        (agree.out_of_the_band, verdict(outside, 1.1)),
        (agree.out_of_the_band, verdict([], 2.0)),
    ):
        with pytest.raises(AssertionError):
            compare(wrong)
