"""Faults of FlexAttention that nobody chose: a part, an effect, a condition and a place, drawn from a seed.

In: a fault seed, a count, cases a seed. Out: which faults the eager cases of seven seeds find.
It knows FlexAttention's arguments and nothing of the checks. Gradients are torch's eager ones, which torch
has on processors too, but does not let them have.
"""

import contextlib
import copy
import functools
import itertools
import random
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.nn.attention import flex_attention as flex

sys.path.insert(0, str(Path(__file__).parents[1] / "acceptance"))

from workloads import generated, generated_attention, generated_judge

ATTEND, FAMILY, NEEDED = flex.flex_attention, "attention", generated.ATTENTION_NEEDED
REFUSED = (RuntimeError, TypeError, ValueError, IndexError)
CONDITIONS = {
    "always": lambda _: True,
    "more than 64 queries": lambda g: g["query"].shape[2] > 64,
    "queries that fill no tile": lambda g: g["query"].shape[2] % 64,
    "a head of no power of two": lambda g: g["query"].shape[3].bit_count() > 1,
    "halves": lambda g: g["query"].dtype is not torch.float32,
    "several batches": lambda g: g["query"].shape[0] > 1,
    "grouped heads": lambda g: g["query"].shape[1] > g["key"].shape[1],
    "a mask and a score function": lambda g: g["mask"] and g["score_mod"],
    "an operand with gaps": lambda g: not all(g[one].is_contiguous() for one in ("query", "key", "value")),
}


def _hooked(change, one):
    """A tensor with a fault in its gradient, and what is no such tensor as it is."""
    if isinstance(one, torch.Tensor) and one.requires_grad:
        one = one.view_as(one)
        one.register_hook(change)
    return one


def _of_read(change, function, place, _):
    """The function with a fault in the gradients of all that it reads."""
    hooked = functools.partial(_hooked, functools.partial(change, p=place))
    cells = tuple(types.CellType(hooked(one.cell_contents)) for one in function.__closure__ or ())
    return types.FunctionType(function.__code__, function.__globals__, closure=cells or None)


def _cut(one, dim, place):
    return one.index_fill(dim, torch.arange(one.shape[dim])[place[0] :], 0) if one.dim() >= -dim else one


def _unstrided(one, *_):
    wanted = (one.storage_offset() + one.numel()) * one.element_size()
    fits = one.untyped_storage().nbytes() >= wanted
    return one.as_strided(one.shape, torch.empty(one.shape, device="meta").stride()) if fits else one


