"""Programs that draw numbers: backward has forward's numbers, and a compiler draws as eager mode does.

In: a program, its call, and the compiled program. Out: what is wrong. No other run says which numbers are
right, so each way to run a program is asked about itself:

- the same seed gives the same results and gradients, and without a new seed the next results are others;
- with the same seed again, results move with the inputs as the gradient says: it has forward's numbers;
- over several draws, the mean, the variance and what neighbours have in common are those of eager mode;
- what is recomputed leaves the generator where it would be otherwise; dropout keeps its share.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from workloads import (
    device,
    gates,
    generated_compiled_items,
    generated_elsewhere,
    generated_judge,
    operands,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from workloads.generated_compiled_items import Item, Program
    from workloads.generated_judge import Call

DRAWS = 16  # runs that are compared in distribution
DISTANT = 12.0  # standard errors of a mean of so many draws: below 1e-8 of healthy ones are beyond it
LAGS = (1, 2, 3, 4, 5, 8, 16, 32, 64, 128)
MOST_NUMBERS = 2**15  # of one run
DIRECTIONS = 3
STEPS = {torch.float32: 2.0**-8}  # by which inputs move, as shares of themselves
STEP_OF_HALVES = 2.0**-3
SHARE, ROUNDINGS = 0.1, 16.0  # of what random numbers add up to; of the results
STEADY = 0.2  # of a bound: how much a rise may differ from that of smaller steps
FAR = 2.0**-5  # of the largest number: sums of another order are nearer, and other numbers are not
KEPT = 6.5  # standard deviations of a binomial number
DROPOUT = ("nn.functional.dropout", "nn.functional.alpha_dropout", "nn.functional.feature_alpha_dropout")


class Run(NamedTuple):
    """What one run gave: results, gradients, and the sum that they are gradients of with its parts' size."""

    given: list[torch.Tensor]
    grads: list[torch.Tensor]
    value: float
    size: float


class Way(NamedTuple):
    """A way to run a program: in eager mode or compiled."""

    program: Program
    function: Callable[..., Any]

    def run(self, call: Call, seed: int | None, *, gradients: bool = True) -> Run:
        """The program from a seed, or from where the generator is."""
        call = leaves_of(call)
        if seed is not None:
            generated_judge.seed_all(seed)
        given = self.program.prepare(call.args)
        out = self.function(*given)
        told = out, self.program.left(given)
        roots, weights, inputs = rooted(call, told)
        pairs = zip(roots, weights, strict=True)
        parts = [root.detach().double() * weight.double() for root, weight in pairs]
        grads: Any = []
        if gradients and inputs:
            grads = torch.autograd.grad(roots, inputs, weights, allow_unused=True, materialize_grads=True)
        size = math.sqrt(sum(float(one.square().sum()) for one in parts))
        value = sum(float(one.sum()) for one in parts)
        return Run(generated_judge.numbers(told), list(grads), value, size)


def leaves_of(call: Call) -> Call:
    """The call with tensors that get gradients."""
    places = itertools.count()
    return call.mapped(lambda one: generated_judge._leaf(one, call.fixed, places)) if call.gradients else call


def rooted(call: Call, told: Any) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """The results that have gradients, the gradients that come in, and the inputs that get some."""
    tensors = [leaf for leaf in generated_judge.leaves(told) if generated_judge.is_tensor(leaf)]
    roots = [leaf for leaf in tensors if leaf.requires_grad and leaf.is_floating_point()]
    weights = [generated_judge._weights(leaf, call, n, 0) for n, leaf in enumerate(roots)]
    return roots, weights, [leaf for leaf in call.tensors() if roots and leaf.requires_grad]


def judge(item: Item, compiled: Callable[..., Any]) -> tuple[float, str] | None:
    """The worst share of a gate, and words; infinite where there is no share."""
    program = generated_compiled_items.program_of(item.call)
    eager = Way(program, program.compiled)
    try:
        with generated_elsewhere.answering():
            moves = _has_slope(item.call, program)
            found = [*_of_eager(item, eager), *_of_itself(item.call, eager, "in eager mode", moves=moves)]
    except Exception:  # noqa: BLE001 other numbers than those that were drawn first
        return None
    way = Way(program, compiled)
    found += [*_of_itself(item.call, way, "compiled", moves=moves), *_beside(item.call, eager, way)]
    return max(found, key=lambda one: one[0])


def _has_slope(call: Call, program: Program) -> bool:
    """Whether the operator alone has a gradient: PyTorch says 0 for what jumps, and for normal numbers."""
    bare = generated_compiled_items.Program(
        program.name, program.operator, program.shape, fixed=program.fixed, place=program.place
    )
    return any(bool(one.any()) for one in Way(bare, bare.compiled).run(call, call.seed).grads)


