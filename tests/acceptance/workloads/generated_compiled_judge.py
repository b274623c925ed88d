"""Who judges a compiled program: eager mode, and float64 where they differ. In: its results. Out: margin.

What a healthy compiler gets wrong is passed over, and counted.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from workloads import (
    gates,
    generated_compiled_items,
    generated_compiled_known,
    generated_doubts,
    generated_elsewhere,
    generated_judge,
    generated_left,
    generated_operators,
)
from workloads.generated_compiled_known import NEAR

if TYPE_CHECKING:
    from workloads.generated_compiled_items import Item
    from workloads.generated_judge import Call

NEEDED, FACTOR = 4.0, 4.0  # units, as of other generated cases
EXCUSED = 512.0  # beyond this, float64 does not say what eager mode means
Judged = tuple[float, str]
Results = list[torch.Tensor]


def judge(item: Item, got: Results) -> Judged | None:
    """The distance of what a compiler gave as a share of its gate; `None` if nobody can say what is right.

    Then this device refuses what a processor takes, float64 does, or there is too little memory for it.
    """
    with (
        generated_left.without_memory(),
        generated_left.refusing(generated_left.CALL, "it is refused here", generated_left.RefusedError),
        generated_elsewhere.answering(),
    ):
        eager = generated_judge.witness(item.call)
        said = _judged(item.call, got, eager)
        if said and said[0] > 1 and (fault := generated_compiled_known.explained(item.call, got, eager)):
            generated_left.say(generated_left.CALL, f"passed over: {fault}")
            return None
        return said
    return None


def _judged(call: Call, got: Results, eager: Results) -> Judged | None:
    if [(one.shape, one.dtype) for one in got] != [(one.shape, one.dtype) for one in eager]:
        shapes = [[(tuple(one.shape), str(one.dtype)[6:]) for one in each] for each in (got, eager)]
        return math.inf, f"other shapes or types than in eager mode: {shapes[0]}, not {shapes[1]}"
    pairs = zip(got, eager, strict=True)
    near = max((generated_judge._roundings(a, b, call) for a, b in pairs), default=0.0)
    if near <= NEAR[call.dtype]:
        return near / NEAR[call.dtype] / 4, "near eager mode"
    reference = generated_judge.Reference(call)
    own = generated_judge.distance(call, eager, reference)
    if own is None or own > EXCUSED:
        generated_left.say(generated_left.CALL, "float64 does not say what eager mode means")
        return None
    bound = FACTOR * max(NEEDED, own)
    units = generated_judge.distance(call, got, reference, enough=bound / 2)
    if units is not None and bound < units <= EXCUSED:
        units = generated_judge.distance(call, got, reference, excused=True, beside=eager)
    if units is not None and units > bound:
        places = any(generated_judge.are_places(*pair) for pair in zip(got, reference.right, strict=False))
        if places or units < math.inf:  # a compiler rounds in other places, and of equal numbers takes others
            units = generated_doubts.by_steps(replace(call, excused=False), got, reference, whole=True)
    if units is None or (units > bound and _cancels(call, got, eager)):
        words = "float64 does not say what is right" if units is None else "it normalizes numbers that cancel"
        generated_left.say(generated_left.CALL, words)
        return None
    return units / bound, f"{units:.3g} units from float64, {bound:.3g} allowed, eager mode {own:.3g}"


def _cancels(call: Call, got: Results, eager: Results) -> bool:
    """Whether a program that normalizes is off by less than a rounding of its largest number.

    Of two numbers that are normalized the gradient is nearly 0: what is left is the rounding of larger terms.
    """
    if generated_operators.NORMALIZES not in generated_compiled_items.program_of(call).name:
        return False
    most = max((float(one.abs().max()) for one in eager if one.numel()), default=0.0)
    unit = gates.unit_roundoff(call.dtype) * most
    return all(not a.numel() or float((a - b).abs().max()) <= unit for a, b in zip(got, eager, strict=True))
