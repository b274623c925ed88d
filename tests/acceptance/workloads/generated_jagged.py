"""Generated steps of sequences of any lengths: jagged tensors, block-sparse weights, a weight for each one.

In: a source of numbers. Out: a call. Each step is one function that takes a jagged tensor, and, in the plain
form, a batch of one sequence: float64 does the same sequence by sequence.
"""

import contextlib
import functools
import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from workloads import device, generated_left, operands
from workloads.generated_attention import FORWARD, PASSED
from workloads.generated_judge import FLOATS, HALVES, Call

LENGTHS = (0, 1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 65, 129, 257)
WIDTHS = (32, 64, 128)
COMPILED, SPARSE_BLOCK = 6, 16  # one case in so many is compiled
# Weights with zeros, by their mask.
SPARSE = ("csr", "bsr", "2:4")
Step = Callable[[torch.Tensor, tuple[torch.Tensor, ...]], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """All that makes a case: steps one after the other, and what is made of each sequence in the end."""

    dtype: str
    seed: int
    lengths: tuple[int, ...]
    width: int
    steps: tuple[str, ...] = ()
    end: str = ""
    compiled: str = ""


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def _largest(x: torch.Tensor) -> torch.Tensor:
    """The largest numbers of a sequence."""
    if not x.is_nested and x.shape[1] > 1:
        two = x.detach().topk(2, 1).values
        GAPS.append(float((two[:, 0] - two[:, 1]).min() / x.detach().abs().max()))
    return x.amax(1)


STEPS: dict[str, Step] = {
    "linear": lambda x, w: F.linear(x, w[0], w[1]),
    "layer_norm": lambda x, w: F.layer_norm(x, x.shape[-1:], w[1], w[1]),
    "rms_norm": lambda x, w: F.rms_norm(x, x.shape[-1:], w[1], 1e-5),
    "softmax": lambda x, _: x.softmax(-1),
    "gelu": lambda x, _: F.gelu(x),
    "gated": lambda x, _: x * x.sigmoid(),
    "added": lambda x, w: x + w[1],
    "halves swapped": lambda x, _: torch.cat(x.chunk(2, -1)[::-1], 2),
    "softmax over heads": lambda x, _: x.unflatten(-1, (2, -1)).softmax(2).flatten(2),
    "mean of heads": lambda x, _: x + torch.cat([x.unflatten(-1, (2, -1)).mean(2)] * 2, -1),
    "columns turned": lambda x, _: x.unflatten(-1, (2, -1)).transpose(2, 3).flatten(2),
    "beside its largest": lambda x, w: x * w[1] - _largest(x).unsqueeze(1),
    "attention": lambda x, w: (
        F.scaled_dot_product_attention(_heads(x), _heads(x * w[1]), _heads(x)).transpose(1, 2).flatten(2)
    ),
    "causal attention": lambda x, w: (
        F.scaled_dot_product_attention(_heads(x), _heads(x * w[1]), _heads(x), is_causal=True)
        .transpose(1, 2).flatten(2)
    ),
}  # fmt: skip
PRODUCTS = ("experts", *SPARSE)  # of the values, which lie one after the other
ENDS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "": lambda x, _: x,
    "summed over itself": lambda x, _: x.sum(1),
    "its largest": lambda x, _: _largest(x),
    "softmax over itself": lambda x, _: x.softmax(1),
    "each summed": lambda x, _: torch.stack([one.sum(0) for one in x.unbind()]),
    "padded": lambda x, most: (
        x.to_padded_tensor(0.0) if x.is_nested else F.pad(x, (0, 0, 0, most - x.shape[1]))
    ),
}  # fmt: skip
WITHOUT_GRADIENTS = {"summed over itself", "bsr"}  # torch has none, and says so
LARGEST = {"its largest", "beside its largest"}
CLOSE = 2.0**-22  # of the largest number: below that roundings say which one it is, and gets the gradient
GAPS: list[float] = []  # between the two largest numbers of a sequence, since somebody emptied it
ENDED = ("", "each summed", "its largest", "padded")  # more often: these have gradients
# Backward gets forward's dimension, and not that of the values: docs/reference/trust.md.
WRONG_GRADIENTS = {"softmax over itself", "softmax over heads"}
ON_GPUS = ("causal attention", "2:4")


def draw(source: random.Random, seed: int) -> Case:
    """One case."""
    few, whole = source.randint(1, 6), source.randrange(4)
    lengths = [source.choice(LENGTHS[whole > 0 :]) for _ in range(few)]
    compiled = "" if source.randrange(COMPILED) else source.choice(("aot_eager", "inductor"))
    names = [one for one in (*STEPS, *STEPS, *PRODUCTS) if device().type != "cpu" or one not in ON_GPUS]
    names = [one for one in names if not compiled or one not in SPARSE]  # no tracer takes them
    return Case(
        str(source.choice(FLOATS)).removeprefix("torch."), seed, tuple(lengths if any(lengths) else [3, 0]),
        source.choice(WIDTHS), tuple(source.choice(names) for _ in range(source.randint(1, 3))),
        source.choice((*ENDS, *ENDED)), compiled,
    )  # fmt: skip