def _of_itself(call: Call, way: Way, mode: str, *, moves: bool) -> Iterator[tuple[float, str]]:
    first, again = way.run(call, call.seed), way.run(call, call.seed)
    pairs = zip(first.given + first.grads, again.given + again.grads, strict=True)
    same = all(_same(one, other) for one, other in pairs)
    yield 0.0 if same else math.inf, f"{mode}, the same seed gives other numbers"
    slopes = [_slope(call, way, first, turn) for turn in range(DIRECTIONS if same and moves else 0)]
    shares = sorted(one for one in slopes if one is not None)
    if len(shares) > DIRECTIONS // 2:  # one direction may jump, where numbers are near a border
        words = f"{mode}, its gradient is not that of the numbers that forward drew"
        yield shares[(len(shares) - 1) // 2], words


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    mine, its = (each.double().nan_to_num(2.0**100, 2.0**101, -(2.0**101)) for each in (one, other))
    return not mine.numel() or bool((mine - its).abs().max() <= FAR * mine.abs().max())


def _slope(call: Call, way: Way, first: Run, turn: int) -> float | None:
    """How far the sum's rise is from what its gradient says; `None` where smaller steps say otherwise."""
    step, rises, parts = STEPS.get(call.dtype, STEP_OF_HALVES), [], list[torch.Tensor]()
    for size in (step, step / 2, step / 4):
        up, down = (_moved(call, sign * size, call.seed + turn) for sign in (1, -1))
        values = [way.run(one, call.seed, gradients=False).value for one in (up, down)]
        rises.append(values[0] - values[1])
        if not parts:
            ends = zip(_with_gradients(up), _with_gradients(down), first.grads, strict=True)
            moves = ((one.double() - other.double(), grad.double()) for one, other, grad in ends)
            parts = [torch.where(move != 0, grad * move, 0) for move, grad in moves]
    size = math.sqrt(sum(float(one.square().sum()) for one in parts))
    noise = ROUNDINGS * gates.unit_roundoff(call.dtype) * first.size + torch.finfo(torch.float32).tiny
    bound = SHARE * max(size if math.isfinite(size) else 0.0, abs(rises[0])) + noise
    steady = all(abs(rises[0] - 2**n * one) <= STEADY * bound for n, one in enumerate(rises))
    if not steady or not size:  # the gradient of what jumps is 0
        return None
    share = abs(rises[0] - sum(float(one.sum()) for one in parts)) / bound
    return share if math.isfinite(share) else math.inf


def _with_gradients(call: Call) -> list[torch.Tensor]:
    return [one.detach() for one in leaves_of(call).tensors() if one.requires_grad]


def _moved(call: Call, step: float, seed: int) -> Call:
    """Each number that has a gradient larger or smaller by a share of itself: none changes its sign."""
    places = itertools.count()

    def change(leaf: Any) -> Any:
        place = next(places) if isinstance(leaf, torch.Tensor) else -1
        if place < 0 or place in call.fixed or not leaf.is_floating_point():
            return leaf

        def moved(one: torch.Tensor) -> torch.Tensor:
            factors = 1 + step * operands.signs(one.shape, seed + place).to(one.device)
            return (one.double() * factors).to(one.dtype)

        return operands.in_same_places(leaf, moved)

    return call.mapped(change)


def _beside(call: Call, eager: Way, compiled: Way) -> Iterator[tuple[float, str]]:
    """Whether a compiler draws as eager mode does, in each statistic that numbers change."""
    runs = {}
    for way in (eager, compiled):
        given = [way.run(call, None if n else call.seed, gradients=False).given for n in range(DRAWS)]
        equal = [all(map(_same, one, other)) for one, other in itertools.pairwise(given)]
        runs[way] = torch.stack([_statistics(one) for one in given]), equal
    (mine, moves), (its, stays) = runs[eager], runs[compiled]
    stuck = not any(moves) and all(stays)
    yield math.inf if stuck else 0.0, "compiled, it draws the same numbers again and again"
    unit = gates.unit_roundoff(call.dtype)  # by which a mean may be off, and what varies less is not judged
    apart = ((mine.mean(0) - its.mean(0)).abs() - unit).clamp(min=0)
    far = apart / ((mine.var(0) + its.var(0)) / DRAWS).sqrt()
    worst = float(torch.where(mine.std(0) > unit / 16, far, 0.0).max()) / DISTANT
    yield worst, "compiled, its numbers are distributed otherwise than in eager mode"


def _statistics(given: list[torch.Tensor]) -> torch.Tensor:
    """Mean, variance, and what numbers have in common with those a little later, of bounded numbers."""
    flat = torch.cat([one.flatten().double().cpu() for one in given])[:MOST_NUMBERS].atan().nan_to_num()
    centred = flat - flat.mean()
    lags = [(centred[:-lag] * centred[lag:]).mean() for lag in LAGS if 2 * lag < len(flat)]
    return torch.stack([flat.mean(), centred.square().mean(), *lags])


def _of_eager(item: Item, eager: Way) -> Iterator[tuple[float, str]]:
    program, call = eager.program, item.call
    if program.recomputed:
        plain = replace(program, recomputed=False)
        ends = []
        for way in (eager, Way(plain, plain.compiled)):
            way.run(call, call.seed)
            ends.append(_state())
        words = "in eager mode, recomputed, it leaves the generator elsewhere"
        yield 0.0 if torch.equal(*ends) else math.inf, words
    share = call.args[1][1].get("p")
    if item.of.startswith(DROPOUT) and share and 0 < share < 1 and call.args[1][1].get("training", True):
        words = "in eager mode, it keeps another share than it should"
        yield kept(program.operator, len(program.shape), call, share), words


def kept(operator: Callable[..., Any], dims: int, call: Call, share: float) -> float:
    """How far the share that dropout keeps of ones is from what was asked, as a share of its bound."""
    ones = torch.ones((2048, 2, 2, 2, 2)[: max(dims, 1)], dtype=call.dtype, device=device())
    generated_judge.seed_all(call.seed)
    out = operator(ones, **call.args[1][1])
    chosen = float((out > (out.max() + out.min()) / 2).sum())
    alike = ones.numel() / 2048  # at most so many elements are kept or dropped together
    bound = KEPT * math.sqrt(ones.numel() * alike * share * (1 - share)) + 1
    return float(abs(chosen - ones.numel() * (1 - share)) / bound)


def _state() -> torch.Tensor:
    return torch.default_generator.get_state() if device().type == "cpu" else torch.cuda.get_rng_state()
