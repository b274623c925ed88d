"""Layers of packages that an image may have, forward and backward, against float64.

In: a package. Out: the report of `cases.run`; `lacks` says why this stack does not have it. A layer in 16
bits is judged by the same layer of PyTorch, a layer in fewer bits by the error of its format: the yardstick
rounds the operands in plain operations.
"""

import functools
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from workloads import arch, attention, attention_masks, attention_packed, cases, device, norms, operands
from workloads.gates import Reading, elementwise, frobenius, relative_error

# Package -> the module that is imported, and whether it needs a GPU.
PACKAGES = {
    "bitsandbytes": ("bitsandbytes", False),
    "liger-kernel": ("liger_kernel", True),
    "torchao": ("torchao", False),
    "transformer-engine-torch": ("transformer_engine", True),
}
ROWS, INNER, OUTER, HIDDEN = 96, 128, 256, 192
FACTOR = 3.0
QUANTISED = 1.5  # of the yardstick's error, whose roundings are the same but for ties and scales
NF4_BLOCK, NF4_STEP = 64, 0.152  # half of the widest gap between the 16 values, of a block's largest
DTYPE = torch.bfloat16
Plain = Callable[..., torch.Tensor]
Results = dict[str, torch.Tensor]


def lacks(package: str) -> dict[str, str] | None:
    """Why this package cannot run here; None if it must work."""
    module, needs_gpu = PACKAGES[package]
    if not importlib.util.find_spec(module):
        return {"package": package, "reason": f"the package {package} is not part of this stack"}
    if needs_gpu and device().type != "cuda":
        return {"feature": "gpu", "reason": f"the kernels of {package} need a GPU"}
    return None


def check(package: str) -> dict[str, Any]:
    """Every layer of the package."""
    return cases.run(_layers(package))


def results(call: Plain, x: torch.Tensor, weights: Iterable[torch.Tensor], g: torch.Tensor) -> Results:
    """Output and gradients of a call that takes the input; the weights are leaves that it uses."""
    leaf, weights = x.detach().clone().requires_grad_(), list(weights)
    out = call(leaf)
    grads = torch.autograd.grad(out, (leaf, *weights), g.to(out.dtype).clone())
    names = ("dx", *(f"d weight {number}" for number in range(len(weights))))
    return {"out": out.detach(), **dict(zip(names, grads, strict=True))}


def _plainly(plain: Plain, x: torch.Tensor, weights: Iterable[torch.Tensor], g: torch.Tensor) -> Results:
    leaves = [weight.detach().clone().requires_grad_() for weight in weights]
    return results(lambda leaf: plain(leaf, *leaves), x, leaves, g)


def _gradient_of(shape: tuple[int, ...]) -> torch.Tensor:
    return operands.normal(*shape, dtype=DTYPE, seed=7)


def _layer(layer: Plain, weights: list[torch.Tensor], plain: Plain, x: torch.Tensor) -> Iterable[Reading]:
    """A layer in 16 bits beside the same formula in PyTorch, which is the yardstick, and in float64."""
    with torch.no_grad():
        g = _gradient_of(tuple(layer(x.clone()).shape))
    got = results(layer, x, weights, g)
    eager = _plainly(plain, x, weights, g)
    ref = _plainly(plain, x.double(), [weight.double() for weight in weights], g.double())
    for name, expected in ref.items():
        if not expected.ndim:  # a single number: a package may add it up in 16 bits
            yield elementwise(got[name][None], expected[None], 2.0**-7 * expected.abs(), name=name)
            continue
        yield frobenius(got[name], expected, eager[name], factor=FACTOR, terms=len(x), name=name)


def _input(width: int = INNER) -> torch.Tensor:
    return operands.normal(ROWS, width, dtype=DTYPE, seed=1)


def _weight(rows: int, columns: int, seed: int) -> torch.Tensor:
    return operands.normal(rows, columns, dtype=DTYPE, seed=seed, scale=columns**-0.5)


