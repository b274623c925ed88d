"""RMSNorm and LayerNorm, forward and backward, against float64.

In: the norm's name, a dtype and a tier. Out: the report of `cases.run`.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from workloads import cases, device, operands
from workloads.gates import Reading, elementwise, exact, frobenius, unit_roundoff
from workloads.reference import float64

EPS = 1e-5
HIDDEN = (1, 41, 1023, 4096)
MORE_HIDDEN = (123, 1500, 8192, 16384, 32768)
SCALES = (1e-3, 1.0, 1e3)
FORWARD, BACKWARD = 2.0, 3.0
# Roundings of an element on its way (normalised value, weight, output), in units of the output.
STEPS = 3.0
FLOAT32 = 2.0**-24
DEVIATIONS = 4.0  # errors of rows are independent: four times the root sum of their squares
# PyTorch's CPU kernel of LayerNorm sums dw in the dtype itself, in as many parts as there are threads.
WIDENED = {("layer_norm", "cpu", "dw"): 3.0}


def check(norm: str, dtype: str, tier: str) -> dict[str, Any]:
    """Every hidden size and input scale, and rows for which careless formulas fail."""
    return cases.run(_cases(norm, dtype, HIDDEN if tier == "smoke" else HIDDEN + MORE_HIDDEN))


def _cases(norm: str, dtype: str, hidden: Iterable[int]) -> Iterator[cases.Case]:
    kind = operands.DTYPES[dtype]
    for index, size in enumerate(hidden):
        if norm == "layer_norm" and size == 1:
            continue  # a single value equals its mean: only rounding would be compared
        scale = SCALES[index % 3]
        x = operands.normal(37, size, dtype=kind, seed=size, scale=scale)
        yield f"{size} wide, scale {scale:g}", functools.partial(_against_float64, norm, x)
    special = operands.normal(8, 515, dtype=kind, seed=3)
    special[1], special[2], special[3, 77] = 0.0, 2.5, 3e4
    yield "zero row, constant row, one huge element", functools.partial(_against_float64, norm, special)
    yield "powers of two are exact", functools.partial(_exact, norm, kind)
    yield "NaN stays in its row", functools.partial(_nan_row, norm, kind)


def apply(norm: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The function under test, as a model calls it."""
    if norm == "rms_norm":
        return F.rms_norm(x, (x.shape[-1],), weight, eps=EPS)
    return F.layer_norm(x, (x.shape[-1],), weight, None, eps=EPS)


def plain(norm: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The formula in plain operations; in float64 it is the reference."""
    if norm == "layer_norm":
        x = x - x.mean(-1, keepdim=True)
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def eager(norm: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The yardstick, as in Llama's own code: normalise in float32, round, multiply by the weight."""
    return plain(norm, x.float(), torch.ones_like(weight, dtype=torch.float32)).to(x.dtype) * weight


def _against_float64(norm: str, x: torch.Tensor) -> Iterable[Reading]:
    weight = 1 + operands.normal(x.shape[-1], dtype=x.dtype, seed=11, scale=0.2)
    g = operands.normal(*x.shape, dtype=x.dtype, seed=12)
    wide, wide_weight, wide_g = float64(x, weight, g)
    got = operands.with_gradients(functools.partial(apply, norm), {"dx": x, "dw": weight}, g)
    ref = operands.with_gradients(functools.partial(plain, norm), {"dx": wide, "dw": wide_weight}, wide_g)
    yardstick = operands.with_gradients(functools.partial(eager, norm), {"dx": x, "dw": weight}, g)
    for index, name in enumerate(("out", "dx", "dw")):
        widened = WIDENED.get((norm, device().type, name), 1.0)
        factor = widened * (BACKWARD if index else FORWARD)
        allowance = widened * _slack(norm, x, weight, g)[index]
        terms = len(x) if name == "dw" else 0  # dw sums over the rows, in any order
        yield frobenius(
            got[index], ref[index], yardstick[index], factor=factor, terms=terms, name=f"{name} frobenius"
        )
        yield elementwise(got[index], ref[index], allowance, name=f"{name} elementwise")


def _slack(
    norm: str, x: torch.Tensor, weight: torch.Tensor, g: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The error that rounding may cause in each result: (out, dx, dw)."""
    unit, (value, w, dy) = STEPS * unit_roundoff(x.dtype), float64(x, weight, g)
    mean = value.mean(-1, keepdim=True) if norm == "layer_norm" else torch.zeros_like(value[:, :1])
    rstd = ((value - mean).square().mean(-1, keepdim=True) + EPS).rsqrt()
    # The mean has an error of float32, which the difference x - mean makes large relative to the result.
    cancelled = FLOAT32 * value.abs().amax(-1, keepdim=True) * rstd * x.shape[-1] ** 0.5
    hat, wide = (value - mean) * rstd, unit + FLOAT32 * x.shape[-1] ** 0.5
    terms = (dy * w).abs() + (hat * dy * w).abs().mean(-1, keepdim=True) * hat.abs()
    out = (wide * hat.abs() + cancelled) * w.abs()
    spread = ((wide * hat.abs() + cancelled) * dy).square().sum(0).sqrt()
    centre = (dy * w).abs().mean(-1, keepdim=True) if norm == "layer_norm" else 0.0
    return out, rstd * (wide + cancelled) * (terms + centre), DEVIATIONS * spread


def _exact(norm: str, dtype: torch.dtype) -> Iterable[Reading]:
    """The norm of rows of +-2^k is a power of two.
    So the result is exactly the sign times an integer weight.
    """
    signs = torch.ones(9, 512, dtype=dtype, device=device())
    signs[:, ::2] = -1
    powers = torch.tensor([2.0**k for k in range(9)], device=device()).to(dtype)[:, None] * 64
    weight = operands.counting(512, dtype=dtype, modulus=9)
    if dtype == torch.float32:  # rsqrt is good to a unit or two of float32: only narrower outputs hide it
        yield elementwise(
            apply(norm, signs * powers, weight), signs.double().cpu() * weight.double().cpu(), 1e-6
        )
    else:
        yield exact(apply(norm, signs * powers, weight), signs * weight)


def _nan_row(norm: str, dtype: torch.dtype) -> Iterable[Reading]:
    x, weight = operands.normal(6, 257, dtype=dtype, seed=4), torch.ones(257, dtype=dtype, device=device())
    x[2, 100] = float("nan")
    rows = apply(norm, x, weight).isnan().sum(-1).tolist()
    yield Reading("NaN elsewhere", sum(count for row, count in enumerate(rows) if row != 2), 0.0)
    yield Reading("not NaN in its row", 257 - rows[2], 0.0)
