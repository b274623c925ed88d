"""Generated sizes: operators of models on both sides of 2^16 rows to 2^32 elements.

In: a source of numbers, and `small`, `large` (up to 2^24 elements) or `huge` (2^31 and 2^32). Out: a call.

An operator that works row by row is judged at a few rows of the large result, by those rows alone in float64:
so a size costs no more than the operator itself. One that adds up rows gets integers, whose sums are exact.
"""

import gc
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from workloads import device, operands
from workloads.generated_judge import FLOATS, Call

ROW_BORDERS = (2**15, 2**16, 2**17, 2**20)
ELEMENT_BORDERS = {"small": (2**16, 2**18), "large": (2**20, 2**23, 2**24), "huge": (2**31, 2**32)}
HUGE_BYTES = 64 << 30  # of free memory: an operator's operands, result and gradients with 2^31 numbers
FEW_ROWS = (100, 257, 1000)  # of which float64 has memory for those that are judged, also where they are long
NEAR = (-1, 0, 1, 3)
WIDTHS = (1, 2, 3, 5, 8, 17, 64, 100, 257)
KEPT = 5  # rows around each place that is judged
# What adds up a row: its rounding grows with the root of the length, as a device adds up parts one by one.
ADDS_ROWS = ("linear", "batched product", "sum", "mean", "softmax", "log_softmax", "logsumexp", "layer_norm",
             "cross_entropy")  # fmt: skip
GROWS_FROM = 2**10  # numbers
Function = Callable[[torch.Tensor], torch.Tensor]


def _stepped(kind: type[torch.optim.Optimizer], parts: int, **options: Any) -> Function:
    """Two steps of an optimizer for numbers that lie in one or more weights, and are their own gradients."""

    def stepped(x: torch.Tensor) -> torch.Tensor:
        weights = [part.detach().clone().requires_grad_() for part in x.detach().tensor_split(parts)]
        optimizer = kind(weights, lr=0.25, **options)
        for weight, part in zip(weights, x.detach().tensor_split(parts), strict=True):
            weight.grad = part
        optimizer.step()
        optimizer.step()
        return torch.cat(weights).detach()

    return stepped