def _tile(p, i, j):
    return (i // p[0] == p[1]) & (j // p[0] == p[2])


def _next(j, g):
    return (j + 1).clamp(max=g["key"].shape[2] - 1)


GRADIENTS = {
    "its gradient is lost": lambda grad, p: grad * 0,
    "its gradient is doubled": lambda grad, p: grad * 2,
    "its gradient is rounded to three bits": lambda grad, p: grad.to(torch.float8_e5m2).to(grad.dtype),
    "its gradient lacks the last rows": lambda grad, p: _cut(grad, -2, p),
    "its gradient lacks the last numbers": lambda grad, p: _cut(grad, -1, p),
}
OPERAND = {
    "its strides are ignored": _unstrided,
    **{
        words: lambda x, p, _, change=change: _hooked(functools.partial(change, p=p), x)
        for words, change in GRADIENTS.items()
    },
}
# Of each part of a call what it becomes, with the place and the call.
EFFECTS = {
    "mask": {
        "it is ignored in a tile": lambda f, p, _: lambda b, h, i, j: f(b, h, i, j) | _tile(p, i, j),
        "it hides a tile": lambda f, p, _: lambda b, h, i, j: f(b, h, i, j) & ~_tile(p, i, j),
        "its keys are off by one": lambda f, _, g: lambda b, h, i, j: f(b, h, i, _next(j, g)),
        "it has one head": lambda f, *_: lambda b, h, i, j: f(b, h * 0, i, j),
        "it has one batch": lambda f, *_: lambda b, h, i, j: f(b * 0, h, i, j),
        "it hides the last keys": lambda f, p, g: lambda b, h, i, j: (
            f(b, h, i, j) & (j < (g["key"].shape[2] // p[0] * p[0] or 1))
        ),
    },
    "score_mod": {
        "it is left out in a tile": lambda f, p, _: lambda s, b, h, i, j: torch.where(
            _tile(p, i, j), s, f(s, b, h, i, j)
        ),
        "its keys are off by one": lambda f, _, g: lambda s, b, h, i, j: f(s, b, h, i, _next(j, g)),
        "it has one head": lambda f, *_: lambda s, b, h, i, j: f(s, b, h * 0, i, j),
        "it has one batch": lambda f, *_: lambda s, b, h, i, j: f(s, b * 0, h, i, j),
        **{words: functools.partial(_of_read, change) for words, change in GRADIENTS.items()},
    },
    "query": {**OPERAND, "its scale is another one": lambda x, *_: x * 1.0625},
    "key": {**OPERAND, "its heads are in turn": lambda x, _, g: x.repeat(1, g["groups"], 1, 1)},
    "value": {**OPERAND, "its heads are in turn": lambda x, _, g: x.repeat(1, g["groups"], 1, 1)},
    "out": {
        "NaN above a score": lambda x, _, g: x.masked_fill(g["high"], torch.nan),
        "its gradient is NaN above a score": lambda x, _, g: _hooked(lambda d: d.masked_fill(g["high"], torch.nan), x),
        "it lacks the last rows": lambda x, p, _: _cut(x, -2, p),
    },
    "lse": {
        "it is in base 2": lambda x, *_: x * 1.4427,
        "it is 0 for an empty row": lambda x, *_: x.nan_to_num(neginf=0.0),
        "it has no gradient": lambda x, *_: x.detach(),
    },
}  # fmt: skip


class Drawn(NamedTuple):
    """One fault: `place` is the size of a tile and its numbers, `score` where it strikes, if by scores."""

    part: str
    effect: str
    condition: str
    place: tuple[int, int, int]
    score: float

    def attend(self, query: Any, key: Any, value: Any, *, block_mask: Any, return_lse: bool, **given: Any) -> Any:
        """FlexAttention with the fault."""
        groups = query.shape[1] // key.shape[1]
        g = {"query": query, "key": key, "value": value, "mask": block_mask and block_mask.mask_mod, "groups": groups}
        g |= given
        before = query.float() @ key.float().repeat_interleave(groups, 1).mT
        g["high"] = (before.abs() > self.score).any(-1, keepdim=True)
        strikes = CONDITIONS[self.condition](g)
        if strikes and g.get(self.part) is not None:
            g[self.part] = EFFECTS[self.part][self.effect](g[self.part], self.place, g)
        if block_mask is not None:
            block_mask = copy.copy(block_mask)
            block_mask.mask_mod = g["mask"]
        if g["key"].shape[1] != g["value"].shape[1]:
            other = "key" if self.part == "value" else "value"
            g[other] = g[other].repeat_interleave(groups, 1)
        parts = {one: g[one] for one in ("query", "key", "value", *given)}
        g["out"], g["lse"] = ATTEND(block_mask=block_mask, return_lse=True, **parts)
        if strikes and self.part in {"out", "lse"}:
            g[self.part] = EFFECTS[self.part][self.effect](g[self.part], self.place, g)
        return (g["out"], g["lse"]) if return_lse else g["out"]


def draw(seed: int) -> Any:
    """The faults of a seed; each part is as likely as any other."""
    source = random.Random(f"attention faults {seed}")
    while True:
        part = source.choice(list(EFFECTS))
        place = source.choice((16, 64, 128)), source.randrange(2), source.randrange(3)
        condition = source.choice(["always"] * len(CONDITIONS) + list(CONDITIONS))
        yield Drawn(part, source.choice(list(EFFECTS[part])), condition, place, source.choice((1e2, 1e4, 1e8)))


@contextlib.contextmanager
def planted(fault: Drawn | None) -> Any:
    """This process's FlexAttention with the fault, or without, and with gradients."""
    attend = fault.attend if fault else ATTEND
    with (
        generated._plain(),
        mock.patch.multiple(flex, _validate_device=mock.Mock(), flex_attention=attend),
        mock.patch.object(generated_attention, "NO_GRADIENTS", set()),
    ):
        yield


@functools.cache
def healthy(seed: int, number: int) -> Any:
    """A case's call, what float64 says, and what it gives; nothing if it is not eager, or fails."""
    if generated_attention.draw(generated.source(FAMILY, seed, number), 0).backend != "flex":
        return None
    call = generated._drawn(FAMILY, seed, number, "small")[1][0][1]
    reference = generated_judge.Reference(call)
    said = generated._judged(call, NEEDED, reference)
    return None if said is None or said[0] > 1 else (call, reference, generated_judge.results(call))


def finds(fault: Drawn, seed: int, number: int) -> bool:
    """Whether a case fails with the fault, and not without it; one that torch then refuses does not."""
    with planted(None):
        case = healthy(seed, number)
    if case is None:
        return False
    call, reference, right = case
    with planted(fault), contextlib.suppress(*REFUSED):
        got = generated_judge.results(call)
        if any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(got, right, strict=True)):
            said = generated._judged(call, NEEDED, reference)
            return said is not None and said[0] > 1
    return False


def main(fault_seed: int, count: int, cases: int) -> None:
    """Print what is found."""
    found = []
    for fault in itertools.islice(draw(fault_seed), count):
        first = next((one for one in itertools.product(range(7), range(cases)) if finds(fault, *one)), (7, 0))
        found.append(first[0])
        print(first, fault, flush=True)  # noqa: T201
    print([f"{sum(one < seeds for one in found)} of {count} in {seeds}" for seeds in (1, 3, 7)])  # noqa: T201


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
