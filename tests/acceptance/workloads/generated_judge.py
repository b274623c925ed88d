"""The judge of generated cases: a function beside itself in float64. In: a call. Out: its distance from it.

No case has a bound of its own. The function is evaluated in float64. Where the result is farther from it than
a few roundings, float64 is asked again, with the inputs moved by one rounding of the type: how far these
results lie apart is what that precision means for this function. An error is measured in that unit. Elements
where these results take different branches are not judged.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from workloads import gates, generated_elsewhere, generated_left, generated_trees, operands

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

MOVES = 4
SHAKES = 16  # of numbers that are equal
MORE_MOVES = 12  # where a result seems wrong: of few moves, some move an element by chance too little
NOISES, MORE_NOISES = 3, 12  # of a kernel with few states inside, some moves by chance change nothing
NEAR, ROUGH = 8.0, 2.0**-6  # roundings by which numbers move where an error's changes are asked for; at most
# Of the largest number of a result, as much may change when the same call is made again.
REPEATS = {torch.float64: 2.0**-6, torch.float32: 2.0**-6, torch.bfloat16: 2.0**-3, torch.float16: 2.0**-3}
CANCELLED = 2.0**-40  # of the operands: what float64 leaves of numbers that cancel is its own rounding
SAME = 2.0**-44  # of the largest number, as much may differ where float64 is asked the same again
HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *HALVES)


@dataclass(frozen=True)
class Call:
    """A function and its arguments: nested lists, tuples and dicts with tensors in them."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dtype: torch.dtype
    gradients: bool = False
    seed: int = 0
    right: Call | None = None  # what float64 evaluates instead: a plain formula, or a part of the arguments
    noisy: bool = False  # what changes with its inputs' last bits belongs to the unit
    doubted: float = 0.0  # and is asked for more often, with inputs that move by this much more
    overflows: bool = False  # its intermediate values may leave the type where its result does not
    passes_over_nan: bool = False  # nobody says what it gives for NaN, if that is a number
    inside: bool = False  # the kernels that run in it are judged too
    looser: float = 1.0  # by so much they may leave their gates
    steps: bool = False  # a rounding of each of its kernels belongs to the unit
    excused: bool = True  # what changes with its inputs' last bits is no error of its steps
    alone: bool = False  # they alone: its result is random, or nobody promises it
    breaks: bool = False  # a healthy torch breaks in it, loudly
    fixed: frozenset[int] = frozenset()  # the places of tensors that get no gradient
    alike: bool = False  # the gradients that come in are one number each, with stride 0, as those of a sum
    uneven: bool = False  # the gradients that come in have zeros, large and small numbers
    not_finite: bool = False  # some of the gradients that come in are no numbers
    apart: bool = False  # the gradients that come in lie in a buffer, with gaps
    on: torch.device | None = None  # where it runs, if its tensors wait on the processor
    taken: bool = False  # torch says that it takes it, so that an error is a fault
    words: str = ""  # all of it, if its family has its own
    smaller: Callable[[], Iterator[Call]] | None = None  # simpler ones, in its family's own way

    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the call's arguments, in order."""
        return [
            leaf
            for leaf in generated_trees.leaves((self.args, dict(self.kwargs)))
            if isinstance(leaf, torch.Tensor)
        ]

    def mapped(self, change: Callable[[Any], Any]) -> Call:
        """The same call with every leaf of its arguments changed."""
        args, kwargs = generated_trees.mapped((self.args, dict(self.kwargs)), change)
        return replace(self, args=args, kwargs=kwargs)


