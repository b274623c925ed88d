"""What generated operators do to a sample: other sizes, other numbers, other places in memory.

In: a call, a source of numbers. Out: the call, or `None` where it does not fit.
"""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from workloads import generated_elsewhere, generated_judge, generated_left, operands
from workloads.generated_judge import Call

MOST_ELEMENTS = 2**18  # of one operand
MOST_RESULTS = 64  # of one call: each has a gradient, and kernels, of its own
MOST_PRODUCTS = 2**25  # of the elements of two operands: under a second where each meets each
# On both sides of what kernels cut work into: vectors, tiles, warps, blocks.
SHORT = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33)
LONG = (63, 65, 67, 127, 129, 131, 191, 255, 257, 259, 511, 513, 515)
VERY_LONG = (1023, 1025, 2049, 4095, 4097, 8193, 16385)
Varied = Callable[[Call, random.Random], Call | None]
Changed = Callable[[Call, random.Random], Call]


def _generator(source: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(source.randrange(2**31))


def _main(call: Call) -> torch.Tensor | None:
    """The operand that says what a size is: the first floating one that has a dimension."""
    return next((one for one in call.tensors() if one.is_floating_point() and one.dim()), None)


def _resized(call: Call, dim: int, size: int, *, everywhere: bool) -> Call | None:
    """Another size of one dimension of the main operand, and of what shares it in other operands.

    `everywhere`: each dimension of this size in any operand; otherwise the dimension at the same place.
    """
    main = _main(call)
    if main is None or dim >= main.dim():
        return None
    old, back = main.shape[dim], dim - main.dim()
    numbers = torch.arange(size, device=main.device) % old

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        places = range(leaf.dim()) if everywhere else [back + leaf.dim()] if leaf.dim() >= -back else []
        chosen = [n for n in places if leaf.shape[n] == old]
        if leaf.numel() // old ** len(chosen) * size ** len(chosen) > MOST_ELEMENTS:
            raise NotImplementedError("not supported: more elements than a case may have")
        for n in chosen:
            leaf = leaf.index_select(n, numbers)
        return leaf

    other = call.mapped(change)
    _require_few_products(other)
    return other


def _require_few_products(call: Call) -> None:
    """Refuse two large operands of different shapes: a convolution multiplies each element by each."""
    given = sorted((one for one in call.tensors() if one.is_floating_point()), key=torch.Tensor.numel)
    for one in given[:-1]:
        if one.shape != given[-1].shape and one.numel() * given[-1].numel() > MOST_PRODUCTS:
            raise NotImplementedError("not supported: more products than a case may have")


def renumbered(call: Call, source: random.Random) -> Call:
    """Each number times another one between a half and one, so that repeated rows differ."""
    generator = _generator(source)

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        factor = 1 - torch.rand(leaf.shape, generator=generator) / 2
        return (leaf * factor.to(leaf.device)).to(leaf.dtype)

    return call.mapped(change)


def rescaled(call: Call, source: random.Random) -> Call:
    """Each floating operand times a number between a half and one: its structure and its places stay."""

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        factor = source.uniform(0.5, 1)
        return operands.in_same_places(leaf, lambda one: one * factor)

    return replace(call.mapped(change), seed=call.seed + source.randrange(1, 2**20))


def _sized(choose: Callable[[torch.Tensor, random.Random], dict[int, int]]) -> Varied:
    """Another size of some dimensions, where the function takes it; of what it takes, the most."""

    def varied(call: Call, source: random.Random) -> Call | None:
        main = _main(call)
        wanted = choose(main, source) if main is not None else {}
        everywhere, first = source.random() < 0.5, call
        for dim, size in wanted.items():
            for way in (everywhere, not everywhere):
                other = _fitting(call, dim, size, everywhere=way)
                if other is not None:
                    call = other
                    break
        return None if call is first else renumbered(call, source)

    return varied


def _fitting(call: Call, dim: int, size: int, *, everywhere: bool) -> Call | None:
    """The resized call, if the function takes it and its results stay small.

    Twice the size is tried first: a result that grows by more than that would not stay small.
    """
    main = _main(call)
    old = main.shape[dim] if main is not None and dim < main.dim() else size
    try:
        if size > 2 * old:
            was, twice = _elements(call), _elements(_resized(call, dim, 2 * old, everywhere=everywhere))
            if was and twice * (twice / was) ** math.log2(size / old / 2) > 4 * MOST_ELEMENTS:
                return None
        other = _resized(call, dim, size, everywhere=everywhere)
        _elements(other)
    except generated_left.REFUSED:  # the size does not fit the sample
        return None
    return other


def _elements(call: Call | None) -> int:
    if call is None:
        return 0
    call = generated_judge.wide(call) if generated_elsewhere.place() else call  # a processor lacks some types
    found = generated_judge.results(replace(call, gradients=False))
    if len(found) > MOST_RESULTS:
        raise NotImplementedError("not supported: more results than a case may have")
    return sum(one.numel() for one in found)


def _tiled(main: torch.Tensor, source: random.Random) -> dict[int, int]:
    """Rows and columns beyond the tiles of a kernel."""
    columns = {main.dim() - 1: source.choice(LONG[3:])}
    return {0: source.choice(LONG[1:6]), **columns} if main.dim() > 1 else columns


def _huge(main: torch.Tensor, source: random.Random) -> dict[int, int]:
    """Few elements more than 2^16, by many rows or by long ones."""
    dim = source.choice((0, main.dim() - 1))
    rest = main.numel() // main.shape[dim]
    return {dim: 2**16 // rest + source.choice((1, 2, 3, 17))}


def _lopsided(main: torch.Tensor, source: random.Random) -> dict[int, int]:
    """One row of many elements, or many rows of one to three."""
    if main.dim() < 2:
        return {0: source.choice(VERY_LONG)}
    one, many = source.choice(SHORT[:3]), source.choice(VERY_LONG)
    return {0: 1, main.dim() - 1: many} if source.random() < 0.6 else {0: many, main.dim() - 1: one}


def _odd(main: torch.Tensor, source: random.Random) -> dict[int, int]:
    """Small and odd sizes of each dimension."""
    return {n: source.choice(SHORT) for n in range(main.dim())}


def _numbers(change: Callable[[torch.Tensor, random.Random], torch.Tensor], share: float = 0.5) -> Changed:
    """Other numbers in some of the floating operands, in one at least."""

    def varied(call: Call, source: random.Random) -> Call:
        given = [one for one in call.tensors() if one.is_floating_point()]
        sure = source.choice(given)
        chosen = {id(one) for one in given if one is sure or source.random() < share}
        return call.mapped(lambda leaf: change(leaf, source) if id(leaf) in chosen else leaf)

    return varied


def _uneven(one: torch.Tensor, source: random.Random) -> torch.Tensor:
    factors = operands.uneven(one.shape, _generator(source))
    return (one * factors.to(one.device)).to(one.dtype)


def _scaled(one: torch.Tensor, source: random.Random) -> torch.Tensor:
    half = one.dtype is torch.float16
    power = source.choice((-12, -6, 4, 7)) if half else source.choice((-24, -12, -6, 4, 8, 15))
    return one * 2.0**power


def _not_finite(one: torch.Tensor, source: random.Random) -> torch.Tensor:
    """One element in eight is infinite or no number; one case in three has one of the kinds alone."""
    kinds = source.choice((("nan",), ("inf",), ("-inf",), ("inf", "-inf"), ("inf", "-inf", "nan"), ("nan",)))
    values = torch.tensor([float(kind) for kind in kinds], dtype=one.dtype)
    generator = _generator(source)
    which = values[torch.randint(0, len(values), one.shape, generator=generator)]
    where = torch.rand(one.shape, generator=generator) < 0.125
    return torch.where(where.to(one.device), which.to(one.device), one)


def _zero_row(one: torch.Tensor, source: random.Random) -> torch.Tensor:
    changed = one.clone()
    if one.dim():
        changed.select(n := source.randrange(one.dim()), source.randrange(one.shape[n])).zero_()
    return changed


def _holes(call: Call, source: random.Random) -> Call | None:
    """Masks that are nearly empty, half full or nearly full."""
    masks = [one for one in call.tensors() if one.dtype is torch.bool and one.dim()]
    if not masks:
        return None
    chosen, share = source.choice(masks), source.choice((0.05, 0.5, 0.95))
    kept = (torch.rand(chosen.shape, generator=_generator(source)) < share).to(chosen.device)
    return call.mapped(lambda leaf: kept if leaf is chosen else leaf)


def _expanded(one: torch.Tensor, source: random.Random) -> torch.Tensor:
    """One slice for all, with stride 0."""
    wide = [n for n, size in enumerate(one.shape) if size > 1]
    return one.narrow(source.choice(wide), 0, 1).expand(one.shape) if wide else one


def _turned(one: torch.Tensor, source: random.Random) -> torch.Tensor:
    """Equal numbers, another order of the dimensions in memory, after a few unused elements."""
    order = list(range(one.dim()))
    source.shuffle(order)
    offset = source.randrange(1, 5)
    flat = torch.zeros(one.numel() + offset, dtype=one.dtype, device=one.device)
    if one.is_floating_point():
        flat.fill_(torch.nan)
    view = (
        flat[offset:].view([one.shape[n] for n in order]).permute([order.index(n) for n in range(one.dim())])
    )
    return view.copy_(one)


def _spaced(one: torch.Tensor, source: random.Random) -> torch.Tensor:
    return operands.in_buffer(one, source.randrange(1, 5), source.choice((2, 3)))


def in_other_places(call: Call, source: random.Random) -> Call:
    """The same numbers, each operand a view: turned or with gaps, inside a buffer."""

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or 0 in leaf.stride():
            return leaf
        return (_spaced if source.random() < 0.6 or leaf.dim() < 2 else _turned)(leaf, source)

    return replace(call.mapped(change), apart=True)


SIZES: dict[str, Varied] = {
    "tiled": _sized(_tiled),
    "huge": _sized(_huge),
    "lopsided": _sized(_lopsided),
    "odd": _sized(_odd),
}
NUMBERS: dict[str, Varied] = {
    "uneven": _numbers(_uneven),
    "scaled": _numbers(_scaled, share=0.2),
    "zero row": _numbers(_zero_row),
    "holes": _holes,
}
not_finite, expanded = _numbers(_not_finite, share=0.3), _numbers(_expanded)
