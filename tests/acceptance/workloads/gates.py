"""The three numeric gates. In: tensors. Out: one `Reading` per gate.

A kernel is judged against float64 by (a) its relative Frobenius error, with a plain eager
computation of the same precision as the yardstick, (b) a bound on every single element with no
outlier allowed, and (c) bitwise equality where the operands make every correct order of summation
exact. No single gate is enough: a zeroed tile passes rules that allow 5 % outliers, one wrong element
passes (a), and lost keys pass any rule on uniform inputs.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from workloads import margins

# Bits of the same width as a dtype, for comparisons that must not treat NaN as different from itself.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Reading:
    """The result of one gate: `got` must be a finite number and at most `bound`."""

    gate: str
    got: float
    bound: float
    detail: str = ""

    @property
    def passed(self) -> bool:
        """Whether the figure is finite and within its bound."""
        return math.isfinite(self.got) and self.got <= self.bound

    @property
    def margin(self) -> float:
        """Error / gate, without a unit."""
        return margins.of(self.got, self.bound)

    def __str__(self) -> str:
        """One line for a failure: gate, got, bound, place."""
        detail = f"; {self.detail}" if self.detail else ""
        return f"{self.gate}: got {self.got:.4g}, bound {self.bound:.4g}{detail}"


TINY = torch.finfo(torch.float64).tiny
# How wrong one element may be, in roundings. A processor reads at most 31 in bf16 and 86 in float32, and an
# H200 at most 22 in a small block in bf16.
WORST, WORST_FP32 = 128, 1024


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to `dtype`: 2^-8 for bf16, 2^-11 for fp16, 2^-24 for fp32."""
    return float(torch.finfo(dtype).eps) / 2


def frobenius(
    out: torch.Tensor,
    ref: torch.Tensor,
    eager: torch.Tensor,
    *,
    factor: float,
    terms: int = 0,
    spread: torch.Tensor | None = None,
    name: str = "frobenius",
) -> Reading:
    """Relative Frobenius error of `out` at most `factor` times that of `eager`.

    The bound is at least half a unit roundoff of the output, because correct rounding alone costs about
    0.44 of it. It is also at least the error of a plain float32 sum of `terms` numbers in sequence: its
    roundings walk at random to 0.41 u sqrt(terms / 2) of the result (2.0e-7 at 129 terms, as in cuBLAS),
    while the yardstick may sum in halves or in blocks. With `spread`, the standard deviation of each element
    by the roundings on its way, it is at least half of that: where few numbers decide all (peaked attention
    in float32), the yardstick's own error is a draw of few, other on each processor.
    """
    floor = max(unit_roundoff(out.dtype) / 2, unit_roundoff(torch.float32) * (terms / 2) ** 0.5)
    if spread is not None:
        floor = max(floor, float(spread.double().norm() / ref.double().norm().clamp_min(TINY)) / 2)
    bound = max(factor * relative_error(eager, ref), floor)
    return Reading(name, relative_error(out, ref), bound)


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """||out - ref|| / ||ref|| in float64; NaN anywhere in `out` gives NaN."""
    ref = ref.double()
    error = (out.to(ref.device).double() - ref).norm()
    return float(error / ref.norm().clamp_min(TINY))


def elementwise(
    out: torch.Tensor, ref: torch.Tensor, slack: torch.Tensor | float, *, name: str = "elementwise"
) -> Reading:
    """Every element within u |ref| + slack, where u is the unit roundoff of the output's dtype; no outliers.

    `slack` is the error that the summation may have, per element, in the units of the output. The figure
    is the worst ratio of error to allowance. Non-finite elements must be the same in both.
    """
    ref = ref.double()
    got = out.to(ref.device).double()
    allowed = unit_roundoff(out.dtype) * ref.abs() + slack + torch.finfo(out.dtype).tiny
    same = (got == ref) | (got.isnan() & ref.isnan())
    ratio = torch.where(same, 0.0, (got - ref).abs() / allowed)
    ratio = ratio.nan_to_num(nan=math.inf, posinf=math.inf)
    if not ratio.numel():
        return Reading(name, math.inf, 1.0, "empty output")
    worst = float(ratio.max())
    worst = worst if math.isfinite(worst) else torch.finfo(torch.float64).max
    return Reading(name, worst, 1.0, _place(got, ref, ratio) if worst > 1 else "")


def beside_eager(
    out: torch.Tensor, ref: torch.Tensor, eager: torch.Tensor, *, factor: float, name: str, **more: Any
) -> Iterator[Reading]:
    """As good as eager mode by `frobenius`, and each element near float64.

    Eager mode has its products from the same library, whose fault makes both wrong, and a norm hides one
    wrong element among many. An element may lie WORST roundings of its type off, or WORST_FP32 of float32,
    of what is usual where it is.
    """
    yield frobenius(out, ref, eager, factor=factor, name=name, **more)
    slack = max(WORST * unit_roundoff(out.dtype), WORST_FP32 * unit_roundoff(torch.float32))
    yield elementwise(out, ref, slack * _usual(ref.double()), name=f"{name} elementwise")


def _usual(ref: torch.Tensor) -> torch.Tensor:
    """The root mean square of a tensor (..., rows, columns); more where both row and column have more."""
    squares = ref.square()
    if ref.ndim < 2:
        return squares.mean().sqrt()
    both = squares.mean(-1, keepdim=True) * squares.mean(-2, keepdim=True)
    both = both / squares.mean((-1, -2), keepdim=True).clamp_min(TINY)
    return torch.maximum(both, squares.mean()).sqrt()


def _place(got: torch.Tensor, ref: torch.Tensor, ratio: torch.Tensor) -> str:
    where = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape))
    return (
        f"{int((ratio > 1).sum())} of {ratio.numel()} elements outside, worst at {where}:"
        f" got {float(got[where]):.6g}, expected {float(ref[where]):.6g}"
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as integers of its own width, in its own shape."""
    return tensor.contiguous().view(BITS[tensor.element_size()])


def exact(out: torch.Tensor, expected: torch.Tensor, *, name: str = "exact") -> Reading:
    """Bitwise equality (both zeros count as equal); the detail has the first coordinate and its XOR."""
    if out.shape != expected.shape:
        return Reading(name, math.inf, 0.0, f"shape {tuple(out.shape)}, expected {tuple(expected.shape)}")
    expected = expected.to(device=out.device, dtype=out.dtype)
    wrong = (bits(out) != bits(expected)) & ~(_zeros(out) & _zeros(expected))
    count = int(wrong.sum())
    return Reading(name, float(count), 0.0, _first_difference(out, expected, wrong) if count else "")


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.float() if tensor.element_size() == 1 else tensor) == 0


def _first_difference(out: torch.Tensor, expected: torch.Tensor, wrong: torch.Tensor) -> str:
    flat = int(wrong.flatten().to(torch.uint8).argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), wrong.shape))
    xor = int(bits(out).flatten()[flat]) ^ int(bits(expected).flatten()[flat])
    width = 8 * out.element_size()
    return (
        f"first at {where}: got {float(out[where]):.8g}, expected {float(expected[where]):.8g},"
        f" XOR 0x{xor & ((1 << width) - 1):0{width // 4}x}"
    )


def checksum(tensor: torch.Tensor) -> int:
    """64-bit weighted sum of the bit patterns: equal tensors agree, a swap or a flipped bit does not."""
    words = bits(tensor).flatten().to(torch.int64)
    weights = torch.arange(words.numel(), device=words.device, dtype=torch.int64) * 2 + 1
    return int((words * weights).sum())
