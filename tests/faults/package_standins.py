"""Stand-ins for the packages whose layers `package_layers` runs, with their interfaces. Nothing runs here.

In: what the check asks a package for. Out: right results, made by PyTorch on a CPU.
"""

# ruff: noqa: E501 - a table of faults reads in rows

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

from workloads import arch, package_layers
from workloads.package_layers import DTYPE, formats, in_8_bits, in_int8

Round = Callable[[torch.Tensor], torch.Tensor]
# The 16 values of NF4 (arXiv 2305.14314, appendix E), to four digits.
NF4 = torch.tensor([-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0,
                    0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1])  # fmt: skip


class _Product(torch.autograd.Function):
    """A linear layer whose operands and gradient are rounded."""

    @staticmethod
    def forward(context: Any, x: Any, weight: Any, rounds: tuple[Round, Round, Round]) -> torch.Tensor:
        of_x, of_weight, context.of_gradient = rounds
        context.save_for_backward(of_x(x), of_weight(weight))
        return (of_x(x) @ of_weight(weight).t()).to(x.dtype)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (x, weight), g = context.saved_tensors, context.of_gradient(gradient)
        return (g @ weight).to(gradient.dtype), (g.t() @ x).to(gradient.dtype), None


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float()


def _in_fp8() -> tuple[Round, Round, Round]:
    small, wide = formats()
    return (lambda x: in_8_bits(x, small)), (lambda x: in_8_bits(x, small)), (lambda x: in_8_bits(x, wide))


class Float8Linear(nn.Linear):
    """torchao's layer for training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Product.apply(x, self.weight, _in_fp8())


class Int8Linear(nn.Module):
    """A layer with int8 weights."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = SimpleNamespace(data=in_int8(weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Product.apply(x, self.weight.data, (_plain, _plain, _plain))


def _convert(model: nn.Sequential, config: Any) -> nn.Sequential:
    assert config is not None
    weight = model[0].weight
    model[0] = Float8Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    model[0].weight = weight
    return model


def _quantize(model: nn.Sequential, config: Any) -> None:
    assert config is not None
    model[0] = Int8Linear(model[0].weight.detach())


class Linear8bitLt(nn.Linear):
    """bitsandbytes' layer with int8 operands."""

    def __init__(self, inner: int, outer: int, *, bias: bool, has_fp16_weights: bool) -> None:
        assert not has_fp16_weights
        super().__init__(inner, outer, bias=bias)
        self.weight.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        class Rounded(_Product):
            """The backward takes the rounded weight and the gradient as it is."""

        return Rounded.apply(x, self.weight, (in_int8, in_int8, _plain))


