"""How far two results may lie apart, so that the answer is the same on every processor. No other file of
tests/trainers has a tolerance (tests/unit/repository/test_tolerances.py holds that).

A processor may add in another order, with longer vectors, and with or without fused products. It rounds as
the type says. So a result is compared in one of these ways:
- `same_bits`: both sides ran the same code in the same order, on the same processor.
- `same_sums`: both sides are the same sums in an order of their own. n roundings of a type with the unit
  roundoff u take a sum further than s·√n·u only with probability 2n·exp(-s²/2), in any order (Higham and Mary
  2019, doi.org/10.1137/18M1226312, theorem 2.4). Both sides err, and the type's eps is 2u: the bound is
  s·√n·eps of the norm. s is 6 for one number; the norm of many errors is near its mean, so there it is 2.
- `same_training`: losses and norms of a job, see there.
- `same_loss_in_half`: the loss of a job in bfloat16 beside the one in float32.
- `rounded`: values that were rounded to a type of 8 bits.
- `same_scales`: the scales with which tensors were rounded to FP8.
- `in_the_band`, `out_of_the_band`: a job beside its reference curve, whose band is stated in its file.
- `nearer`: the distance to what it must be is a part of the distance to a control, so no bound is needed.
- `different`: far outside of what `same_sums` allows; for the control of a test.

Weights after an optimizer step are compared by `same_bits` alone. Where a gradient is smaller than its own
rounding error, the order of a sum decides the sign of AdamW's step, and the weight moves by the whole
learning rate in either direction. Gradients, norms and losses have no such step in them.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

ONE_NUMBER, NORM = 6.0, 2.0  # s of a single number and of the norm of at least MANY
MANY = 64
# The roundings of a tiny preset one after the other, from a token to the gradient of a weight: two layers of
# 720 (sums over a width of 64, 64 positions, a hidden width of up to 256), a head of 384, twice for the way
# back, and the sum over 8 x 64 tokens.
TINY = 2 * (2 * 720 + 384) + 512
TINY_LR = 3e-3  # the peak learning rate of every tiny preset
TINY_WEIGHTS = 200_000  # at most; llama has 0.1 million
LEARNED_BY = 4.0  # how many times nearer the right result has to be than the control
IN_A_BAND = 0.2  # the band is for other devices and precisions; float32 on processors needs a part of it
MARGINS = "STACKCHECK_MARGINS"  # a file for each share of a bound that was used


def bound(dtype: torch.dtype, terms: int, *, numbers: int = 1) -> float:
    """The largest relative distance of two sums of so many terms."""
    return (NORM if numbers >= MANY else ONE_NUMBER) * math.sqrt(terms) * torch.finfo(dtype).eps


def same_bits(got: Any, want: Any) -> None:
    """Every tensor and number is equal."""
    pairs = list(_pairs(got, want))
    assert pairs
    different = [path for path, one, other in pairs if not torch.equal(one, other)]
    assert not different, f"other bits: {', '.join(different)}"


def same_sums(got: Any, want: Any, *, dtype: torch.dtype = torch.float32, terms: int = TINY) -> None:
    """Tensors and numbers, alone or in mappings and sequences, that are the same sums in another order.

    A tensor that is a thousandth of the largest one beside it may be zero but for rounding: for a difference
    of equal parts, what counts is the size of the parts.
    """
    pairs = list(_pairs(got, want))
    assert pairs
    largest = max(float(other.double().norm()) / math.sqrt(other.numel()) for _, _, other in pairs)
    for path, one, other in pairs:
        floor = 1e-3 * largest * math.sqrt(other.numel())
        limit = bound(dtype, terms, numbers=other.numel())
        _within(_distance(one, other, floor), limit, path)


def different(got: torch.Tensor, want: torch.Tensor, *, terms: int = TINY) -> bool:
    """Whether two tensors are ten times further apart than sums in another order."""
    return _distance(got, want) > 10 * bound(torch.float32, terms, numbers=want.numel())


def same_training(
    got: Mapping[str, Any], want: Mapping[str, Any], *, first: int = 0, lr: float = TINY_LR
) -> None:
    """Losses and gradients' norms of a tiny job in float32, whose sums have another order.

    A weight whose gradient is rounding error goes up to 2·lr further in one run than in the other. That takes
    the loss as far as the gradient says, which is rounding error: over all N weights at most
    2·lr·√N·|g|·bound in each step.

    Args:
        got: A record of train.py.
        want: The record of the same job in another layout.
        first: The first step of `got`.
        lr: The peak learning rate.
    """
    losses, norms = want["losses"], want["gradient_norms"]
    assert len(got["losses"]) == len(losses) - first
    exact, walked = bound(torch.float32, TINY), 0.0
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        limit = exact * (1 + walked / loss)
        walked += 2 * lr * math.sqrt(TINY_WEIGHTS) * norm
        for name, value in (("losses", loss), ("gradient_norms", norm)):
            if step >= first:
                _within(abs(got[name][step - first] / value - 1), limit, f"{name} of step {step}")


def same_loss_in_half(got: Sequence[float], want: Sequence[float], *, tokens: int = 512) -> None:
    """Losses of the same job of two layers, of which at least one computes in bfloat16.

    Each layer rounds what it adds to the stream of a token twice; the loss is the mean over the tokens of a
    batch, whose errors are independent.
    """
    assert len(got) == len(want)
    limit = ONE_NUMBER * math.sqrt(4 / tokens) * torch.finfo(torch.bfloat16).eps / 2
    for step, (one, other) in enumerate(zip(got, want, strict=True)):
        _within(abs(one / other - 1), limit, f"loss of step {step}")


def rounded(got: torch.Tensor, want: torch.Tensor, *dtypes: torch.dtype, nearest: bool = True) -> None:
    """`got` is `want` with factors that were rounded to these types, and is not `want` itself.

    A number moves by half of its type's eps at most, towards zero by the whole. Factors err independently.
    """
    limit = (0.5 if nearest else 1.0) * math.hypot(*(torch.finfo(dtype).eps for dtype in dtypes))
    found = _distance(got, want)
    assert found > 0, "nothing was rounded"
    _within(found, limit, f"rounded to {dtypes}")


def same_scales(got: Sequence[float], want: Sequence[float]) -> None:
    """FP8 scales of the same tensors: the largest value, in bfloat16, may be the next that FP8 has."""
    assert len(got) == len(want)
    limit = torch.finfo(torch.float8_e4m3fn).eps + torch.finfo(torch.bfloat16).eps
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        _within(abs(one / other - 1), limit, f"scale {number}")


def in_the_band(verdict: Any) -> None:
    """A curve's own judge finds nothing, and a processor takes at most a fifth of the band."""
    assert verdict.problems == []
    _within(verdict.worst_share, IN_A_BAND, "part of the band")


