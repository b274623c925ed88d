"""Generated cases of torchao's options for training: optimizers, products in 8 bits, fake quantization, MX.

In: a seed and a number. Out: the share of a gate that a case needed, and words.

Nothing is compared with what the package gave before. What it rounds must be the nearest number of its
format, with the scale that its documents state; an optimizer's step is that of Adam in float64 at the state
that it kept before; a product is that of the rounded operands.
"""

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from workloads import arch, device, generated_left, operands
from workloads.gates import unit_roundoff

OPTIM, FLOAT8, FAKE, MX = "optimizer", "float8", "fake quantization", "MX"
OPTIMIZERS = ("Adam8bit", "Adam4bit", "AdamFp8", "AdamW8bit", "AdamW4bit", "AdamWFp8")
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
BITS = (2, 3, 4, 5, 6, 7, 8)
# An MX format: its name, bits of its mantissa, the power of its largest number, that number, its least power.
FORMATS = {
    "e4m3": (torch.float8_e4m3fn, 3, 8, 448.0, -6), "e5m2": (torch.float8_e5m2, 2, 15, 57344.0, -14),
    "fp6 e2m3": ("fp6_e2m3", 3, 2, 7.5, 0), "fp6 e3m2": ("fp6_e3m2", 2, 4, 28.0, -2),
    "fp4": ("float4_e2m1fn_x2", 1, 2, 6.0, 0),
}  # fmt: skip
MODES = ("floor", "rceil", "ceil", "even")
FLOATS = (torch.float32, torch.bfloat16)
# Numbers in a block: of less than this an optimizer keeps its state as it is.
QUANTISED, SIZES = 4096, ((64, 64), (4096,), (128, 96), (63, 65), (33,), (8, 16, 32), (96, 128), ())
SHAPES = ((16, 32, 48), (32, 64, 16), (5, 96, 32), (1, 32, 64), (48, 128, 128))
STEPS, EXACT, NEAR = 3, 64.0, 2.0**-10  # roundings of float32; of a step of a format, by which a tie may move
APART = 0.25  # of what rounding to 8 bits moves a product: nearer it is the product of the rounded operands
COMPILED = 0.1  # of the steps on a GPU
OUTLIER, BORDER = 30.0, 2.0**-5
Found = tuple[str, float]  # a gate, and the share of it that was needed


class Case(NamedTuple):
    """A part of the package with its option, and what is drawn beside it."""

    part: str
    option: str
    dtype: torch.dtype
    more: Mapping[str, Any]
    seed: int

    def __str__(self) -> str:
        """All of it in words."""
        return f"{self.part} {self.option} in {self.dtype}, {dict(self.more)}, numbers of seed {self.seed}"


def table() -> list[tuple[str, str]]:
    """Each option once."""
    pairs = [(OPTIM, OPTIMIZERS), (FLOAT8, RECIPES), (FAKE, [str(one) for one in BITS])]
    return [(part, name) for part, names in pairs for name in names] + [
        (MX, f"{name} {mode}") for name in FORMATS for mode in MODES
    ]


def draw(source: random.Random, seed: int, number: int) -> Case:
    """One case; each option has its turn."""
    turn, row = divmod(number, len(table()))
    part, option = random.Random(f"{seed} {turn}").sample(table(), len(table()))[row]
    pick, dtype = source.choice, source.choice(FLOATS)
    tokens, inner, outer = pick(SHAPES)
    more: dict[str, Any] = {"tokens": tokens, "inner": inner, "outer": outer, "outlier": pick((False, True))}
    if part == OPTIM:
        more = {"size": pick(SIZES), "lr": pick((1e-3, 0.1)), "betas": pick(((0.9, 0.999), (0.5, 0.75)))}
        more |= {"eps": pick((1e-8, 1e-3)), "weight_decay": pick((0.0, 0.1)), "amsgrad": pick((False, True))}
        more |= {"compiled": device().type == "cuda" and source.random() < COMPILED}
        more |= {"block_size": pick((64, 128, 256)), "bf16_stochastic_round": pick((False, True))}
    elif part == FLOAT8:
        more |= {"bias": pick((False, True)), "power": pick((False, True)), "rows": pick((1, 2))}
    elif part == FAKE:
        more |= {
            "group": pick((0, 8, 16, 32)),
            "symmetric": pick((False, True)),
            "tokenwise": pick((False, True)),
        }
    else:
        more |= {"block": pick((16, 32)), "swizzled": False}
    return Case(part, option, dtype, more, source.randrange(2**31))


