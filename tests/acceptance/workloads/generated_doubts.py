"""What a healthy kernel may do beyond its gate, by what is measured of this very call. In: a call, its error.

Out: the error that is left.

It knows no operator, and is asked only where a result is beyond its gate. A fault that does not depend on the
last bits or on the size of the numbers has none of these properties.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from workloads import gates, generated_judge, generated_left, generated_trees, operands

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workloads.generated_judge import Call, Reference

SHRUNK = 2.0**-12  # by so much operands are made smaller, so that nothing inside a kernel overflows
LOSES = 2  # bytes of a type that loses whole units by its definition
STEPS = 8  # evaluations in which each kernel's result is rounded at random
# Numbers that are added into one, for which its unit is larger by one: halves may be added in their own type.
TERMS = {torch.float32: 64, torch.float16: 2, torch.bfloat16: 2}
ONES = 32  # of a count, which cost as much as one other term: 64 for a unit, where up to 120 were read
TRIES, NUDGE = 3, 2.0**-12  # choices of operands' numbers that are changed, and by which part
# What kernels call the arguments that say how places follow from sizes. A place has a rounding of its own, so
# it is the less exact the longer a row is.
PLACES_FROM_SIZES = {"align_corners", "scales", "scales_h", "scales_w", "scale_factors", "interpolation_mode"}
# Of rounding that changes with the operands' last bits, so many units belong to a sum's order. TF32 is 8192
# units off.
EXCUSED = 512.0
NEAR = 8.0  # roundings of a place, for each number of the longest row
# Roundings of the largest number, where numbers cancel: of halves, kernels work most out in float32.
IN_FLOAT, IN_HALVES = 8.0, 0.5


class Rounded(TorchDispatchMode):  # type: ignore[misc]
    """Moves what each kernel gives in float64 by one rounding of a type, as its subnormals have it."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        """Each seed has other signs."""
        super().__init__()
        self.unit, self.seeds = gates.unit_roundoff(dtype), itertools.count(seed)
        self.least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the kernel; views stay as they are."""
        out = generated_trees.run(func, args, kwargs or {})
        if any(one.alias_info and not one.alias_info.is_write for one in func._schema.returns):
            return out
        for one in generated_trees.leaves(out):
            if generated_trees.is_number(one) and one.dtype is torch.float64 and 0 not in one.stride():
                signs = operands.signs(one.shape, next(self.seeds)).to(one.device)
                one.mul_(1 + signs * self.unit).add_(signs * (one != 0) * self.least)
        return out


def by_steps(
    call: Call, got: Sequence[torch.Tensor], reference: Reference, *, whole: bool = False
) -> float | None:
    """How far a program's result is from float64, if a rounding of each of its steps belongs to the unit.

    With `whole`, roundings by which numbers are lost say nothing: a largest number that moved is found
    nowhere.
    """
    wide = generated_judge.wide(reference.call)
    steps = (Rounded(call.dtype, n * 2**20) for n in range(STEPS))
    more = []
    for one in steps:
        with contextlib.suppress(generated_left.RefusedError):  # a rounding may leave what torch takes
            more.append(generated_judge.witness(wide, within=one))
    if whole:
        more = [one for one in more if not any(map(_loses, one, reference.right))]
    return generated_judge.distance(replace(call, noisy=call.excused, doubted=1.0), got, reference, more=more)


def _loses(given: torch.Tensor, right: torch.Tensor) -> bool:
    return bool((right.isfinite() & ~given.isfinite()).any())


def of_result(call: Call, got: Sequence[torch.Tensor], reference: Reference, bound: float) -> float | None:
    """How far a result is from float64; `None` if it does not say so, or has no memory for it."""
    with generated_left.without_memory():
        return _of_result(call, got, reference, bound)
    return None


def _of_result(call: Call, got: Sequence[torch.Tensor], reference: Reference, bound: float) -> float | None:
    steady = replace(call, noisy=False)  # to ask how it changes with the last bits takes more calls
    units = generated_judge.distance(steady, got, reference, enough=bound / 2)
    if call.noisy and units is not None and bound < units < math.inf:
        units = generated_judge.distance(call, got, reference)
    if units is not None and units > bound and call.inside:  # rounding that changes with the last bits
        units = generated_judge.distance(replace(call, noisy=True), got, reference)
        steps = units is not None and units > bound
        units = by_steps(call, got, reference) if steps else units
        return by_twin(call, got, reference, units, bound)
    if units is not None and units > bound and call.steps:
        return by_steps(call, got, reference)
    if units is not None and bound < units <= EXCUSED and not call.noisy:
        return generated_judge.distance(call, got, reference, excused=True)
    return units


