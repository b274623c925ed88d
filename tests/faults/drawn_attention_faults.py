"""Faults of FlexAttention that nobody chose, drawn from a seed: a part, an effect, a condition, a place.

In: a fault seed, a count, cases a seed. Out: which of them the eager cases of seven seeds find.
It knows FlexAttention's arguments and no check. A processor gets gradients too, which torch's eager code has.
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

from workloads import generated, generated_attention, generated_draws, generated_judge
from workloads.generated_attention import Case

ATTEND, NEEDED = flex.flex_attention, generated_draws.ATTENTION_NEEDED
CONDITIONS = {
    "always": lambda _: True,
    "more than 64 queries": lambda g: g["query"].shape[2] > 64,
    "queries that fill no tile": lambda g: g["query"].shape[2] % 64,
    "a head of no power of two": lambda g: g["query"].shape[3].bit_count() > 1,
    "halves": lambda g: g["query"].dtype is not torch.float32,
    "several batches": lambda g: g["query"].shape[0] > 1,
    "grouped heads": lambda g: g["groups"] > 1,
    "an operand with gaps": lambda g: not all(g[one].is_contiguous() for one in ("query", "key", "value")),
}


def _hooked(change, one):
    """A tensor with a fault in its gradient; what has no gradient stays."""
    if isinstance(one, torch.Tensor) and one.requires_grad:
        one = one.view_as(one)
        one.register_hook(change)
    return one


def _of_read(change, function, *_):
    cells = tuple(types.CellType(_hooked(change, one.cell_contents)) for one in function.__closure__ or ())
    return types.FunctionType(function.__code__, function.__globals__, closure=cells or None)


def _cut(one, size, dim=-1):
    return one.index_fill(dim, torch.arange(one.shape[dim])[size:], 0) if one.dim() >= -dim else one


def _unstrided(one, *_):
    fits = one.untyped_storage().nbytes() >= (one.storage_offset() + one.numel()) * one.element_size()
    return one.as_strided(one.shape, torch.empty(one.shape, device="meta").stride()) if fits else one


def _in_turn(one, _, g):
    return one.unflatten(1, (-1, g["groups"])).transpose(1, 2).flatten(1, 2)


def _tile(p, i, j):
    return (i // p[0] == p[1]) & (j // p[0] == p[2])


def _high(x, g):
    return x.masked_fill(g["high"], torch.nan)


GRADIENTS = {
    "its gradient is lost": lambda grad: grad * 0,
    "its gradient is doubled": lambda grad: grad * 2,
    "its gradient is rounded to three bits": lambda grad: grad.to(torch.float8_e5m2).to(grad.dtype),
    "its gradient lacks the last numbers": lambda grad: _cut(grad, 16),
}
OPERAND = {
    "its strides are ignored": _unstrided,
    "its last rows are 0": lambda x, p, _: _cut(x, p[0], -2),
    **{words: lambda x, *_, change=change: _hooked(change, x) for words, change in GRADIENTS.items()},
}
# Of each part of a call, what becomes of it, with the place p and the call g.
# fmt: off
EFFECTS = {
    "mask": {
        "it is ignored in a tile": lambda f, p, _: lambda b, h, i, j: f(b, h, i, j) | _tile(p, i, j),
        "it hides a tile": lambda f, p, _: lambda b, h, i, j: f(b, h, i, j) & ~_tile(p, i, j),
        "it is off by one": lambda f, _, g: lambda b, h, i, j: f(b, h, i, (j + 1).clamp(max=g["last"])),
        "it has one head": lambda f, *_: lambda b, h, i, j: f(b, h * 0, i, j),
        "it has one batch": lambda f, *_: lambda b, h, i, j: f(b * 0, h, i, j),
    },
    "score_mod": {
        "it is left out in a tile": lambda f, p, _: lambda s, *x: torch.where(_tile(p, *x[2:]), s, f(s, *x)),
        "it is off by one": lambda f, _, g: lambda s, b, h, i, j: f(s, b, h, i, (j + 1).clamp(max=g["last"])),
        "it has one head": lambda f, *_: lambda s, b, h, i, j: f(s, b, h * 0, i, j),
        "it has one batch": lambda f, *_: lambda s, b, h, i, j: f(s, b * 0, h, i, j),
        **{words: functools.partial(_of_read, change) for words, change in GRADIENTS.items()},
    },
    "query": {**OPERAND, "its scale is another one": lambda x, *_: x * 1.0625},
    "key": {**OPERAND, "its heads are in turn": _in_turn},
    "value": OPERAND,
    "out": {
        "NaN above a score": lambda x, _, g: _high(x, g),
        "its gradient is NaN above a score": lambda x, _, g: _hooked(functools.partial(_high, g=g), x),
        "it lacks the last rows": lambda x, p, _: _cut(x, p[0], -2),
    },
    "lse": {
        "it is in base 2": lambda x, *_: x * 1.4427,
        "it is 0 for an empty row": lambda x, *_: x.nan_to_num(neginf=0.0),
        "it has no gradient": lambda x, *_: x.detach(),
    },
}
# fmt: on


class Drawn(NamedTuple):
    """One fault: `place` is the size of a tile and its numbers, `score` where it strikes, if by scores."""

    part: str
    effect: str
    condition: str
    place: tuple[int, int, int]
    score: float

    def attend(
        self, query: Any, key: Any, value: Any, *, block_mask: Any, return_lse: bool, **given: Any
    ) -> Any:
        """FlexAttention with the fault."""
        groups = query.shape[1] // key.shape[1]
        key, value = (one.repeat_interleave(groups, 1) if groups > 1 else one for one in (key, value))
        high = ((query.float() @ key.float().mT).abs() > self.score).any(-1, keepdim=True)
        mask = block_mask and block_mask.mask_mod
        g = {
            "query": query,
            "key": key,
            "value": value,
            "mask": mask,
            "high": high,
            "groups": groups,
            **given,
        }
        g["last"] = key.shape[2] - 1
        strikes = CONDITIONS[self.condition](g)
        self._strike(g, strikes=strikes)
        if mask is not None:
            block_mask = copy.copy(block_mask)
            block_mask.mask_mod = g["mask"]
        parts = {one: g[one] for one in ("query", "key", "value", *given)}
        g["out"], g["lse"] = ATTEND(block_mask=block_mask, return_lse=True, **parts)
        self._strike(g, strikes=strikes and self.part in {"out", "lse"})
        return (g["out"], g["lse"]) if return_lse else g["out"]

    def _strike(self, g: dict[str, Any], *, strikes: bool) -> None:
        if strikes and g.get(self.part) is not None:
            g[self.part] = EFFECTS[self.part][self.effect](g[self.part], self.place, g)


def draw(seed: int) -> Any:
    """The faults of a seed; each part is as likely as any other."""
    source = random.Random(f"attention faults {seed}")
    while True:
        part = source.choice(list(EFFECTS))
        place = source.choice((16, 64, 128)), source.randrange(2), source.randrange(3)
        condition = source.choice(["always"] * len(CONDITIONS) + list(CONDITIONS))
        yield Drawn(
            part, source.choice(list(EFFECTS[part])), condition, place, source.choice((1e2, 1e4, 1e8))
        )


@contextlib.contextmanager
def planted(fault: Drawn | None) -> Any:
    """This process's FlexAttention with the fault, or without, and with gradients."""
    attend = fault.attend if fault else ATTEND
    flex_has = mock.patch.multiple(flex, _validate_device=mock.Mock(), flex_attention=attend)
    with generated._plain(), flex_has, mock.patch.object(generated_attention, "NO_GRADIENTS", set()):
        yield


