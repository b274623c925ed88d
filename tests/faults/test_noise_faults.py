"""Wrong random numbers are seen by what they have in common, and a wrong backward mask by its gradient."""

import functools
import math
import sys
from dataclasses import replace

import pytest

from planting import TESTS

pytest.importorskip("torch", reason="the suites need torch")
import torch
from torch.nn import functional

sys.path.insert(0, str(TESTS / "acceptance"))

from workloads import generated_compiled, generated_left, generated_noise, generated_noise_known
from workloads.generated_noise import Case

CASE = Case("dropout", "eager", "float32", 1, (64, 33, 3), order=(2, 0, 1), turned=(1, 2, 0), blocks=2)
MANY = replace(CASE, shape=(2**13, 33, 3), blocks=1)
AGAIN = replace(CASE, recomputed="not reentrant")
MEAN, REPEATS = "its numbers have another mean", "its numbers repeat each other"
COMMON = "two draws have numbers in common"
GRADIENT = "its gradient is not that of the numbers that forward drew"


def drawing(uniform):
    """Dropout of a half by numbers of [0, 1) that are drawn so."""

    def of(y):
        kept = (uniform(y.numel()) > 0.5).to(y.device, y.dtype)
        return y * kept[: y.numel()].view(y.shape) * 2

    return of


def of_seed(seed, skipped=0):
    return lambda count: torch.rand(count + skipped, generator=torch.Generator().manual_seed(seed))[skipped:]


def in_turns(y):
    """A seeded call has numbers that the next one has too, 64 further on."""
    seeded = torch.default_generator.get_state()
    again = torch.equal(seeded, torch.default_generator.manual_seed(CASE.seed).get_state())
    return drawing(of_seed(7, 0 if again else 64))(y)


class Turned(torch.autograd.Function):
    """Backward has forward's mask in another order of memory."""

    @staticmethod
    def forward(ctx, y):
        ctx.mask = (torch.rand_like(y) > 0.5) * 2.0
        return y * ctx.mask

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.mask.flatten().roll(1).view(grad.shape)


FAULTS = {
    "in rows": (CASE, drawing(lambda n: torch.rand(33).repeat(n // 33 + 1)), REPEATS),
    "in pairs": (MANY, drawing(lambda n: torch.rand(n // 2 + 1).repeat_interleave(2)), REPEATS),
    "the second half again": (MANY, drawing(lambda n: torch.rand(n // 2 + 1).repeat(2)), REPEATS),
    "another share": (MANY, lambda y: functional.dropout(y, 0.51) * 0.98, MEAN),
    "the same each time": (replace(CASE, blocks=1), drawing(of_seed(7)), COMMON),
    "an offset too small": (replace(CASE, blocks=1), in_turns, COMMON),
    "another backward mask": (CASE, Turned.apply, GRADIENT),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_numbers_are_seen(fault, monkeypatch):
    case, of, words = FAULTS[fault]
    assert generated_noise.judged(case)[0] <= 1
    healthy = generated_noise.noises
    wrong = {"dropout": healthy(0.5)["dropout"]._replace(of=of)}
    monkeypatch.setattr(generated_noise, "noises", lambda p: healthy(p) | wrong)
    share, told = generated_noise.judged(case)
    assert share > 1
    assert told == words or share == float("inf")


@pytest.mark.parametrize("recomputed", ["reentrant", "not reentrant", "but products"])
def test_recomputation_that_draws_again_is_seen(recomputed, monkeypatch):
    recompute = functools.partial(generated_noise.recomputing.checkpoint, preserve_rng_state=False)
    case = replace(AGAIN, recomputed=recomputed)
    assert generated_noise.judged(case)[0] <= 1
    monkeypatch.setattr(generated_noise.recomputing, "checkpoint", recompute)
    assert generated_noise.judged(case)[1] == GRADIENT


RRELU = Case("rrelu", generated_compiled.CODE, "float32", 5, (31, 7, 59), order=(2, 1, 0), before="raised")
KNOWN = {
    "pytorch#190758": replace(CASE, way=generated_compiled.TRACED, recomputed=generated_noise.BUDGET, seed=2),
    "pytorch#174078": replace(RRELU, noise="rand_like", before="contiguous", as_eager=True),
    "RReLU of a turned operand": replace(RRELU, recomputed="not reentrant"),
}


@pytest.mark.parametrize("fault", KNOWN)
def test_what_is_passed_over_is_there(fault):
    """So this fails when torch has these faults no more."""
    if KNOWN[fault].way == generated_compiled.CODE and not generated_compiled.has_compiler():
        pytest.skip("Inductor needs a compiler of C++")
    with generated_compiled._plain(), generated_left.counted() as counts:
        assert generated_noise.judged(KNOWN[fault])[0] <= 1
    assert counts["known", fault]


@pytest.mark.parametrize(
    ("changed", "kind", "passes"),
    [
        ({}, "cuda", True),
        ({}, "cpu", False),
        ({"noise": "dropout"}, "cuda", False),
        ({"recomputed": ""}, "cuda", False),
        ({"way": generated_noise.AOT}, "cuda", False),
    ],
)
def test_numbers_without_the_seed_are_passed_over_where_they_were_seen(changed, kind, passes, monkeypatch):
    """On a device, of two kinds of numbers, in generated code that is recomputed."""
    case = replace(AGAIN, noise="uniform_", way=generated_noise.CODE)
    monkeypatch.setattr(generated_noise_known, "device", lambda: torch.device(kind))
    said = generated_noise_known.known(replace(case, **changed), math.inf, generated_noise_known.SEED)
    assert (said[0] <= 1) == passes
