"""FP8 products of both kinds of hardware are near float32; what a wrapper of FP8 weights holds."""

from typing import Any

import pytest
import torch
from agree import rounded

from errors import RefusedError
from fused import ops, products
from layouts import fp8_weights


class Wrapper(torch.Tensor):
    """A wrapper whose attributes have other names than torchao's."""

    parts: tuple[str, ...] = ("weight", "scale")

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> "Wrapper":  # noqa: PYI034 - Self is of Python 3.11
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    def __init__(self, values: torch.Tensor) -> None:
        self.weight, self.scale = values, torch.ones(())

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return list(self.parts), None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} is not needed to look inside")

    def fsdp_pre_all_gather(self, mesh: Any) -> None:
        """What fp8_weights knows such a weight by."""


def test_a_weight_is_taken_out_of_its_wrapper_whatever_the_attribute_is_called():
    values = torch.randn(4, 3)
    assert fp8_weights.plain(Wrapper(values)) is values


def test_torchaos_own_weight_shares_its_memory_with_what_is_taken_out():
    float8 = pytest.importorskip("torchao.float8")
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    layer = float8.convert_to_float8_training(torch.nn.Sequential(torch.nn.Linear(16, 16)), config=config)[0]
    inner = fp8_weights.plain(layer.weight.detach())
    assert not fp8_weights.casts_itself(inner)
    with torch.no_grad():
        layer.weight.fill_(3.0)
    assert inner.unique().tolist() == [3.0]


@pytest.mark.parametrize("parts", [("scale",), ("weight", "weight")], ids=["none", "two"])
def test_a_wrapper_of_another_form_is_refused_with_the_known_versions(parts):
    wrapped = Wrapper(torch.randn(4, 3))
    wrapped.parts = parts
    with pytest.raises(RefusedError, match=r"Wrapper.*torchao .*0\.16 to 0\.18"):
        fp8_weights.plain(wrapped)


class Weight:
    """What Fp8Products reads of a joined weight."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value, self.gradient, self.key = value, torch.zeros_like(value), 0
        self.unit = type("Unit", (), {"cache": {}, "fresh": True})()


@pytest.mark.parametrize("fnuz", [False, True], ids=["ocp", "fnuz"])
def test_fp8_products_and_gradients_are_near_the_exact_ones(fnuz):
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
def test_a_cast_uses_the_whole_range_and_never_overflows(dtype):
    x = torch.linspace(-3, 3, 101)[None]
    row, _, scale = ops.cast(x, x.abs().amax(), dtype, row=True, col=False)
    assert row.float().abs().max() == torch.finfo(dtype).max
    rounded(row.float() * scale, x, dtype)