def dequantize_4bit(data: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The values of the codes, times the largest of each block."""
    return (NF4[data.long()] * state).reshape(package_layers.OUTER, package_layers.INNER)


class Linear4bit(nn.Linear):
    """bitsandbytes' layer with NF4 weights."""

    def __init__(self, inner: int, outer: int, *, bias: bool, **options: Any) -> None:
        assert options["quant_type"] == "nf4"
        super().__init__(inner, outer, bias=bias)

    def to(self, *_: Any) -> "Linear4bit":
        blocks = self.weight.detach().view(-1, package_layers.NF4_BLOCK)
        state = blocks.abs().amax(-1, keepdim=True)
        codes = ((blocks / state)[..., None] - NF4).abs().argmin(-1)
        del self.weight
        self.weight = SimpleNamespace(data=codes, quant_state=state)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = NF4[self.weight.data] * self.weight.quant_state
        return _Product.apply(x, weight.reshape(package_layers.OUTER, -1), (_plain, _plain, _plain))


class LigerRMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LigerLayerNorm(nn.Module):
    def __init__(self, size: int, eps: float, *, bias: bool) -> None:
        super().__init__()
        assert bias
        self.weight, self.bias, self.eps = (
            nn.Parameter(torch.ones(size)),
            nn.Parameter(torch.zeros(size)),
            eps,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = (one.float() for one in (self.weight, self.bias))
        return functional.layer_norm(x.float(), self.weight.shape, *wide, self.eps).to(x.dtype)


class LigerSwiGLUMLP(nn.Module):
    def __init__(self, shape: Any) -> None:
        super().__init__()
        inner, hidden = shape.hidden_size, shape.intermediate_size
        self.gate_proj, self.up_proj = (nn.Linear(inner, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, inner, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class LigerCrossEntropyLoss(nn.Module):
    def __init__(self, ignore_index: int) -> None:
        super().__init__()
        self.ignored = ignore_index

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(x.float(), target, ignore_index=self.ignored)


FP8 = {"on": False}


@contextlib.contextmanager
def fp8_autocast(*, enabled: bool, fp8_recipe: object) -> Iterator[None]:
    """Layers of Transformer Engine work in 8 bits."""
    assert fp8_recipe is not None
    FP8["on"] = enabled
    try:
        yield
    finally:
        FP8["on"] = False


class TeLinear(nn.Linear):
    def __init__(self, inner: int, outer: int, *, bias: bool, params_dtype: Any, device: str) -> None:
        assert device == "cuda"
        super().__init__(inner, outer, bias=bias, dtype=params_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if FP8["on"]:
            return _Product.apply(x, self.weight, _in_fp8())
        return super().forward(x)


class LayerNormMLP(nn.Module):
    def __init__(self, inner: int, hidden: int, *, eps: float, **options: Any) -> None:
        super().__init__()
        assert options["activation"] == "gelu"
        shapes = {"layer_norm_weight": (inner,), "layer_norm_bias": (inner,), "fc1_weight": (hidden, inner),
                  "fc1_bias": (hidden,), "fc2_weight": (inner, hidden), "fc2_bias": (inner,)}  # fmt: skip
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape, dtype=DTYPE)))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = functional.layer_norm(
            x, x.shape[-1:], self.layer_norm_weight, self.layer_norm_bias, self.eps
        )
        hidden = functional.gelu(
            functional.linear(normed, self.fc1_weight, self.fc1_bias), approximate="tanh"
        )
        return functional.linear(hidden, self.fc2_weight, self.fc2_bias)


class DotProductAttention(nn.Module):
    def __init__(self, *_heads_and_size: int, **options: Any) -> None:
        super().__init__()
        self.packed = options["qkv_format"] == "thd"

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        rows = [one[None] if self.packed else one for one in (q, k, v)]
        seen = torch.ones(rows[0].shape[1], rows[1].shape[1], dtype=torch.bool)
        if self.packed:
            ends = options["cu_seqlens_q"]
            owner = torch.repeat_interleave(torch.arange(len(ends) - 1), ends.diff())
            seen = owner[:, None] == owner
        turned = (one.transpose(1, 2) for one in rows)
        out = functional.scaled_dot_product_attention(
            *turned, attn_mask=seen.tril(), enable_gqa=True
        ).transpose(1, 2)
        return (out[0] if self.packed else out).flatten(-2)


def _module(name: str, **content: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(content)
    return module


RECIPE = _module("transformer_engine.common.recipe", Float8CurrentScaling=object)
BITSANDBYTES = _module(
    "bitsandbytes",
    nn=SimpleNamespace(Linear8bitLt=Linear8bitLt, Linear4bit=Linear4bit),
    functional=SimpleNamespace(dequantize_4bit=dequantize_4bit),
)
MODULES = {
    "bitsandbytes": BITSANDBYTES,
    "liger_kernel": _module("liger_kernel"),
    "liger_kernel.transformers": _module(
        "liger_kernel.transformers",
        LigerRMSNorm=LigerRMSNorm,
        LigerLayerNorm=LigerLayerNorm,
        LigerSwiGLUMLP=LigerSwiGLUMLP,
        LigerCrossEntropyLoss=LigerCrossEntropyLoss,
    ),
    "torchao": _module("torchao"),
    "torchao.float8": _module("torchao.float8", Float8LinearConfig=SimpleNamespace, convert_to_float8_training=_convert),
    "torchao.quantization": _module("torchao.quantization", Int8WeightOnlyConfig=SimpleNamespace, quantize_=_quantize),
    "transformer_engine": _module("transformer_engine"),
    "transformer_engine.common": _module("transformer_engine.common", recipe=RECIPE),
    "transformer_engine.common.recipe": RECIPE,
    "transformer_engine.pytorch": _module(
        "transformer_engine.pytorch",
        Linear=TeLinear,
        LayerNormMLP=LayerNormMLP,
        DotProductAttention=DotProductAttention,
        fp8_autocast=fp8_autocast,
    ),
}  # fmt: skip
vars(MODULES["transformer_engine"])["pytorch"] = MODULES["transformer_engine.pytorch"]


def layers(package: str) -> dict[str, Any]:
    """As test_package_layers judges them on an architecture with 8-bit matrix units."""
    fp8 = mock.patch.object(arch, "fp8", return_value=torch.float8_e4m3fn)
    with mock.patch.dict(sys.modules, MODULES), fp8:
        return package_layers.check(package)