def by_twin(
    call: Call, got: Sequence[torch.Tensor], reference: Reference, units: float | None, enough: float
) -> float | None:
    """How far a device's result is from float64, or, in 16 bits, from what the processor gives in that type.

    Each number may be near either. So what the processor has right excuses nothing, and what a half loses by
    its definition (a step that it rounds, a border, an overflow) is no fault of a device. A longer type loses
    little so: there, what is wrong on both is a fault of the code that they share.
    """
    if units is None or units <= enough or call.on is None or call.on.type == "cpu":
        return units  # the processor is no twin of itself
    if any(one.dtype.itemsize > LOSES for one in got):
        return units
    twin = generated_judge.results(replace(call, on=None))[: len(got)]
    if [one.shape for one in twin] != [one.shape for one in got]:
        return units
    nearer = [_nearer(*each) for each in zip(got, twin, reference.right, strict=False)]
    return min(units, generated_judge.distance(call, nearer, reference, enough) or 0.0)


def _nearer(got: torch.Tensor, twin: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """Each number as far from float64 as it is from the nearer one of float64 and the twin."""
    same = (got == twin) | ((got != got) & (twin != twin))  # noqa: PLR0124 only NaN is not itself
    beside, off = (got.double() - twin.double()), (got.double() - ref.double())
    chosen = torch.where(beside.abs() < off.abs(), (ref.double() + beside).to(got.dtype), got)
    return torch.where(same, ref.to(got.dtype), chosen)


def of_kernel(
    call: Call, got: Sequence[torch.Tensor], reference: Reference, units: float, *, alone: bool
) -> float:
    """How far a kernel's result is from float64 without what overflow and rounding inside of it explain.

    `alone`: it works element by element, and adds nothing up.
    """
    reached = _reached(call)
    if not alone:
        reached = [_counted(call, *each) for each in zip(reached, reference.right, strict=True)]
    grown = [(one / TERMS[call.dtype]).clamp(min=1) for one in reached]
    interpolates = _interpolates(call.function)
    if math.isinf(units):
        call = _of_all_numbers(call, reached, alone=alone, interpolates=interpolates)
    asked = functools.partial(_asked, call, got, reference, grown)
    units = asked(doubted=1.0)
    near = _farthest(call, got, reference)
    if math.isinf(units):
        return units
    if interpolates and near <= NEAR * _longest(call, got):
        return 0.0
    whole, is_float = _is_whole(reference.right), call.dtype is torch.float32
    most = IN_FLOAT if is_float else IN_HALVES
    if alone:  # it has no shorter type inside
        most = IN_FLOAT * gates.unit_roundoff(torch.float32) / gates.unit_roundoff(call.dtype)
    noisy = not whole and (near <= most or (is_float and not alone and units <= EXCUSED))
    doubted = 1.0 if alone else max(float(one.max()) for one in reached if one.numel())
    more = _at_borders(call, reference) if interpolates or whole else ()
    return asked(more=more, noisy=noisy, doubted=doubted) if noisy or more else units


def _asked(
    call: Call,
    got: Sequence[torch.Tensor],
    reference: Reference,
    grown: Sequence[torch.Tensor],
    more: Sequence[list[torch.Tensor]] = (),
    **changed: Any,
) -> float:
    return generated_judge.distance(replace(call, **changed), got, reference, more=more, grown=grown) or 0.0


def _of_all_numbers(call: Call, reached: Sequence[torch.Tensor], *, alone: bool, interpolates: bool) -> Call:
    """The call with what it may do where numbers overflow in it, or are NaN.

    A count of ones that float16 cannot hold overflows too. A place between a number and NaN may be either,
    and a gradient at NaN may be a number.
    """
    given = [one for one in call.tensors() if one.is_floating_point()]
    alike = all(one.shape == given[0].shape for one in reached)
    one_by_one = alone or (alike and all(float(one.median()) <= len(given) for one in reached if one.numel()))
    many = max(float(one.max()) for one in reached if one.numel()) > torch.finfo(call.dtype).max / 4
    between = interpolates and not all(bool(one.isfinite().all()) for one in given)
    return replace(
        call,
        overflows=call.overflows or many or between or _overflows(call),
        passes_over_nan=one_by_one and "_backward" in str(call.function),
    )


def _overflows(call: Call) -> bool:
    """Whether it agrees with float64 about what is finite as soon as its operands are smaller."""
    small = call.mapped(_shrunk)
    got, right = generated_judge.witness(small), generated_judge.witness(generated_judge.wide(small))
    pairs = zip(got, right, strict=False)
    return all(torch.equal(one.isfinite(), ref.to(one.dtype).isfinite()) for one, ref in pairs)


def _shrunk(leaf: Any) -> Any:
    if not generated_trees.is_number(leaf):
        return leaf
    return operands.in_same_places(leaf, lambda one: one * SHRUNK)


def _reached(call: Call) -> list[torch.Tensor]:
    """Of how many numbers of the operands each number of a result is made, at least, as a power of four.

    Of the operands' numbers one in 4, 16, 64, ... is changed a little, until a result changes no more.
    """
    wide = generated_judge.wide(call)
    right = [one.nan_to_num() for one in generated_judge.witness(wide)]
    reached = [torch.ones_like(one, dtype=torch.float64) for one in right]
    for power in range(0, max(one.numel() for one in call.tensors()).bit_length(), 2):
        found = [
            generated_judge.witness(wide.mapped(functools.partial(_nudged, share=2.0**-power, seed=seed)))
            for seed in range(TRIES)
        ]
        for n, one in enumerate(right):
            share = torch.stack([other[n].nan_to_num() != one for other in found]).double().mean(0)
            reached[n] = torch.where(share >= 0.6, 2.0**power, reached[n])
    return reached


def _counted(call: Call, reached: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """The same; of a count, beyond what its type reaches by ones, by the ones: it changes by no operand."""
    given = [one for one in call.tensors() if one.is_floating_point()]
    if not _is_whole([ref]) or _is_whole(given):
        return reached
    ones = ref.double().abs().nan_to_num()
    more = torch.maximum(reached, ones / ONES)
    return torch.where(ones * gates.unit_roundoff(call.dtype) >= 1, more, reached)


def _nudged(leaf: Any, share: float, seed: int) -> Any:
    if not generated_trees.is_number(leaf):
        return leaf
    chosen = torch.rand(leaf.shape, generator=torch.Generator().manual_seed(seed)) < share
    return torch.where(chosen, leaf * (1 - NUDGE) + NUDGE * (leaf == 0), leaf)


def _interpolates(function: Any) -> bool:
    """Whether a kernel works out places from sizes: its signature asks how."""
    schema = getattr(function, "_schema", None)
    return schema is not None and any(one.name in PLACES_FROM_SIZES for one in schema.arguments)


def _longest(call: Call, got: Sequence[torch.Tensor]) -> int:
    sizes: list[int] = [size for one in (*call.tensors(), *got) for size in one.shape]
    return max(sizes, default=1)


def _is_whole(results: Sequence[torch.Tensor]) -> bool:
    """Whether results are counts, or what rounding or a comparison gives."""
    return all(torch.equal(one.nan_to_num().round(), one.nan_to_num()) for one in results)


def _at_borders(call: Call, reference: Reference) -> list[list[torch.Tensor]]:
    """Results of operands that are a few roundings of a number away, all one way or at random.

    Of the largest number, also among those of no tensor, such as a border. Sizes are none.
    """
    leaves = generated_trees.leaves((call.args, dict(call.kwargs)))
    sizes = {size for one in reference.right for size in one.shape}
    borders = [abs(float(one)) for one in leaves if isinstance(one, int | float) and one not in sizes]

    def moved(leaf: Any, way: float, seed: int) -> Any:
        if not generated_trees.is_number(leaf):
            return leaf
        step = gates.unit_roundoff(call.dtype) * max([_largest(leaf), *borders])
        return leaf + way * step * (operands.signs(leaf.shape, seed) if seed else 1.0)

    wide = generated_judge.wide(call)
    return [
        generated_judge.witness(wide.mapped(functools.partial(moved, way=way, seed=seed)))
        for way in (1.0, -1.0, 3.0, -3.0)
        for seed in (0, 1, 2)
    ]


def _farthest(call: Call, got: Sequence[torch.Tensor], reference: Reference) -> float:
    """How many roundings of the largest number among operands and results the farthest one is off."""
    pairs = [(one, ref) for one, ref in zip(got, reference.right, strict=False) if one.shape == ref.shape]
    given = max((_largest(one) for one in call.tensors() if one.is_floating_point()), default=0.0)
    unit = gates.unit_roundoff(call.dtype)
    off = [_largest(one.double() - ref) / (unit * max(given, _largest(ref)) or 1.0) for one, ref in pairs]
    return max(off, default=0.0)


def _largest(one: torch.Tensor) -> float:
    return float(one.abs().nan_to_num(0, 0, 0).max()) if one.numel() else 0.0
