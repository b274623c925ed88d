"""NaN and Inf pass every kernel of the fused layer as they pass its reference; none makes them finite."""

import pytest
import torch

from fused import ops

pytest.importorskip("triton", reason="triton is not installed")
from fused import triton_ops as kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BAD = (float("nan"), float("inf"), float("-inf"))
ROWS, WIDTH, FFN = 6, 96, 100
DRAWS = range(8)


def drawn(*shape: int, bad: float, random: torch.Generator) -> torch.Tensor:
    """Normal bfloat16 numbers with `bad` at one drawn place."""
    x = torch.randn(*shape, generator=random)
    x.view(-1)[int(torch.randint(x.numel(), (), generator=random))] = bad
    return x.to(DEVICE, torch.bfloat16)


def same_kind(got: torch.Tensor | None, want: torch.Tensor | None) -> None:
    """Both have NaN at the same places, and are finite at the same places."""
    assert (got is None) == (want is None)
    if got is not None and want is not None:
        assert torch.equal(got.float().isnan(), want.float().isnan())
        assert torch.equal(got.float().isfinite(), want.float().isfinite())


@pytest.fixture(params=[(bad, draw) for bad in BAD for draw in DRAWS], ids=str)
def plant(request: pytest.FixtureRequest) -> tuple[float, torch.Generator]:
    bad, draw = request.param
    return bad, torch.Generator().manual_seed(draw)


def top() -> torch.Tensor:
    return torch.zeros((), device=DEVICE)


def test_the_largest_value_and_the_copies_in_8_bits(plant: tuple[float, torch.Generator]) -> None:
    bad, random = plant
    x = drawn(ROWS, WIDTH, bad=bad, random=random)
    largest = kernels.amax(x)
    same_kind(largest, ops.amax(x))
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        row, col, inverse = kernels.cast(x, largest, dtype, row=True, col=True)
        want_row, want_col, want_inverse = ops.cast(x, ops.amax(x), dtype, row=True, col=True)
        same_kind(inverse, want_inverse)
        for g, want in ((row, want_row), (col, want_col)):
            got, wanted = torch.as_tensor(g).float() * inverse, torch.as_tensor(want).float() * want_inverse
            assert torch.equal(got.isfinite(), wanted.isfinite())  # the interpreter's 8 bits have no NaN


@pytest.mark.parametrize("summed", [True, False])
def test_the_norm(plant: tuple[float, torch.Generator], summed: bool) -> None:
    bad, random = plant
    x, w = drawn(ROWS, WIDTH, bad=bad, random=random), torch.ones(WIDTH, device=DEVICE, dtype=torch.bfloat16)
    y, got_top, want_top = torch.zeros_like(x) if summed else None, top(), top()
    got, want = kernels.add_norm(x, y, w, 1e-5, got_top), ops.add_norm(x, y, w, 1e-5, want_top)
    for g, r in zip((*got, got_top), (*want, want_top), strict=True):
        same_kind(g, r)


@pytest.mark.parametrize("planted", ["input", "gradient"])
def test_swiglu_and_its_backward(plant: tuple[float, torch.Generator], planted: str) -> None:
    bad, random = plant
    gu = drawn(ROWS, 2 * FFN, bad=bad if planted == "input" else 0.5, random=random)
    da = drawn(ROWS, FFN, bad=bad if planted == "gradient" else 0.5, random=random)
    got_top, want_top = top(), top()
    same_kind(kernels.swiglu(gu, got_top), ops.swiglu(gu, want_top))
    same_kind(got_top, want_top)
    got_top, want_top = top(), top()
    got = kernels.swiglu_backward_(da, gu.clone(), got_top)
    want = ops.swiglu_backward_(da, gu.clone(), want_top)
    for g, r in zip((*got, got_top), (*want, want_top), strict=True):
        same_kind(g, r)