@functools.cache
def healthy(case: Case) -> Any:
    """A case's call, what float64 says, and what it gives; nothing if it fails."""
    with planted(None):
        call = generated_attention.made(case)
        reference = generated_judge.Reference(call)
        said = generated._judged(call, NEEDED, reference)
        return None if said is None or said[0] > 1 else (call, reference, generated_judge.results(call))


def finds(fault: Drawn, case: Case) -> bool:
    """Whether a case fails with the fault, and not without it; what torch then refuses does not count."""
    call, reference, right = healthy(case) or (None, None, None)
    if call is None:
        return False
    with planted(fault), contextlib.suppress(RuntimeError, TypeError, ValueError, IndexError):
        got = [one.nan_to_num(0.5) for one in generated_judge.results(call)]
        changed = not all(map(torch.equal, got, (one.nan_to_num(0.5) for one in right)))
        return changed and (generated._judged(call, NEEDED, reference) or (0,))[0] > 1
    return False


def main(fault_seed: int, count: int, cases: int) -> None:
    """Print what is found."""
    found, numbers = [], itertools.product(range(7), range(cases))
    sources = {(seed, n): generated.source("attention", seed, n) for seed, n in numbers}
    drawn = {key: generated_attention.draw(one, key[0] * 1000 + key[1]) for key, one in sources.items()}
    eager = {key: case for key, case in drawn.items() if case.backend == "flex"}
    for fault in itertools.islice(draw(fault_seed), count):
        first = next((key for key, case in eager.items() if finds(fault, case)), (7, 0))
        found.append(first[0])
        print(first, fault, flush=True)  # noqa: T201
    print([f"{sum(one < seeds for one in found)} of {count} in {seeds}" for seeds in (1, 3, 7)])  # noqa: T201


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