def _linear(inner: int, outer: int, seed: int) -> nn.Linear:
    layer = nn.Linear(inner, outer, bias=False, device=device(), dtype=DTYPE)
    layer.weight.data = _weight(outer, inner, seed)
    return layer


# ---- Layers in fewer than 16 bits ------------------------------------------------------------------------


def in_8_bits(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded to a float of 8 bits with one scale for the tensor, and back."""
    scale = torch.finfo(dtype).max / tensor.float().abs().amax()
    return (tensor.float() * scale).to(dtype).float() / scale


def in_int8(tensor: torch.Tensor) -> torch.Tensor:
    """Rounded to whole numbers up to 127 with one scale for each row, and back."""
    scale = 127 / tensor.float().abs().amax(-1, keepdim=True)
    return (tensor.float() * scale).round() / scale


def formats() -> tuple[torch.dtype, torch.dtype]:
    """The formats of operands and of gradients on this architecture."""
    if arch.fp8() == torch.float8_e4m3fnuz:
        return torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
    return torch.float8_e4m3fn, torch.float8_e5m2


def _in_fp8(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> Results:
    """A linear layer whose three products have operands of 8 bits."""
    small, wide = formats()
    a, b, c = in_8_bits(x, small), in_8_bits(w, small), in_8_bits(g, wide)
    return {"out": (a @ b.t()).to(DTYPE), "dx": (c @ b).to(DTYPE), "d weight 0": (c.t() @ a).to(DTYPE)}


def _judged(
    got: Results, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, near: Results
) -> Iterable[Reading]:
    ref = _plainly(F.linear, x.double(), [w.double()], g.double())
    for name, value in got.items():
        yield frobenius(value, ref[name], near[name], factor=QUANTISED, name=name)
        exact = relative_error(value, ref[name]) < relative_error(near[name], ref[name]) / FACTOR
        yield Reading(f"{name} not rounded to its format", float(exact), 0.0)


def _float8_linear() -> Iterable[Reading]:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    layer, x, g = nn.Sequential(_linear(INNER, OUTER, 2)), _input(), _gradient_of((ROWS, OUTER))
    layer = convert_to_float8_training(layer, config=Float8LinearConfig(emulate=arch.fp8() is None))
    weight = layer[0].weight
    got = results(layer, x, [weight], g)
    yield from _judged(got, x, weight.detach(), g, _in_fp8(x, weight.detach(), g))


def _int8_weights() -> Iterable[Reading]:
    """Weights of 8 bits with a scale for each row; the input has a gradient, the weights have none."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer, x, g = nn.Sequential(_linear(INNER, OUTER, 2)), _input(), _gradient_of((ROWS, OUTER))
    weight = layer[0].weight.detach().clone()
    quantize_(layer, Int8WeightOnlyConfig())
    rounded = in_int8(weight)
    near = {"out": (x.float() @ rounded.t()).to(DTYPE), "dx": (g.float() @ rounded).to(DTYPE)}
    yield from _judged(results(layer, x, (), g), x, weight, g, near)


def _linear_8bit() -> Iterable[Reading]:
    import bitsandbytes

    x, g, weight = _input(), _gradient_of((ROWS, OUTER)), _weight(OUTER, INNER, 2)
    layer = bitsandbytes.nn.Linear8bitLt(INNER, OUTER, bias=False, has_fp16_weights=False)
    layer.load_state_dict({"weight": weight.half()}, strict=False)
    layer = layer.to(device())
    got = results(layer, x.half(), (), g.half())
    rows = in_int8(weight)
    near = {"out": (in_int8(x) @ rows.t()).half(), "dx": (g.float() @ rows).half()}
    yield from _judged(got, x, weight, g, near)


def _linear_4bit() -> Iterable[Reading]:
    import bitsandbytes

    x, g, weight = _input(), _gradient_of((ROWS, OUTER)), _weight(OUTER, INNER, 2)
    layer = bitsandbytes.nn.Linear4bit(
        INNER, OUTER, bias=False, compute_dtype=DTYPE, compress_statistics=False, quant_type="nf4"
    )
    layer.load_state_dict({"weight": weight}, strict=False)
    layer = layer.to(device())
    rounded = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
    largest = weight.float().view(-1, NF4_BLOCK).abs().amax(-1, keepdim=True).expand(-1, NF4_BLOCK)
    steps = NF4_STEP * largest.reshape(weight.shape).double()
    # PyTorch rounds the value to 16 bits once more, which `elementwise` allows.
    yield elementwise(rounded.to(DTYPE), weight.double().to(rounded.device), steps, name="weights in 4 bits")
    wide = rounded.double()
    for name, value in results(layer, x, (), g).items():
        ref = x.double() @ wide.t() if name == "out" else g.double() @ wide
        yield frobenius(value, ref, ref.to(DTYPE), factor=FACTOR, terms=OUTER, name=name)


# ---- Layers in 16 bits -----------------------------------------------------------------------------------


def _liger_rms_norm() -> Iterable[Reading]:
    from liger_kernel.transformers import LigerRMSNorm

    layer = LigerRMSNorm(INNER, eps=norms.EPS).to(device=device(), dtype=DTYPE)
    layer.weight.data = 1 + operands.normal(INNER, dtype=DTYPE, seed=3, scale=0.2)
    yield from _layer(layer, [layer.weight], functools.partial(norms.plain, "rms_norm"), _input())


def _liger_layer_norm() -> Iterable[Reading]:
    from liger_kernel.transformers import LigerLayerNorm

    layer = LigerLayerNorm(INNER, eps=norms.EPS, bias=True).to(device=device(), dtype=DTYPE)
    layer.weight.data = 1 + operands.normal(INNER, dtype=DTYPE, seed=3, scale=0.2)

    def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (INNER,), weight, bias, eps=norms.EPS)

    yield from _layer(layer, [layer.weight, layer.bias], plain, _input())


