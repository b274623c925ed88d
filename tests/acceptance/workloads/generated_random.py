"""Operators that draw random numbers, judged by properties. In: a source of numbers. Out: a share of a gate.

Nobody can say which elements a mask has. But its gradient has the same ones, its share is what was asked
for, no element follows from its neighbours, each call has other ones, and a seed gives the same ones again.
"""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from workloads import generated_judge, operands
from workloads.generated_judge import FLOATS, Call

SHARE_SIGMAS, PERIOD_SIGMAS = 5.0, 6.0
LAGS = 64
ROUNDINGS = 8.0  # between a result and its input times its gradient
SHAPES = ((8, 64, 96), (5, 33, 257), (16, 130, 31), (3, 128, 128))
SHARES = (0.125, 0.25, 0.5, 0.75, 0.875)  # exact in each type


def _attention(x: torch.Tensor, p: float) -> torch.Tensor:
    """Dropout of attention whose scores are all 0: its weights, times the number of keys, times x."""
    rows, keys = x.shape[-2:]
    query, key = x.new_zeros(len(x), 1, rows, 8), x.new_zeros(len(x), 1, keys, 8)
    eye = torch.eye(keys, dtype=x.dtype, device=x.device).expand(len(x), 1, keys, keys)
    return F.scaled_dot_product_attention(query, key, eye, dropout_p=p)[:, 0] * keys * x


def _attention_of_one_row(x: torch.Tensor, p: float) -> torch.Tensor:
    """The same with one query, and x as values, so that their gradient has the mask."""
    keys = x.shape[-1]
    query, key = (x.new_zeros(x.numel() // keys, 1, n, 8) for n in (1, keys))
    value = torch.diag_embed(x.reshape(-1, 1, keys))
    return (F.scaled_dot_product_attention(query, key, value, dropout_p=p) * keys).view(x.shape)


# Each takes a tensor of positive numbers and a share, and multiplies each element by a random number.
OPERATORS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "dropout": lambda x, p: F.dropout(x, p, training=True),
    "dropout in place": lambda x, p: F.dropout(x * 1, p, training=True, inplace=True),
    "dropout twice": lambda x, p: F.dropout(F.dropout(x, p), 0.5),
    "dropout of channels": lambda x, p: F.dropout1d(x.reshape(1, -1, 1), p).view(x.shape),
    "native_dropout": lambda x, p: torch.native_dropout(x, p, train=True)[0],
    "attention": _attention,
    "attention of one row": _attention_of_one_row,
    "bernoulli": lambda x, p: x * torch.bernoulli(torch.full_like(x, 1 - p)),
    "bernoulli in place": lambda x, p: x * torch.empty_like(x).bernoulli_(1 - p),
    "rand_like": lambda x, p: x * (torch.rand_like(x, dtype=torch.float32) >= p),
    "rrelu": lambda x, _: -F.rrelu(-x, 0.25, 0.75, training=True),
    "rrelu in place": lambda x, _: -F.rrelu_(-x, 0.25, 0.75, training=True),
    "randn_like": lambda x, _: x * torch.randn_like(x),
    "randint": lambda x, _: x * torch.randint_like(x, 0, 2),
    "exponential": lambda x, _: x * torch.empty_like(x, dtype=torch.float32).exponential_().to(x.dtype),
}
# Below this, an element counts as dropped, which half of them are. Elsewhere 0 does.
MIDDLE = {"rrelu": 0.5, "rrelu in place": 0.5, "randn_like": 0.0, "exponential": math.log(2)}
# An operator's input has been moved in memory before, as compilers make kernels of both.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda x: x,
    "turned": lambda x: x.transpose(1, 2),
    "turned and copied": lambda x: x.transpose(1, 2).contiguous(),
    "flat": lambda x: x.reshape(1, -1, 8) if x.numel() % 8 == 0 else x.reshape(1, len(x), -1),
    "with gaps": lambda x: torch.stack((x, x), -1)[..., 1],
}


