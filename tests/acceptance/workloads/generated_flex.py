"""Masks and score functions as drawn expressions of a batch b, a head h, a query i and a key j.

In: a source of numbers. Out: a text; what it reads, by name; and a text as functions.

A function of FlexAttention reads one place, the plain formula all places at once, and both have one text.
"""

import functools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from workloads import device, operands

# A part, or "and", "or" or "not" of others.
Mask = str | tuple[Any, ...]
DISTANCES = (0, 1, 2, 3, 16, 63, 64, 100, 128)
PARTS = (
    "i >= j", "i + {n} >= j", "i - j <= {n}", "(i - j).abs() <= {n}", "document[b, i] == document[b, j]",
    "region[i] == region[j]", "(i >= {a}) & (i < {b}) & (j >= {c}) & (j < {d})", "j < prefix[b]",
    "(i >= {a}) & (i < {b}) & (j >= {c}) & (j < {d})", "j - i <= reach[h]", "kept[b, i, j]", "known[b, j]",
    "h % 2 == {m}", "b != {m}", "j % 3 == {m}", "i // 64 == j // 100", "i // 4 == j // 4", "i != {n}",
    "{x} % {p} == {y} % {p}", "{x} % {p} < {q}", "{x} // {p} == {y} // {p}", "{x} // {p} <= {y} // {q}",
    "(i - {n}) // {p} == (j - {n}) // {p}", "{x} // {p} % {q} == {m}", "{x} % {p} // {q} != {m}",
)  # fmt: skip
# What remainders and quotients are of: many are negative, and a window may be shifted.
POSITIONS = (
    "i", "j", "(i - j)", "(j - i)", "(i - {n})", "(j - {n})", "(i - j + {n})", "(j - sk)", "(-i)",
    "(2 * i - j)", "(document[b, i] - document[b, j])", "(region[i] - region[j])", "(h - i)",
)  # fmt: skip
DIVISORS = (2, 3, 5, 7, 16, 48, 64, 100, 128)
# The letters are its dimensions: l the longer of queries and keys, r the distances.
READ = {"document": "bl", "region": "l", "prefix": "b", "reach": "h", "kept": "bij", "known": "bj"}
LEARNED = {
    "scalar": "", "across": "i", "along": "j", "slope": "h", "gain": "h", "token": "bj", "near": "hr",
    "relative": "hr", "bias": "hij", "whole": "bhij",
}  # fmt: skip
BIASES = ("s + bias[bias_from + h, i, j]", "s + whole[whole_from + b, h, i, j]")
TERMS = (
    "(s / 5.0).tanh() * 5.0", "(s / 30.0).tanh() * 30.0", "s * scalar", "s + scalar * (i - j)",
    "s + across[i] * along[j]", "s + along[j]", "s + slope[slope_from + h] * (j - i)", "s * (1 + gain[h])",
    "s + token[b, j]", "s + near[near_from + h, (i - j).clamp(-8, 8) + 8]",
    "s + relative[relative_from + h, i - j + sk]", *BIASES, BIASES[0],
)  # fmt: skip
FAR = 2**31  # elements before the ones that are read


def draw_mask(source: random.Random, depth: int = 3) -> Mask:
    """An expression of parts."""
    kind = source.choice(("part", "and", "or", "not")) if depth else "part"
    if kind == "part":
        (a, b), (c, d) = (sorted((source.randrange(300), source.randrange(40, 300))) for _ in range(2))
        numbers = {"n": source.choice(DISTANCES), "m": source.randrange(2), "a": a, "b": b, "c": c, "d": d}
        numbers |= {one: source.choice(DIVISORS) for one in "pq"}
        places = {one: source.choice(POSITIONS).format(**numbers) for one in "xy"}
        return source.choice(PARTS).format(**numbers, **places)
    return kind, *(draw_mask(source, depth - 1) for _ in range(1 if kind == "not" else 2))


def draw_scores(source: random.Random) -> tuple[str, ...]:
    """The steps of a score function, each of the score s before it."""
    steps = [source.choice(TERMS) for _ in range(source.choice((0, 1, 1, 2, 3)))]
    hidden = f"torch.where({text(draw_mask(source, 1))}, s, s - 3.0)"
    return (*steps, *([hidden] if not source.randrange(4) else []))


def text(mask: Mask) -> str:
    """A mask's expression."""
    if isinstance(mask, str):
        return f"({mask})"
    inner = [text(one) for one in mask[1:]]
    return f"(~{inner[0]})" if mask[0] == "not" else f"({(' & ' if mask[0] == 'and' else ' | ').join(inner)})"


def smaller(mask: Mask) -> Iterator[Mask]:
    """What a mask is made of, and itself with a simpler part."""
    if isinstance(mask, tuple):
        yield from mask[1:]
        for n in range(1, len(mask)):
            yield from ((*mask[:n], one, *mask[n + 1 :]) for one in smaller(mask[n]))


def captured(
    texts: str, sizes: Sequence[int], dtype: torch.dtype, seed: int, *, gaps: bool
) -> dict[str, torch.Tensor]:
    """The tensors that texts read, with sizes in the order of their letters."""
    made, generator = {}, torch.Generator().manual_seed(seed)
    for name, letters in {**READ, **LEARNED}.items():
        if not reads(texts, name):
            continue
        shape = [sizes["bhijlr".index(letter)] for letter in letters]
        if name in LEARNED:
            one = torch.randn(shape, generator=generator).to(dtype)
        elif name in {"kept", "known"}:
            one = torch.rand(shape, generator=generator) < 0.7
        else:
            one = torch.randint(3 if "l" in letters else sizes[3] + 1, shape, generator=generator)
            one = one.sort(-1).values if name == "document" else one
        made[name] = operands.in_buffer(one.to(device()), 1, 2) if gaps else one.to(device())
    return made


def far_away(given: Mapping[str, torch.Tensor], scores: tuple[str, ...]) -> dict[str, Any]:
    """The same tensors, one of them after rows that nobody reads, so that its places need 64 bits."""
    name = next((one for one in given if any(f"{one}_from" in step for step in scores)), None)
    if name is None:
        return dict(given)
    rows = FAR // max(1, given[name][0].numel()) + 1
    behind = torch.cat((given[name].new_zeros(rows, *given[name].shape[1:]), given[name]))
    return {**given, name: behind, f"{name}_from": rows}


@functools.lru_cache(256)
def _made(names: tuple[str, ...], body: str) -> Any:
    # Closures, as users write them, and not globals. One text is one function, so it is compiled once.
    return eval(f"lambda {', '.join(names)}: lambda {body}", {})


def functions(mask: Mask, scores: tuple[str, ...], sk: int, given: Mapping[str, Any]) -> tuple[Any, Any]:
    """The mask's function and the scores', if there are any, with what they read."""
    given = {**{f"{name}_from": 0 for name in LEARNED}, "sk": sk, "torch": torch, **given}
    each = []
    for body, takes in ((text(mask) if mask else "", "b, h, i, j"), (_chained(scores), "s, b, h, i, j")):
        names = tuple(name for name in given if reads(body, name))
        each.append(_made(names, f"{takes}: {body}")(*(given[name] for name in names)) if body else None)
    return each[0], each[1]


def reads(body: str, name: str) -> bool:
    """Whether a text has a name in it."""
    return re.search(rf"\b{name}\b", body) is not None


def _chained(scores: tuple[str, ...]) -> str:
    body = "s" if scores else ""
    for step in scores:
        body = re.sub(r"\bs\b", f"({body})", step)
    return body