class _Shape:
    """What Liger's MLP reads of a model's configuration."""

    hidden_size, intermediate_size, hidden_act = INNER, HIDDEN, "silu"


def _swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def _liger_swiglu() -> Iterable[Reading]:
    from liger_kernel.transformers import LigerSwiGLUMLP

    layer = LigerSwiGLUMLP(_Shape()).to(device=device(), dtype=DTYPE)
    weights = [layer.gate_proj.weight, layer.up_proj.weight, layer.down_proj.weight]
    for seed, weight in enumerate(weights):
        weight.data = _weight(weight.shape[0], weight.shape[1], seed)
    yield from _layer(layer, weights, _swiglu, _input()[:, None])


def _liger_cross_entropy() -> Iterable[Reading]:
    from liger_kernel.transformers import LigerCrossEntropyLoss

    target = torch.randint(515, (ROWS,), generator=operands.generator(4), device=device())
    target[::5] = -100
    loss = LigerCrossEntropyLoss(ignore_index=-100)

    def call(x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = loss(x, target)
        return value

    def plain(x: torch.Tensor) -> torch.Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        return F.cross_entropy(wide, target, ignore_index=-100)

    yield from _layer(call, [], plain, operands.normal(ROWS, 515, dtype=DTYPE, seed=5, scale=4.0))


def _te_linear() -> Iterable[Reading]:
    import transformer_engine.pytorch as te

    layer = te.Linear(INNER, OUTER, bias=True, params_dtype=DTYPE, device="cuda")
    layer.weight.data = _weight(OUTER, INNER, 2)
    layer.bias.data = operands.normal(OUTER, dtype=DTYPE, seed=3)
    yield from _layer(layer, [layer.weight, layer.bias], F.linear, _input())


def _te_mlp() -> Iterable[Reading]:
    import transformer_engine.pytorch as te

    layer = te.LayerNormMLP(
        INNER, HIDDEN, eps=norms.EPS, activation="gelu", params_dtype=DTYPE, device="cuda"
    )
    names = ("layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
    weights = [getattr(layer, name) for name in names]
    for seed, weight in enumerate(weights):
        if weight.ndim > 1:
            weight.data = _weight(weight.shape[0], weight.shape[1], seed)
        else:
            weight.data = operands.normal(weight.shape[0], dtype=DTYPE, seed=seed)

    def plain(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        first, first_bias, second, second_bias = rest
        hidden = F.linear(F.layer_norm(x, (INNER,), scale, shift, eps=norms.EPS), first, first_bias)
        return F.linear(F.gelu(hidden, approximate="tanh"), second, second_bias)

    yield from _layer(layer, weights, plain, _input())


def _te_fp8() -> Iterable[Reading]:
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    layer = te.Linear(INNER, OUTER, bias=False, params_dtype=DTYPE, device="cuda")
    layer.weight.data = _weight(OUTER, INNER, 2)
    x, g = _input(), _gradient_of((ROWS, OUTER))

    scaling = recipe.Float8CurrentScaling()

    def call(value: torch.Tensor) -> torch.Tensor:
        # Its context for FP8 has this name now, and had the other one before.
        inside = te.autocast if hasattr(te, "autocast") else te.fp8_autocast
        named = {"recipe": scaling} if hasattr(te, "autocast") else {"fp8_recipe": scaling}
        with inside(enabled=True, **named):
            out: torch.Tensor = layer(value)
        return out

    weight = layer.weight.detach()
    yield from _judged(results(call, x, [layer.weight], g), x, weight, g, _in_fp8(x, weight, g))


def _te_attention() -> Iterable[Reading]:
    import transformer_engine.pytorch as te

    shape = attention.Shape(b=2, hq=8, hkv=2, sq=129, sk=129, d=64, causal=True)
    layer = te.DotProductAttention(
        shape.hq, shape.d, num_gqa_groups=shape.hkv, qkv_format="bshd", attn_mask_type="causal"
    )

    def call(*leaves: torch.Tensor) -> torch.Tensor:
        out = layer(*(leaf.transpose(1, 2).contiguous() for leaf in leaves))
        return out.unflatten(-1, (shape.hq, shape.d)).transpose(1, 2)

    yield from attention.against_float64(call, shape, "bf16", causal=True)


def _te_packed() -> Iterable[Reading]:
    """Gradients of packed input were wrong on sm_120 (NVIDIA/TransformerEngine#3333)."""
    import transformer_engine.pytorch as te

    length, heads, size = sum(attention_masks.LENGTHS), attention_masks.HEADS, attention_masks.HEAD
    shape = attention.Shape(b=1, hq=heads, hkv=heads, sq=length, sk=length, d=size)
    layer = te.DotProductAttention(heads, size, qkv_format="thd", attn_mask_type="padding_causal")
    ends, longest = attention_packed.ends(attention_masks.LENGTHS), max(attention_masks.LENGTHS)

    def call(*leaves: torch.Tensor) -> torch.Tensor:
        rows = (leaf[0].transpose(0, 1).contiguous() for leaf in leaves)
        places = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
        out = layer(*rows, **places, max_seqlen_q=longest, max_seqlen_kv=longest)
        return out.unflatten(-1, (heads, size)).transpose(0, 1)[None]

    seen = attention_packed.seen(attention_masks.PACK)
    yield from attention.against_float64(call, shape, "bf16", seen=seen)


def _layers(package: str) -> Iterator[cases.Case]:
    if package == "bitsandbytes":
        yield "Linear8bitLt", _linear_8bit
        yield "Linear4bit in NF4", _linear_4bit
    elif package == "liger-kernel":
        yield "LigerRMSNorm", _liger_rms_norm
        yield "LigerLayerNorm", _liger_layer_norm
        yield "LigerSwiGLUMLP", _liger_swiglu
        yield "LigerCrossEntropyLoss", _liger_cross_entropy
    elif package == "torchao":
        yield "Float8Linear with a scale for each tensor", _float8_linear
        yield "int8 weights", _int8_weights
    else:
        yield "te.Linear", _te_linear
        yield "te.LayerNormMLP", _te_mlp
        if arch.fp8() is not None:
            yield "te.Linear in 8 bits", _te_fp8
        yield "te.DotProductAttention", _te_attention
        yield "te.DotProductAttention of packed sequences", _te_packed