@dataclass(frozen=True)
class Draw:
    """A random operator, applied to two tensors in one program."""

    operator: str
    layout: str
    share: float
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both results: nothing links their masks."""
        layout, function = LAYOUTS[self.layout], OPERATORS[self.operator]
        return function(layout(x), self.share), function(layout(y), self.share)

    def __str__(self) -> str:
        return f"{self.operator} {self.layout} of {self.dtype} {self.shape}, share {self.share}"

    @property
    def dropped(self) -> float:
        """The share of elements that should be dropped, or below the middle."""
        halves = self.operator in MIDDLE or self.operator == "randint"
        return 1 - (1 - self.share) / 2 if self.operator == "dropout twice" else 0.5 if halves else self.share


def draw(source: random.Random) -> Draw:
    """One random operator."""
    operator, layout = source.choice(list(OPERATORS)), source.choice(list(LAYOUTS))
    if operator.startswith("attention"):
        layout = ""
    return Draw(operator, layout, source.choice(SHARES), source.choice(SHAPES), source.choice(FLOATS))


def by_backward(call: Call) -> list[torch.Tensor]:
    """A call's results and then its inputs' gradients, by `backward`: all that old recomputation has."""
    generated_judge.seed_all(call.seed)
    places = itertools.count()
    call = call.mapped(lambda one: generated_judge._leaf(one, call.fixed, places))
    given = [
        one for one in generated_judge.leaves(call.function(*call.args, **call.kwargs)) if _is_dense(one)
    ]
    roots = [one for one in given if one.requires_grad]
    generator = torch.Generator().manual_seed(call.seed)
    weights = [(torch.rand(one.shape, generator=generator) + 0.5).to(one.device, one.dtype) for one in roots]
    torch.autograd.backward(roots, weights)
    return [one.detach() for one in given] + [one.grad for one in call.tensors() if one.grad is not None]


def _is_dense(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and one.layout is torch.strided


def judge(function: Callable[..., Any], draw: Draw, seed: int) -> tuple[float, str]:
    """The worst property of two calls of two random tensors each, and of one that is repeated."""
    inputs = [operands.normal(*draw.shape, dtype=draw.dtype, seed=seed + n).abs() + 0.5 for n in (0, 1)]
    layout = LAYOUTS[draw.layout]
    shares: list[tuple[float, str]] = []
    masks: list[torch.Tensor] = []
    first: list[torch.Tensor] = []
    generated_judge.seed_all(seed)
    for call in range(3):
        if call == 2:
            generated_judge.seed_all(seed)
        leaves = [one.clone().requires_grad_() for one in inputs]
        outs = function(*leaves)
        torch.autograd.backward(outs, [torch.ones_like(one) for one in outs])
        if call == 2:
            same = all(torch.equal(a, b) for a, b in zip(first, outs, strict=True))
            shares.append((0.0 if same else math.inf, "one seed, other numbers"))
            continue
        first = first or [one.detach() for one in outs]
        for x, out in zip(leaves, outs, strict=True):
            shares.append(_gradient(layout(x.detach() * x.grad), out.detach(), draw))
            factors = out.detach().double() / layout(x.detach().double())
            masks.append(factors <= MIDDLE[draw.operator] if draw.operator in MIDDLE else factors == 0)
    for mask in masks:
        shares += _of_one(mask, draw.dropped)
    for a, b in itertools.combinations(masks, 2):
        shares.append(_unlike(_centred(a, draw.dropped), _centred(b, draw.dropped), "two masks are alike"))
    return max(shares)


def _gradient(product: torch.Tensor, out: torch.Tensor, draw: Draw) -> tuple[float, str]:
    """How far an input times its gradient is from the result: each is its element times one number."""
    eps, tiny = torch.finfo(draw.dtype).eps / 2, torch.finfo(draw.dtype).tiny
    error = (product.double() - out.double()).abs() / (eps * out.double().abs() + tiny)
    worst = float(error.nan_to_num(nan=math.inf).max())
    return worst / ROUNDINGS, f"the gradient is that of other random numbers, {worst:.3g} roundings away"


def _centred(mask: torch.Tensor, share: float) -> torch.Tensor:
    return (mask.double() - share) / math.sqrt(share * (1 - share))


def _of_one(mask: torch.Tensor, share: float) -> list[tuple[float, str]]:
    """Find its share, and whether an element says what a later one is, along each dimension."""
    centred = _centred(mask, share)
    sigmas = float(centred.sum().abs()) / math.sqrt(mask.numel())
    found = [
        (sigmas / SHARE_SIGMAS, f"a share of {float(mask.double().mean()):.4g} where {share} was asked for")
    ]
    for dim in range(mask.dim()):
        flat = centred.movedim(dim, -1).flatten()
        found += [
            _unlike(flat[:-lag], flat[lag:], f"a mask repeats after {lag} elements of dimension {dim}")
            for lag in range(1, LAGS + 1)
        ]
    return found


def _unlike(some: torch.Tensor, others: torch.Tensor, words: str) -> tuple[float, str]:
    sigmas = float((some * others).sum().abs()) / math.sqrt(some.numel())
    return sigmas / PERIOD_SIGMAS, f"{words}: {sigmas:.3g} sigma"