def made(case: Case) -> Call:
    """A case as a call."""
    dtype, width = getattr(torch, case.dtype), case.width
    shapes = (sum(case.lengths), width), (width, width), (width,), (len(case.lengths), width, width)
    values, *learned = (
        operands.normal(
            *shape, dtype=dtype, seed=case.seed + n, scale=1.0 if len(shape) < 2 or not n else width**-0.5
        )
        for n, shape in enumerate(shapes)
    )
    parts = {case.end, *case.steps}
    forward, passed = bool(parts & WITHOUT_GRADIENTS), bool(parts & WRONG_GRADIENTS)
    halves = dtype in HALVES and case.compiled == "inductor"  # pytorch#195214: its gradient is NaN
    passed |= halves and bool(parts & LARGEST)
    fixed = frozenset({1} if set(case.steps) & set(SPARSE) else ())  # torch has no gradient of these weights
    right = Call(
        plain, (values, tuple(learned)), {"case": case}, dtype, not (forward or passed), case.seed,
        fixed=fixed, noisy=True, smaller=functools.partial(_smaller, case),
        words=f"jagged({case})" + forward * f", {FORWARD}" + passed * f", {PASSED}",
    )  # fmt: skip
    if parts & LARGEST and right.gradients and _is_undecided(right):
        right = replace(right, gradients=False, words=f"{right.words}, {PASSED}")
    return replace(right, function=fused, right=right)


def _is_undecided(right: Call) -> bool:
    """Whether in float64 the two largest numbers of a sequence are one number, but for roundings."""
    GAPS.clear()
    with contextlib.suppress(*generated_left.REFUSED), torch.no_grad():  # what refuses it is left later
        values, learned = right.args
        plain(values.double(), tuple(one.double() for one in learned), **right.kwargs)
    return min(GAPS, default=1.0) < CLOSE


def _smaller(case: Case) -> Iterator[Call]:
    """The case with fewer steps, or with fewer or shorter sequences."""
    others: list[dict[str, Any]] = [{"compiled": ""}, {"end": ""}, {"width": WIDTHS[0]}]
    others += [{"steps": case.steps[:n] + case.steps[n + 1 :]} for n in range(len(case.steps))]
    for n, length in enumerate(case.lengths):
        rest = case.lengths[:n], case.lengths[n + 1 :]
        others += [{"lengths": rest[0] + rest[1]}, {"lengths": (*rest[0], length // 2, *rest[1])}]
    for other in others:
        one = replace(case, **other)
        if one != case and any(one.lengths):
            yield made(one)


def kept(name: str, weight: torch.Tensor) -> torch.Tensor:
    """A weight with zeros: of single numbers, of blocks, or of two of each four."""
    rows, columns = (torch.arange(size, device=weight.device) for size in weight.shape)
    if name == "2:4":
        held = (columns + rows[:, None]) % 4 < 2
    else:
        block = SPARSE_BLOCK if name == "bsr" else 1
        held = (rows[:, None] // block * 5 + columns // block * 3) % 7 < 3
    return weight * held


def product(
    name: str, x: torch.Tensor, learned: tuple[torch.Tensor, ...], offsets: torch.Tensor
) -> torch.Tensor:
    """The product of values with a weight for each sequence, or with one that is kept without its zeros."""
    if name == "experts":
        return torch._grouped_mm(x, learned[2], offs=offsets[1:].int())
    dense = kept(name, learned[0].detach())
    if name == "2:4":
        return F.linear(x, torch.sparse.to_sparse_semi_structured(dense))
    stored = dense.to_sparse_csr() if name == "csr" else dense.to_sparse_bsr((SPARSE_BLOCK,) * 2)
    return (stored @ x.mT.contiguous()).mT


def fused(values: torch.Tensor, learned: tuple[torch.Tensor, ...], *, case: Case) -> torch.Tensor:
    """The steps of a jagged tensor."""
    offsets = torch.tensor([0, *case.lengths], device=values.device).cumsum(0)
    takes = inspect.signature(torch.nested.nested_tensor_from_jagged).parameters
    known = {"min_seqlen": min(case.lengths), "max_seqlen": max(case.lengths)}
    ends = {name: end for name, end in known.items() if name in takes}  # an older torch takes none

    def whole(values: torch.Tensor, learned: tuple[torch.Tensor, ...]) -> torch.Tensor:
        x = torch.nested.nested_tensor_from_jagged(values, offsets, **ends)
        for name in case.steps:
            if name in STEPS:
                x = STEPS[name](x, learned)
            else:
                out = product(name, x.values(), learned, offsets)
                x = torch.nested.nested_tensor_from_jagged(out, offsets, **ends)
        out = ENDS[case.end](x, max(case.lengths))
        return out.values() if out.is_nested else out

    if case.compiled:
        torch._dynamo.reset()
        whole = torch.compile(whole, fullgraph=True, backend=case.compiled)
    return whole(values, learned)


def plain(values: torch.Tensor, learned: tuple[torch.Tensor, ...], *, case: Case) -> torch.Tensor:
    """The same, one sequence after the other."""
    found = []
    for n, one in enumerate(values.split(case.lengths)):
        x = one[None]
        for name in case.steps:
            if name in STEPS:
                x = STEPS[name](x, learned)
            else:
                x = x @ (learned[2][n] if name == "experts" else kept(name, learned[0]).mT)
        found.append(ENDS[case.end](x, max(case.lengths)))
    joined = case.end in ("summed over itself", "each summed", "its largest", "padded")
    return torch.cat(found) if joined else torch.cat([one[0] for one in found])