class Reference:
    """A call's results in float64. Calls with equal numbers in other places of memory share them."""

    def __init__(self, call: Call) -> None:
        """Evaluate it once; how far its results lie apart is found when somebody asks."""
        self.call = replace(call.right or call, apart=False)
        self.right = witness(wide(self.call))

    @functools.cached_property
    def moved(self) -> list[list[torch.Tensor]]:
        """The results for inputs moved by one rounding; empty if float64 does not say what is right."""
        given = torch.manual_seed  # of a function that sets a seed of its own
        with mock.patch.object(torch, "manual_seed", lambda seed: given(int(seed) + 1)):
            again = witness(wide(replace(self.call, seed=self.call.seed + 1, gradients=False)))
        drawn = torch.default_generator.get_state()
        seed_all(self.call.seed + 1)
        same = all(itertools.starmap(_is_same, zip(again, self.right, strict=False)))
        if not same or not torch.equal(drawn, torch.default_generator.get_state()):
            return []  # it draws numbers, which of one element may be equal ones
        moved = self._moved(range(1, MOVES + 1))
        return moved if len(moved) == MOVES else []

    @functools.cached_property
    def shaken(self) -> list[list[torch.Tensor]]:
        """The results with no two numbers equal: the first of equal ones is once the least, once the most."""
        shaken = []
        for move in range(SHAKES):
            call = wide(self.call).mapped(functools.partial(generated_elsewhere.shaken, move=move))
            with contextlib.suppress(generated_left.RefusedError):
                shaken.append(witness(call))
        return [one for one in shaken if _shapes(one) == _shapes(self.right)]

    def ask_again(self) -> None:
        """Find how far results lie apart by more moves, once."""
        if len(self.moved) == MOVES:
            self.moved.extend(self._moved(range(MOVES + 1, MOVES + MORE_MOVES + 1)))

    def _moved(self, moves: range) -> list[list[torch.Tensor]]:
        """Results for inputs moved by one rounding; all down where torch takes no more, as of shares 1."""
        found = []
        for move in moves:
            for up in (True, False):
                with contextlib.suppress(generated_left.RefusedError):
                    found.append(witness(wide(self.call, move, up=up), move))
                    break
        return [one for one in found if _shapes(one) == _shapes(self.right)]


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether float64 gives the same again; a library may add up in another order beside other memory."""
    if one.shape != other.shape or torch.equal(one.nan_to_num(), other.nan_to_num()):
        return bool(one.shape == other.shape)
    most = SAME * float(other.abs().nan_to_num(0, 0, 0).max()) if other.is_floating_point() else 0.0
    return float((one.double() - other).abs().nan_to_num().max()) <= most


def witness(
    call: Call, move: int = 0, within: contextlib.AbstractContextManager[Any] | None = None
) -> list[torch.Tensor]:
    """The results of a call that says what is right. Raises `RefusedError` if torch does not take it."""
    with generated_left.witnessing():
        return results(call, move, within)


def results(
    call: Call, move: int = 0, within: contextlib.AbstractContextManager[Any] | None = None
) -> list[torch.Tensor]:
    """Outputs and then gradients: of a sum of the outputs, weighted by numbers of the seed.

    The function and its gradient run `within` a context. What ran elsewhere comes back to the processor.
    """
    if call.on is not None:
        return _from_elsewhere(call, move, within)
    within = contextlib.nullcontext() if within is None else within
    seed_all(call.seed)
    if call.gradients:
        places = itertools.count()
        call = call.mapped(lambda leaf: _leaf(leaf, call.fixed, places))
    inputs = [one for one in call.tensors() if one.requires_grad]
    with torch.set_grad_enabled(call.gradients), within:
        returned = call.function(*call.args, **call.kwargs)
    given, out = (
        [one for one in generated_trees.leaves(returned) if generated_trees.is_tensor(one)],
        generated_trees.numbers(returned),
    )
    roots = [one for one in given if one.requires_grad and one.is_floating_point()]
    if not call.gradients or not roots or not inputs:
        return out
    weights = [_weights(one, call, n, move) for n, one in enumerate(roots)]
    with within:
        grads = torch.autograd.grad(roots, inputs, weights, allow_unused=True, materialize_grads=True)
    return out + [grad for grad in grads if generated_trees.is_tensor(grad)]


def _from_elsewhere(call: Call, move: int, within: Any) -> list[torch.Tensor]:
    with generated_elsewhere.answering():
        here = replace(call.mapped(functools.partial(generated_elsewhere.placed, call.on)), on=None)
        return [one.cpu() for one in results(here, move, within)]


def seed_all(seed: int) -> None:
    """Seed this process's devices. `torch.manual_seed` keeps a stack for each absent kind, 0.5 ms in all."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)


def _leaf(one: Any, fixed: frozenset[int], places: Iterator[int]) -> Any:
    if isinstance(one, torch.Tensor) and next(places) not in fixed and one.is_floating_point():
        return one.detach().requires_grad_()  # a view of the same storage, so its strides stay
    return one