def one(seed: int, number: int) -> tuple[float, str] | None:
    """The worst share of a gate of a case, and words; `None` if the package refuses it."""
    case = draw(random.Random(f"torchao {seed} {number}"), seed, number)
    try:
        found = list(PARTS[case.part](case))
    except (generated_left.RefusedError, ImportError) as error:
        kind = type(error.__cause__ or error).__name__
        generated_left.say(generated_left.CALL, f"{case.part}: refused by a {kind}")
        return None
    gate, share = max(found, key=lambda each: each[1] if each[1] == each[1] else float("inf"))
    share = share if share == share else float("inf")  # noqa: PLR0124 only NaN is not itself
    again = f"\n    again: generated.repeat('torchao', {seed}, {number})"
    return share, f"{case}: {gate}{again if share > 1 else ''}"


def _data(case: Case, *size: int, number: int = 0) -> torch.Tensor:
    x = operands.normal(*size, dtype=case.dtype, seed=case.seed + number)
    if case.more.get("outlier") and x.numel():
        x.view(-1)[x.numel() // 3] *= OUTLIER
    return x


def _share(
    got: torch.Tensor, right: torch.Tensor, allowed: torch.Tensor | float, least: torch.Tensor | float = 0.0
) -> float:
    """The worst error, beyond the least one that a format has, as a share of what is allowed.

    NaN is wrong.
    """
    if got.shape != right.shape:
        return float("inf")
    error = ((got.double() - right.double()).abs() - least).clamp(min=0)
    error = error / (allowed + torch.finfo(torch.float32).tiny)
    return float(error.nan_to_num(nan=float("inf")).max()) if error.numel() else 0.0


# ---- Optimizers ------------------------------------------------------------------------------------------


def optimizers(case: Case) -> Iterator[Found]:
    """Steps of one optimizer: the weight, and what it keeps, beside Adam in float64 at the kept state."""
    from torchao import optim

    more, size = dict(case.more), case.more["size"]
    weight = _data(case, *size).requires_grad_()
    given = {key: more[key] for key in more if key not in ("size", "compiled")}
    with generated_left.witnessing():
        mine = getattr(optim, case.option)([weight], **given)
    stochastic = more["bf16_stochastic_round"] and case.dtype is torch.bfloat16
    (low, high), lr, unit = more["betas"], more["lr"], unit_roundoff(torch.float32)
    for step in range(1, STEPS + 1):
        weight.grad = _data(case, *size, number=step)
        before, kept = (
            weight.detach().double(),
            {name: _kept(one) for name, one in mine.state[weight].items()},
        )
        with generated_left.witnessing(), _eagerly(compiled=more["compiled"]):
            mine.step()
        grad, now = weight.grad.double(), before
        if "AdamW" in case.option:
            now = now * (1 - lr * more["weight_decay"])
        else:
            grad = grad + more["weight_decay"] * now
        zero = torch.zeros_like(now)
        wanted = {"exp_avg": low * kept.get("exp_avg", zero) + (1 - low) * grad}
        wanted["exp_avg_sq"] = high * kept.get("exp_avg_sq", zero) + (1 - high) * grad.square()
        most = torch.maximum(kept.get("max_exp_avg_sq", zero), wanted["exp_avg_sq"])
        wanted |= {"max_exp_avg_sq": most} if more["amsgrad"] else {}
        root = (most if more["amsgrad"] else wanted["exp_avg_sq"]).sqrt() / (1 - high**step) ** 0.5
        size_of_step = lr / (1 - low**step) / (root + more["eps"])
        # Terms of a mean may cancel: its rounding is that of the terms.
        terms = low * kept.get("exp_avg", zero).abs() + (1 - low) * grad.abs()
        move, moved = wanted["exp_avg"] * size_of_step, terms * size_of_step
        rounding = unit_roundoff(case.dtype) * (2 if stochastic else 1) * (now - move).abs()
        # 1 - beta^step is worked out in float32.
        allowed = rounding * (1 + NEAR) + EXACT * unit * (now.abs() + moved / (1 - high))
        yield f"weight after step {step}", _share(weight.detach(), now - move, allowed)
        for name, right in wanted.items():
            most = float((terms if name == "exp_avg" else right).abs().max())
            yield f"{name} after step {step}", _nearest(mine.state[weight][name], right, case, most)


def _kept(one: torch.Tensor) -> torch.Tensor:
    return (one.dequantize() if hasattr(one, "dequantize") and hasattr(one, "codes") else one).double()


def _nearest(kept: torch.Tensor, right: torch.Tensor, case: Case, most_term: float) -> float:
    """What is kept must be the number of its table that is nearest, by the largest of each block.

    `most_term`: the largest number that was added into one.
    """
    unit, block = unit_roundoff(torch.float32), case.more["block_size"]
    if right.numel() < QUANTISED or right.numel() % block:
        return _share(kept, right, unit_roundoff(case.dtype) * right.abs() + EXACT * unit * most_term)
    rows = right.view(-1, block)
    most = rows.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    if hasattr(kept, "qmap"):
        table = kept.qmap.double().sort().values
        if len(table) != (256 if "8bit" in case.option else 16) or not bool((table[1:] > table[:-1]).all()):
            return float("inf")
        place = torch.searchsorted(table, rows / most).clamp(1, len(table) - 1)
        sides = torch.stack([table[place - 1], table[place]])
        least = (sides - rows / most).abs().amin(0) * most
    else:
        scale = most / torch.finfo(torch.float8_e4m3fn).max
        least = ((rows / scale).float().to(torch.float8_e4m3fn).double() * scale - rows).abs()
    return _share(_kept(kept).view(-1, block), rows, least * NEAR + EXACT * unit * most, least)


@contextlib.contextmanager
def _eagerly(*, compiled: bool) -> Iterator[None]:
    """The package compiles each step: an image may have no compiler, and each size takes it seconds."""
    if compiled:
        yield
    else:
        with torch.compiler.set_stance("force_eager"):
            yield


# ---- Products in 8 bits ----------------------------------------------------------------------------------


def products(case: Case) -> Iterator[Found]:
    """A linear layer beside the products of its operands, rounded as the recipe says."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    more, emulate = case.more, arch.fp8() is None
    layer = nn.Linear(more["inner"], more["outer"], more["bias"], device=device(), dtype=case.dtype)
    layer.weight.data = _data(case, more["outer"], more["inner"], number=1)
    lead = (2, more["tokens"]) if more["rows"] == len("bt") else (more["tokens"],)
    x, g = _data(case, *lead, more["inner"]), _data(case, *lead, more["outer"], number=2)
    leaf = x.clone().requires_grad_()
    with generated_left.witnessing():
        if case.option == RECIPES[0]:
            config = Float8LinearConfig(
                emulate=emulate, round_scales_to_power_of_2=more["power"], pad_inner_dim=not emulate
            )
        else:
            config = Float8LinearConfig.from_recipe_name(case.option)
            object.__setattr__(config, "emulate", emulate)
            object.__setattr__(config, "pad_inner_dim", not emulate)
        whole = convert_to_float8_training(nn.Sequential(layer), config=config)
        out = whole(leaf)
        out.backward(g)
    bias = layer.bias.detach().double() if more["bias"] else 0.0
    right = _products(case, x.flatten(0, -2), layer.weight.detach(), g.flatten(0, -2))
    weight = whole[0].weight
    got = {"out": out.detach().flatten(0, -2) - bias, "dx": leaf.grad.flatten(0, -2), "dw": weight.grad}
    for name, (near, exact) in right.items():
        moved = (near - exact).square().mean().sqrt() * APART
        rounding = 4 * unit_roundoff(case.dtype) * exact.abs().amax()
        yield name, _share(got[name], near, (OUTLIER if more["outlier"] else 8.0) * (moved + rounding))
    if more["bias"]:
        rows = g.double().flatten(0, -2)
        allowed = 4 * unit_roundoff(case.dtype) * rows.abs().sum(0)
        yield "bias", _share(whole[0].bias.grad, rows.sum(0), allowed)


def _products(case: Case, *each: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The three products of rounded operands, and of the operands as they are."""
    from torchao.float8.config import e4m3_dtype as small
    from torchao.float8.config import e5m2_dtype as wide

    power = case.more["power"] or case.option != RECIPES[0]
    x, w, g = (one.double() for one in each)

    def rounded(one: torch.Tensor, axis: int | None, kind: torch.dtype = small) -> torch.Tensor:
        most = one.abs().amax() if axis is None else one.abs().amax(axis, keepdim=True)
        scale = torch.finfo(kind).max / most.clamp(min=1e-12)
        scale = torch.exp2(scale.log2().floor()) if power else scale
        ends = torch.finfo(kind).max
        return (one.float() * scale.float()).clamp(-ends, ends).to(kind).double() / scale

    if case.option == "tensorwise":
        a, b, c = rounded(x, None), rounded(w, None), rounded(g, None, wide)
        near = {"out": a @ b.t(), "dx": c @ b, "dw": c.t() @ a}
    else:
        whole = case.option == RECIPES[2]
        near = {"out": rounded(x, -1) @ rounded(w, -1).t()}
        near["dx"] = rounded(g, -1) @ rounded(w, None if whole else 0)
        near["dw"] = g.t() @ x if whole else rounded(g, 0).t() @ rounded(x, 0)
    exact = {"out": x @ w.t(), "dx": g @ w, "dw": g.t() @ x}
    return {name: (near[name], exact[name]) for name in exact}


# ---- Fake quantization, MX ------------------------------------------------------------------------------


def fake(case: Case) -> Iterator[Found]:
    """Whole numbers of few bits: each the nearest one, with the scale of its group; the gradient passes.

    Weights that are not symmetric are passed over: their zero is worked out as a number, cut to a whole one,
    and then taken for a place (torchao 0.18: numbers from 3 to 4 become 0.2; no issue is known).
    """
    from torchao.quantization.qat import IntxFakeQuantizeConfig
    from torchao.quantization.qat.linear import FakeQuantizedLinear

    more, bits, symmetric = case.more, int(case.option), case.more["symmetric"]
    kind = torch.int8 if bits == BITS[-1] else getattr(torch, f"int{bits}")
    grouped = {"group_size": more["group"]} if more["group"] else {"granularity": "per_channel"}
    weight = _data(case, more["outer"], more["inner"], number=1)
    x, g = _data(case, more["tokens"], more["inner"]), _data(case, more["tokens"], more["outer"], number=2)
    leaf, a, given = x.clone().requires_grad_(), x, None
    with generated_left.witnessing():
        own = IntxFakeQuantizeConfig(kind, is_symmetric=symmetric, **grouped)
        if more["tokenwise"]:
            given = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
        layer = FakeQuantizedLinear(
            more["inner"], more["outer"], False, given, own, device=device(), dtype=case.dtype
        )
        layer.weight.data = weight.clone()
        out = layer(leaf)
        out.backward(g)
        w = layer.weight_fake_quantizer(weight).detach()
        if given:
            a = layer.activation_fake_quantizer(x).detach()
    inside = torch.ones_like(weight, dtype=torch.bool), torch.ones_like(x, dtype=torch.bool)
    group = more["group"] or more["inner"]
    if symmetric:
        yield "weights", _whole(w, weight, group, bits)
        inside = (_place(weight, group, bits).abs() < 2 ** (bits - 1) - 0.5 - BORDER), inside[1]
    else:
        generated_left.say("asymmetric weights", "a known fault")
    if given:
        low, high = (
            x.double().amin(-1, keepdim=True).clamp(max=0),
            x.double().amax(-1, keepdim=True).clamp(min=0),
        )
        step = (high - low) / (2 ** BITS[-1] - 1)
        inside = inside[0], (x.double() > low + step) & (x.double() < high - step)
        # The zero has a rounding of its own, so an end of a row may be half a step beyond the last number.
        rounding = 4 * unit_roundoff(case.dtype) * (high - low)
        least = torch.where(inside[1], step / 2, step)
        yield "activations", _share(a, x, step * BORDER + rounding, least)
    pairs = {"out": (out.detach(), a, w.t()), "dx": (leaf.grad, g, w), "dw": (layer.weight.grad, g.t(), a)}
    for name, (got, left, right) in pairs.items():
        exact, size = left.double() @ right.double(), left.double().abs() @ right.double().abs()
        # Sums of float32 walk at random.
        sums = 4 * size + left.shape[-1] ** 0.5 * size if case.dtype is torch.float32 else 4 * size
        allowed = unit_roundoff(case.dtype) * (4 * exact.abs() + sums)
        chosen = {"dx": inside[1], "dw": inside[0]}.get(name, torch.ones_like(got, dtype=torch.bool))
        if symmetric or name != "dw":  # what is beyond the ends of the numbers has no gradient
            yield name, _share(got[chosen], exact[chosen], allowed[chosen])


def _place(x: torch.Tensor, group: int, bits: int) -> torch.Tensor:
    """Each number in steps of its group: the largest one is half of all numbers that there are."""
    rows = x.double().view(len(x), -1, group)
    steps = 2 * rows.abs().amax(-1, keepdim=True).clamp(min=1e-12) / (2**bits - 1)
    return (rows / steps).view(x.shape)


def _whole(got: torch.Tensor, x: torch.Tensor, group: int, bits: int) -> float:
    """How far numbers are from the nearest whole one of their group."""
    places, ends = _place(x, group, bits), 2 ** (bits - 1)
    ratio = torch.where(places == 0, 1.0, x.double() / torch.where(places == 0, 1.0, places))
    wanted = places.round().clamp(-ends, ends - 1)
    least = (places - wanted).abs() * ratio.abs()  # of two numbers that are as near either one is right
    rounding = 4 * unit_roundoff(x.dtype) * (x.double().abs() + ratio.abs())
    return _share(got, x, NEAR * ratio.abs() + rounding, least)


def microscaled(case: Case) -> Iterator[Found]:
    """Blocks with one power of two: the power that the mode says, and the nearest numbers."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    more, (name, mode) = case.more, case.option.rsplit(" ", 1)
    kind, mantissa, power, ends, least = FORMATS[name]
    x = _data(case, more["tokens"], more["inner"])
    kind = torch.float4_e2m1fn_x2 if name == "fp4" else kind
    with generated_left.witnessing():
        got = MXTensor.to_mx(x, kind, more["block"], ScaleCalculationMode(mode)).dequantize(torch.float32)
    rows = x.double().view(-1, more["block"])
    most = rows.abs().amax(-1, keepdim=True)
    exponent = {
        "floor": lambda: most.log2().floor() - power,
        "ceil": lambda: most.log2().ceil() - power,
        "rceil": lambda: (most / ends).log2().ceil(),
        "even": lambda: (
            (most * (1 + 2.0 ** -(mantissa + 1) / torch.exp2(most.log2() - most.log2().floor())))
            .log2()
            .floor()
            - power
        ),
    }[mode]()
    scale = torch.exp2(exponent.clamp(min=-126))
    whole = (rows / scale).clamp(-ends, ends)
    step = torch.exp2(whole.abs().log2().floor().clamp(min=least) - mantissa)
    right = (whole / step).round().mul(step).clamp(-ends, ends) * scale
    yield "numbers", _share(got.view(right.shape), right, NEAR * step * scale)


PARTS = {OPTIM: optimizers, FLOAT8: products, FAKE: fake, MX: microscaled}