def out_of_the_band(verdict: Any) -> None:
    """A curve's own judge refuses it, and another processor would not bring it back."""
    assert any("outside the band" in problem for problem in verdict.problems), verdict
    _within(1.0 + IN_A_BAND, verdict.worst_share, "edge of the band, of the fault")


def nearer(got: Any, to: Any, than: Any) -> None:
    """`got` is several times nearer to what it must be than to the control."""
    off, control = (_distance(_vector(got), _vector(other)) for other in (to, than))
    assert control > 0, "the control is the result: this job cannot tell the two apart"
    _within(off, control / LEARNED_BY, "distance, of the distance to the control")


def _distance(got: torch.Tensor, want: torch.Tensor, floor: float = 0.0) -> float:
    """The norm of the difference by the norm of what is wanted; infinite where a value is not finite."""
    assert got.shape == want.shape, f"got shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    got, want = got.detach().double(), want.detach().double()
    off = float((got - want).norm())
    if off == 0:
        return 0.0
    size = max(float(want.norm()), floor)
    return off / size if math.isfinite(off) and size > 0 else math.inf


def _within(found: float, limit: float, what: str) -> None:
    """Assert it, and keep which part of the bound was used."""
    if MARGINS in os.environ:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
        with open(os.environ[MARGINS], "a", encoding="utf-8") as file:  # noqa: PTH123 - one line, appended
            file.write(json.dumps({"share": found / limit, "what": what, "test": test}) + "\n")
    assert found <= limit, f"{what}: {found:.3e} apart, at most {limit:.3e}"


def _vector(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float64).reshape(-1)


def _pairs(got: Any, want: Any, path: str = "it") -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """What is compared with what; the two must have the same form."""
    if isinstance(want, Mapping):
        assert got.keys() == want.keys(), f"{path} has {sorted(got)}, expected {sorted(want)}"
        for key, value in want.items():
            yield from _pairs(got[key], value, f"{path}[{key!r}]")
    elif isinstance(want, torch.Tensor):
        yield path, got.detach(), want.detach()
    elif isinstance(want, Sequence):
        assert len(got) == len(want), f"{path} has {len(got)} parts, expected {len(want)}"
        for number, value in enumerate(want):
            yield from _pairs(got[number], value, f"{path}[{number}]")
    else:
        yield (
            path,
            torch.tensor(float(got), dtype=torch.float64),
            torch.tensor(float(want), dtype=torch.float64),
        )