# Sums that underflow in float16 are small beside 0.1.
ADAM: dict[str, Any] = {"betas": (0.5, 0.5), "eps": 0.1}
BY_ROWS: dict[str, Function] = {
    "gelu": lambda x: x + F.gelu(x),  # beside x, since its far tail is good to 1.5e-7 only
    "silu": lambda x: x + F.silu(x),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "square": lambda x: x * x,
    "scaled": lambda x: x * 3 + 1,
    "clamp": lambda x: x.clamp(-1, 1),
    "where": lambda x: torch.where(x > 0, x, -x),
    "masked": lambda x: x.masked_fill(x > 1, 0),
    "float": lambda x: x.float(),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: x + F.layer_norm(x, x.shape[-1:], eps=0.1),
    "sum": lambda x: x.sum(-1, keepdim=True),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "amax": lambda x: x.amax(-1, keepdim=True),
    "logsumexp": lambda x: x.logsumexp(-1, keepdim=True),
    "sort": lambda x: x.sort(-1).values,
    "flip": lambda x: x.flip(-1),
    "roll": lambda x: x.roll(1, -1),
    "pad": lambda x: F.pad(x, (1, 2)),
    "cat": lambda x: torch.cat((x, x), -1),
    "contiguous": lambda x: x.t().contiguous().t(),
    "linear": lambda x: x @ _square(x),
    "batched product": lambda x: (x[:, None, :] @ x[:, :, None])[:, 0],
    "cross_entropy": lambda x: F.cross_entropy(x, _labels(x), reduction="none")[:, None],
    "fused AdamW": _stepped(torch.optim.AdamW, 1, fused=True, **ADAM),
    "fused AdamW of three": _stepped(torch.optim.AdamW, 3, fused=True, **ADAM),
    "AdamW of lists": _stepped(torch.optim.AdamW, 3, foreach=True, **ADAM),
    "AdamW one by one": _stepped(torch.optim.AdamW, 3, foreach=False, **ADAM),
    "SGD of lists": _stepped(torch.optim.SGD, 3, foreach=True, momentum=0.5),
}
OVER_ROWS: dict[str, Function] = {
    "sum": lambda x: x.double().sum(0) if x.dtype is torch.float64 else x.sum(0, dtype=torch.float32),
    "sum of all": lambda x: x.sum(dtype=torch.promote_types(x.dtype, torch.float32))[None],
    "largest": lambda x: x.amax(0),
    "place of the largest": lambda x: x.flatten().argmax()[None],
    "nonzero": lambda x: x.count_nonzero(0),
    "weight gradient": lambda x: (x.t().to(_wide(x)) @ x.to(_wide(x)))[:8, :8],
    "index_add": lambda x: _zeros(x).index_add(0, _buckets(x), x.to(_wide(x))),
    "cumsum": lambda x: x.cumsum(0, dtype=_wide(x))[-9:],
    "sort": lambda x: x.sort(0).values[:: max(1, len(x) // 7)],
    "transposed": lambda x: x.t().contiguous().flatten()[-9:],
    "cumsum of all": lambda x: x.flatten().cumsum(0, dtype=_wide(x))[-9:],
    "any": lambda x: (x > 1).any(0),
    "histogram": lambda x: torch.bincount((x.flatten() + 1).long(), minlength=3),
}


# Not what a device adds into few numbers one by one: "cumsum" of columns took 88 s in float64 (H200).
NAMES = (*(name for name in OVER_ROWS if name not in ("cumsum", "index_add")), *BY_ROWS)
MOST_LABELS = 2**31 - 1  # nll_loss counts rows in 32 bits: beyond, it reads other labels (H200, torch 2.11)


def lacks() -> dict[str, Any] | None:
    """The feature or memory that huge sizes need and that is absent; None if they must run."""
    if device().type == "cpu":
        return {"feature": "gpu", "reason": "the sizes would take a CPU hours"}
    free = torch.cuda.mem_get_info()[0]
    return None if free >= HUGE_BYTES else {"memory_gib": HUGE_BYTES / 2**30, "present_gib": free / 2**30}


def draw(source: random.Random, seed: int, sizes: str) -> tuple[str, Call]:
    """One case, in words and as a call. Of huge ones each operator has its turn, as they are few."""
    dtype = source.choice(FLOATS)
    if sizes == "huge":
        name = NAMES[seed % len(NAMES)]
        rows, width = _huge(source, dtype, MOST_LABELS if name == "cross_entropy" else math.inf)
    else:
        rows, width = _shape(source, sizes)
        name = source.choice(list(OVER_ROWS if source.random() < 0.3 else BY_ROWS))
    if name in OVER_ROWS:
        x = operands.integers(rows, width, dtype=dtype, seed=seed % 2**31, density=min(1.0, 2**14 / rows))
        return f"{name} over {dtype} {rows} x {width}", Call(OVER_ROWS[name], (x,), {}, dtype, seed=seed)
    x = operands.normal(rows, width, dtype=dtype, seed=seed % 2**31)
    gradients = source.random() < 0.5
    places = _places(rows, width)
    given = {"name": name, "places": places, "gradients": gradients}
    call = Call(at_rows, (x,), given, dtype, seed=seed, steps=True)
    many = dtype is torch.float16 and width > torch.finfo(dtype).max / 4
    call = replace(call, overflows=many and name == "logsumexp")  # it adds up ones in its type
    part = Call(
        at_rows, (x[places],), {"name": name, "places": None, "gradients": gradients}, dtype, seed=seed
    )
    words = f"{name} of {dtype} {rows} x {width}{' with gradients' if gradients else ''}"
    return words, Call(**{**vars(call), "right": part})


def more_units(call: Call) -> float:
    """Return by which factor a healthy operator needs more units than with short rows."""
    is_sum = call.kwargs.get("name") in ADDS_ROWS
    return max(1.0, math.sqrt(call.args[0].shape[-1] / GROWS_FROM)) if is_sum else 1.0


def at_rows(x: torch.Tensor, name: str, places: torch.Tensor | None, *, gradients: bool) -> tuple[Any, ...]:
    """An operator of all rows, of whose result a few rows are kept; its gradient for ones too."""
    keep = slice(None) if places is None else places
    if not gradients:
        return (BY_ROWS[name](x)[keep],)
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        out = BY_ROWS[name](leaf)
        if not out.requires_grad:
            return (out[keep],)
        weights = torch.linspace(0.5, 1.5, out.shape[-1], device=out.device).bfloat16().to(out.dtype)
        (grad,) = torch.autograd.grad(out, leaf, weights.expand_as(out))
    return out.detach()[keep], grad[keep]


def _shape(source: random.Random, sizes: str) -> tuple[int, int]:
    """Many short rows, or few long ones."""
    near = source.choice(NEAR)
    if source.random() < 0.5:
        most = max(ELEMENT_BORDERS[sizes])
        rows = source.choice([one for one in ROW_BORDERS if one <= most]) + near
        fitting = [width for width in WIDTHS if width * rows <= 2 * most]
        return rows, source.choice(fitting)
    elements, width = source.choice(ELEMENT_BORDERS[sizes]), source.choice(WIDTHS)
    rows = max(1, elements // width + near)
    return (rows, width) if source.random() < 0.7 else (width, rows)


def _huge(source: random.Random, dtype: torch.dtype, most_rows: float) -> tuple[int, int]:
    """Beyond a border that memory for the type's numbers reaches: mostly many short rows."""
    gc.collect()  # what a case before had no memory for may still hold some
    elements = source.choice(ELEMENT_BORDERS["huge"]) if dtype.itemsize == 2 else min(ELEMENT_BORDERS["huge"])
    few = source.random() < 0.3
    one = source.choice(FEW_ROWS if few else [one for one in WIDTHS if elements // one < most_rows])
    other = elements // one + source.choice((1, 3))
    return (one, other) if few else (other, one)


def _places(rows: int, width: int) -> torch.Tensor:
    """The first rows, the last ones, and those on both sides of each border."""
    centres = {0, rows - 1, rows // 2}
    centres |= {border // width for border in (2**16, 2**23, 2**24, 2**31, 2**32)} | set(ROW_BORDERS)
    near = {centre + step for centre in centres for step in range(-KEPT, KEPT + 1)}
    return torch.tensor(sorted(one for one in near if 0 <= one < rows), device=device())


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _square(x: torch.Tensor) -> torch.Tensor:
    size = x.shape[-1]
    values = torch.arange(size * min(size, 8), device=x.device).view(size, -1) % 7 - 3
    return values.to(x.dtype)


def _labels(x: torch.Tensor) -> torch.Tensor:
    return (x.detach()[:, 0] > 0).long() * (x.shape[-1] - 1)


def _buckets(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(x), device=x.device) % 5


def _zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(5, x.shape[-1], dtype=_wide(x), device=x.device)
