"""Blocks of the trainers' models through torch.compile, at real width, against eager mode and float64.

In: a family. Out: the report of `cases.run`. The output and the gradients of the input and of every weight
are judged. Few tokens: what a compiler gets wrong depends on widths and on how operations meet.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from workloads import cases, device, operands, trainers
from workloads.gates import Reading, beside_eager

FACTOR = 3.0
# On a CPU Inductor needs a C++ compiler, which an image need not have. The tracing is the same.
BACKEND = {"cuda": "inductor", "cpu": "aot_eager"}
BATCH, TOKENS = 2, {"cuda": 256, "cpu": 32}
SIDE, TEXT = {"cuda": 16, "cpu": 4}, {"cuda": 128, "cpu": 16}
STD, RESIDUAL = 0.02, 8.0  # as trainers draw weights: those that add to the residual stream are smaller
Problem = tuple[nn.Module, torch.Tensor, tuple[Any, ...]]
FAMILIES = ("llama", "flux", "moe")


def check(family: str) -> dict[str, Any]:
    """One block of the family, or for FLUX one of each kind."""
    return cases.run([(f"{family} block in bf16", functools.partial(_against_eager, PROBLEMS[family]))])


def _config(family: str, size: str) -> Any:
    """The shape of a size of the trainers; on a CPU the tiny one."""
    presets = trainers.module("presets").PRESETS
    return presets[family, size if device().type == "cuda" else "tiny"].config


def _llama() -> Problem:
    config = _config("llama", "8b")
    return _decoder(trainers.module("models.llama").Block(config), config)


def _decoder(block: nn.Module, config: Any) -> Problem:
    tokens = TOKENS[device().type]
    rotary = trainers.module("models.layers").Rotary.table(tokens, config.head_dim, config.theta, device())
    return block, operands.normal(BATCH, tokens, config.width, dtype=torch.bfloat16, seed=1), (rotary,)


def _moe() -> Problem:
    """A block with experts whose tokens choose their expert clearly, so that rounding moves none."""
    config = _config("moe", "zaya1-like")
    llama, moe = trainers.module("models.llama"), trainers.module("models.moe")
    block, x, context = _decoder(llama.Block(config, moe.Experts(config)), config)
    experts, width = config.experts, config.width
    first = torch.arange(BATCH * x.shape[1], device=device()).view(x.shape[:2]) ** 2 % experts
    x[..., :experts] = 0
    x.scatter_(-1, first[..., None], width**0.5 / 4)
    x.scatter_(-1, (first[..., None] + 1) % experts, width**0.5 / 8)
    router = torch.zeros(experts, width)
    router[range(experts), range(experts)] = 8 / width**0.5
    block.mlp.router.weight = nn.Parameter(router)
    return block, x, context


class _Both(nn.Module):  # type: ignore[misc]  # lint runs without torch, so its classes are Any
    """A block of FLUX with a stream for each side, then one with a single stream."""

    def __init__(self, flux: Any, config: Any) -> None:
        super().__init__()
        self.of_two, self.of_one = flux.Double(config), flux.Single(config)

    def forward(self, x: torch.Tensor, condition: torch.Tensor, table: Any) -> torch.Tensor:
        out: torch.Tensor = self.of_one(self.of_two(x, condition, table), condition, table)
        return out


def _flux() -> Problem:
    flux = trainers.module("models.flux")
    kind = device().type
    config = dataclasses.replace(_config("flux", "dev-512"), side=SIDE[kind], text_tokens=TEXT[kind])
    tokens = config.text_tokens + config.side**2
    x = operands.normal(BATCH, tokens, config.width, dtype=torch.bfloat16, seed=1)
    condition = operands.normal(BATCH, config.width, dtype=torch.bfloat16, seed=2)
    return _Both(flux, config), x, (condition, flux.rotary(config, device()))


PROBLEMS: dict[str, Callable[[], Problem]] = {"llama": _llama, "flux": _flux, "moe": _moe}


def _against_eager(problem: Callable[[], Problem]) -> Iterable[Reading]:
    torch._dynamo.reset()
    with device():  # a module makes its weights there
        block, x, context = problem()
    _give_weights(block)
    block = block.to(device=device(), dtype=torch.bfloat16)
    fast = torch.compile(block, backend=BACKEND[device().type], dynamic=False)
    got, eager = _run(fast, block, x, context), _run(block, block, x, context)
    wide = block.double()
    ref = _run(wide, wide, x.double(), tuple(_wide(one) for one in context))
    for name, expected in ref.items():
        yield from beside_eager(got[name], expected, eager[name], factor=FACTOR, name=name)


def _give_weights(block: nn.Module) -> None:
    """Give a block normal weights where it has none of its own: a router's stay, and norms stay ones."""
    for number, (name, weight) in enumerate(block.named_parameters()):
        if weight.ndim > 1 and "router" not in name:
            ends = name.endswith(("o.weight", "down.weight", "down", "out.weight"))
            drawn = operands.normal(*weight.shape, dtype=torch.float32, seed=100 + number, scale=STD)
            weight.data = drawn / RESIDUAL if ends else drawn


def _wide(value: Any) -> Any:
    """Float64 copies of what a block reads beside its input; tables of positions stay tables."""
    if isinstance(value, torch.Tensor):
        return value.double()
    return type(value)(*map(_wide, value)) if hasattr(value, "_fields") else tuple(map(_wide, value))


def _run(
    call: Callable[..., torch.Tensor], block: nn.Module, x: torch.Tensor, context: tuple[Any, ...]
) -> dict[str, torch.Tensor]:
    """The output and every gradient, by name."""
    leaf = x.detach().clone().requires_grad_()
    weights = dict(block.named_parameters())
    out = call(leaf, *context)
    g = operands.normal(*out.shape, dtype=torch.bfloat16, seed=9).to(out.dtype)
    grads = torch.autograd.grad(out, (leaf, *weights.values()), g)
    names = ("dx", *(f"d {name}" for name in weights))
    return {"out": out.detach(), **dict(zip(names, grads, strict=True))}