def _weights(one: torch.Tensor, call: Call, number: int, move: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(call.seed + number)
    shape = torch.Size([1] * one.dim()) if call.alike else one.shape
    values = (torch.rand(shape, generator=generator) + 0.5).to(torch.bfloat16).double()
    if call.uneven:
        values = values * operands.uneven(shape, generator)
    if call.not_finite:
        values[torch.rand(shape, generator=generator) < 0.1] = torch.nan
    if move and one.dtype is torch.float64:
        values = values * (1 + operands.signs(shape, call.seed + move) * gates.unit_roundoff(call.dtype))
    placed = values.to(one.device, one.dtype)
    if call.alike:
        return placed.expand(one.shape)
    return operands.in_buffer(placed, 1, 2) if call.apart else placed


def wide(call: Call, move: int = 0, *, up: bool = True) -> Call:
    """The call in float64; with `move`, its numbers are those of `_moved`."""

    def change(leaf: Any) -> Any:
        if isinstance(leaf, torch.dtype) and leaf in FLOATS:
            return torch.float64
        number = generated_trees.is_number(leaf)
        return _moved(leaf, call.seed + move, float(move > 0), up=up) if number else leaf

    return replace(call.mapped(change), on=None)


def _moved(leaf: torch.Tensor, seed: int, roundings: float, *, up: bool = True) -> torch.Tensor:
    """A tensor in float64, each number moved by `roundings` roundings of its type: some `up`, or all down."""
    exact = leaf.detach().double()
    if not roundings or leaf.dtype is torch.float64:
        return exact
    signs = operands.signs(leaf.shape, seed).to(leaf.device) if up else -1
    return exact * (1 + signs * gates.unit_roundoff(leaf.dtype) * roundings)


def distance(
    call: Call,
    got: Sequence[torch.Tensor] | None = None,
    reference: Reference | None = None,
    enough: float = 0,
    *,
    excused: bool = False,
    beside: Sequence[torch.Tensor] | None = None,
    more: Sequence[list[torch.Tensor]] = (),
    grown: Sequence[torch.Tensor] | None = None,
) -> float | None:
    """How many units the worst element is from float64: infinite if it is not finite and float64 is.

    With `enough`, a result that lies this many roundings from float64 is judged by that alone: it can only be
    nearer in units. `excused` takes what changes with the inputs' last bits from an error: an error of
    `beside`, where `got` is not what the call itself gives. `more` results of float64 belong to the unit as
    those of moved inputs do, and by `grown` the units of each number are larger. `None` if float64 does not
    say what is right: the function draws numbers, or every element is on a border.
    A call without gradients may have a reference with them.
    """
    got = results(call) if got is None else got
    reference = reference or Reference(call)
    right = reference.right[: len(got)] if not call.gradients else reference.right
    if not right:
        return None
    same = _shapes(got) == _shapes(right)
    roundings = max(_roundings(*pair, call) for pair in zip(got, right, strict=True)) if same else math.inf
    if roundings <= enough:
        return roundings
    moved = reference.moved
    if not moved:
        return None
    if not same:
        return math.inf
    noise = _noise(call, beside or got, right) if call.noisy or excused else [0.0] * len(right)
    found = []
    for n, (one, ref) in enumerate(zip(got, right, strict=True)):
        shaken = (call.on is not None or more) and are_places(one, ref)
        others = [*moved, *more, *(reference.shaken if shaken else ())]
        more_units = grown[n] if grown else 1.0
        found.append(_distance(one, ref, [each[n] for each in others], noise[n], call, grown=more_units))
    judged = [one for one in found if one is not None]
    return max(judged) if judged else None


def are_places(got: torch.Tensor, ref: torch.Tensor) -> bool:
    """Whether a device gives other places than the processor: of equal numbers each may choose one."""
    return ref.dtype is torch.int64 and not torch.equal(got, ref)


def _shapes(tensors: Sequence[torch.Tensor]) -> list[torch.Size]:
    return [one.shape for one in tensors]


def _roundings(got: torch.Tensor, ref: torch.Tensor, call: Call) -> float:
    """The worst error in roundings of its own element."""
    if not ref.numel():
        return 0.0
    if not ref.is_floating_point() or not got.is_floating_point():
        return 0.0 if torch.equal(got.to(ref.dtype), ref) else math.inf
    mine = got.double()
    unit = max(gates.unit_roundoff(each) for each in (got.dtype, call.dtype))
    ratio = (mine - ref).abs() / (unit * ref.abs() + torch.finfo(got.dtype).tiny)
    ratio = torch.where((mine == ref) | (mine.isnan() & ref.isnan()), 0.0, ratio)
    return float(ratio.nan_to_num(nan=math.inf, posinf=math.inf).max())


def _noise(call: Call, got: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> list[Any]:
    """How much an operator's error changes with its inputs: its rounding does, a fault does not."""
    found: list[Any] = [0.0] * len(right)
    if call.right and _shapes(call.tensors()) != _shapes(call.right.tensors()):
        return found  # float64 sees a part of the operands only
    if not _is_steady(call, right):
        return found
    moves = MORE_NOISES if call.doubted else NOISES
    for move in range(1, moves + 1):

        def change(leaf: Any, seed: int = call.seed + 100 * move) -> Any:
            if not generated_trees.is_number(leaf):
                return leaf
            roundings = min(NEAR * max(1.0, call.doubted), max(NEAR, ROUGH / gates.unit_roundoff(leaf.dtype)))
            return operands.in_same_places(leaf, lambda given: _moved(given, seed, roundings).to(given.dtype))

        other = call.mapped(change)
        count = len(right)  # of what the call gives, the first ones may be judged alone
        with contextlib.suppress(generated_left.RefusedError):  # what nobody sees change is not excused
            near = witness(other)[:count], witness(wide(_right(other)))[:count]
            for n, (one, exact, mine, ref) in enumerate(zip(*near, got, right, strict=True)):
                if one.shape == ref.shape and one.is_floating_point():
                    changed = ((one.double() - exact) - (mine.double() - ref)).abs().nan_to_num()
                    found[n] = found[n] + (changed + changed.square().mean().sqrt()) * (NOISES / moves)
    return found


def _is_steady(call: Call, right: Sequence[torch.Tensor]) -> bool:
    """Whether a call gives the same again, but for sums whose order a device does not keep.

    What is no function of its operands, such as memory that nobody wrote, changes with their last bits too.
    """
    once = results(call)
    operands.leave_nan(right, call.dtype, call.on)
    for one, other in zip(once, results(call), strict=True):
        if one.is_floating_point() and one.numel():
            off = torch.where(
                (one == other) | (one.isnan() & other.isnan()), 0.0, (one.double() - other).abs()
            )
            most = REPEATS[one.dtype] * one.abs().nan_to_num(0, 0, 0).max()
            if bool((off.nan_to_num(nan=torch.inf) > most).any()):
                return False
    return True


def _right(call: Call) -> Call:
    """The call that float64 evaluates, with this call's own tensors."""
    if call.right is None:
        return call
    mine = iter(call.tensors())
    return call.right.mapped(lambda leaf: next(mine) if isinstance(leaf, torch.Tensor) else leaf)


def _distance(
    got: torch.Tensor, ref: torch.Tensor, moved: Sequence[torch.Tensor], noise: Any, call: Call, *, grown: Any
) -> float | None:
    if not ref.numel():
        return None
    if not ref.is_floating_point() or not got.is_floating_point():
        steady = torch.stack([one == ref for one in moved]).all(0)
        return None if not steady.any() else math.inf if (got != ref)[steady].any() else 0.0
    mine, most = got.double(), torch.finfo(got.dtype).max
    every = torch.stack([ref, *moved])
    finite = every.isfinite().all(0) & (every.abs().amax(0) < most / 4)
    given = [
        one.abs().nan_to_num(0, 0, 0).max()
        for one in call.tensors()
        if one.is_floating_point() and one.numel()
    ]
    cancelled = (
        (ref != 0) & (ref.abs() < CANCELLED * max(float(one) for one in given))
        if given
        else torch.zeros_like(finite)
    )
    special = every.isnan().all(0)
    if call.passes_over_nan:
        has_nan = _has_nan(call, ref)
        finite, special = finite & ~has_nan, special & ~has_nan if call.doubted else special
    endless = every.isinf().all(0) & (every == ref).all(0)
    if call.overflows:
        finite, special = finite & mine.isfinite(), special & mine.isnan()
        endless = endless & (mine == ref)
    wrong = (special & ~mine.isnan()) | (finite & ~mine.isfinite()) | (endless & (mine != ref))
    if wrong.any():
        return math.inf
    if not finite.any():
        return 0.0 if (special | endless).any() else None
    unit = max(gates.unit_roundoff(each) for each in (got.dtype, call.dtype))
    spread = torch.where(finite, (torch.stack(list(moved)) - ref).abs().amax(0), 0.0)
    typical = (spread.square().sum() / finite.sum()).sqrt()
    allowed = (unit * ref.abs() + spread + typical / 2) * grown + torch.finfo(got.dtype).tiny
    allowed, less = (allowed + noise, 0.0) if call.noisy else (allowed, noise)
    finite = finite & ~cancelled
    return float(torch.where(finite, ((mine - ref).abs() - less).clamp(min=0) / allowed, 0.0).max())


def _has_nan(call: Call, ref: torch.Tensor) -> torch.Tensor:
    """Where one of the operands is NaN, in the shape of the result."""
    floats = [one for one in call.tensors() if one.is_floating_point()]
    return functools.reduce(torch.logical_or, (one.isnan() for one in floats)).expand(ref.shape)
