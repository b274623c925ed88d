"""FP8 products of both kinds of hardware approximate the float32 product, and their gradients too."""

import pytest
import torch
from agree import rounded

from fused import ops, products


class Weight:
    """What Fp8Products reads of a joined weight."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value, self.gradient, self.key = value, torch.zeros_like(value), 0
        self.unit = type("Unit", (), {"cache": {}, "fresh": True})()


@pytest.mark.parametrize("fnuz", [False, True], ids=["ocp", "fnuz"])
def test_fp8_products_and_gradients_are_near_the_exact_ones(fnuz: bool) -> None:
    torch.manual_seed(3)
    x, dy = (torch.randn(64, 48, dtype=torch.bfloat16), torch.randn(64, 32, dtype=torch.bfloat16))
    weight = Weight(torch.randn(32, 48, dtype=torch.bfloat16))
    fp8 = products.Fp8Products(fnuz=fnuz)
    y = fp8.forward(x, weight)
    dx, add = fp8.backward(dy, weight)
    add(x)
    exact = weight.value.float()
    values, gradients = products.FNUZ if fnuz else products.OCP
    rounded(y, x.float() @ exact.t(), values, values)
    rounded(dx, dy.float() @ exact, gradients, values)
    rounded(weight.gradient, dy.float().t() @ x.float(), gradients, values)


@pytest.mark.parametrize("dtype", [*products.OCP, *products.FNUZ], ids=lambda dtype: str(dtype)[6:])
def test_a_cast_uses_the_whole_range_and_never_overflows(dtype: torch.dtype) -> None:
    x = torch.linspace(-3, 3, 101)[None]
    row, _, scale = ops.cast(x, x.abs().amax(), dtype, row=True, col=False)
    assert row.float().abs().max() == torch.finfo(dtype).max
    rounded(row.float() * scale, x, dtype)
