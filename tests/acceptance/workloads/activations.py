"""Gated activations and rotary embedding, forward and backward, against float64.

In: a dtype. Out: the report of `cases.run`.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from workloads import cases, device, operands
from workloads.gates import Reading, elementwise, frobenius, unit_roundoff
from workloads.reference import float64

TAILS = (43, 431, 11_008)
POSITIONS = (0, 2**17, 2**20)
STEPS = 3.0  # an activation, a product and the output are each rounded
FLOAT32 = 2.0**-21  # exponentials and error functions of float32 are good to a few units
# oneDNN's error function is Abramowitz and Stegun's 7.1.26, good to 1.5e-7. Half of it is in a slope, and as
# much for the roundings of the polynomial.
ERF = 1.5e-7


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The gated activation of Llama's MLP."""
    return F.silu(gate) * up


def gelu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The exact GELU, as in MPT's MLP."""
    return F.gelu(gate) * up


def gelu_tanh(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """GPT-2's approximation of GELU."""
    return F.gelu(gate, approximate="tanh") * up


def check(dtype: str) -> dict[str, Any]:
    """Each activation at odd widths and extreme inputs, and rotary embedding at far positions."""
    return cases.run(_cases(operands.DTYPES[dtype]))


def _cases(dtype: torch.dtype) -> Iterator[cases.Case]:
    for function in (swiglu, gelu, gelu_tanh):
        for width in TAILS:
            x = operands.normal(5, width, dtype=dtype, seed=width, scale=3.0)
            yield f"{function.__name__} {width} wide", functools.partial(_gated, function, x)
        line = torch.linspace(-100, 100, 997, device=device()).to(dtype)[None]
        yield f"{function.__name__} from -100 to 100", functools.partial(_gated, function, line)
        tiny = torch.full((1, 64), torch.finfo(dtype).smallest_normal * 4, dtype=dtype, device=device())
        yield f"{function.__name__} near denormals", functools.partial(_gated, function, tiny)
        yield f"{function.__name__} of NaN", functools.partial(_nonfinite, function, dtype)
    for position in POSITIONS:
        yield f"rope at position {position}", functools.partial(_rotation, position, dtype)


def _gated(function: Callable[..., torch.Tensor], x: torch.Tensor) -> Iterable[Reading]:
    up, g = (operands.normal(*x.shape, dtype=x.dtype, seed=seed) for seed in (1, 2))
    got = operands.with_gradients(function, {"dgate": x, "dup": up}, g)
    wide, wide_up, wide_g = float64(x, up, g)
    ref = operands.with_gradients(function, {"dgate": wide, "dup": wide_up}, wide_g)
    eager = operands.with_gradients(
        lambda gate, other: function(gate.float(), other.float()).to(gate.dtype), {"dgate": x, "dup": up}, g
    )
    for index, name in enumerate(("out", "dgate", "dup")):
        yield frobenius(got[index], ref[index], eager[index], factor=3.0, name=f"{name} frobenius")
        yield elementwise(got[index], ref[index], _slack(x, up, g)[index], name=f"{name} elementwise")


def _nonfinite(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> Iterable[Reading]:
    """NaN and infinity stay in place.
    PyTorch's exact GELU turns infinity into NaN on a CPU, so it gets none.
    """
    x = operands.normal(1, 130, dtype=dtype, seed=3)
    x[0, 7] = float("nan")
    if function is not gelu:
        x[0, 129] = float("inf")
    out = function(x, torch.ones_like(x))[0]
    yield Reading("NaN lost", float(not out[7].isnan()), 0.0)
    yield Reading("NaN elsewhere", float(out.isnan().sum() - 1), 0.0)
    yield Reading("infinity lost", float(out.isposinf().sum() != x.isposinf().sum()), 0.0)


def _slack(x: torch.Tensor, up: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The allowed error: each of the three activations is at most |x| + 1, and its slope at most 1.2."""
    unit, (value, other, dy) = STEPS * unit_roundoff(x.dtype), float64(x, up, g)
    act = F.silu(value).abs() + F.gelu(value).abs()
    # For very negative x the activation is a small difference of large parts: its error is relative to |x|.
    small = FLOAT32 * value.abs()
    out = (unit * act + small) * other.abs()
    slope = (unit * 1.2 + ERF + small) * (other * dy).abs()
    return out, slope, (unit * act + small) * dy.abs()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The half-split rotation: the first and second halves of the head are the two coordinates."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _rotation(start: int, dtype: torch.dtype) -> Iterable[Reading]:
    """Tables in float32 and one rounding; a bf16 table would be wrong by whole turns at long context."""
    x = operands.normal(2, 33, 4, 96, dtype=dtype, seed=3)
    angle = _angles(start, torch.float64, "cpu")
    (wide,) = float64(x)
    ref = rotate(wide, angle.cos().to(wide.device), angle.sin().to(wide.device))
    table = _angles(start, torch.float32, device())
    got = rotate(x.float(), table.cos(), table.sin()).to(dtype)
    # float32 positions times frequencies are good to 2^-24 of the angle: up to 2^20 radians.
    allowance = 2.0**-23 * (start + 33) * x.abs().double().amax().cpu() + FLOAT32
    yield elementwise(got, ref, float(allowance))


def _angles(start: int, dtype: torch.dtype, on: Any) -> torch.Tensor:
    position = torch.arange(start, start + 33, dtype=dtype, device=on)
    frequency = 500_000.0 ** -(torch.arange(0, 96, 2, dtype=dtype, device=on) / 96)
    return (position[:, None] * frequency)[None, :, None, :]
