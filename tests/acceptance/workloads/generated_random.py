"""Programs that draw numbers: backward has forward's numbers, and a compiler draws as eager mode does.

In: a program and the compiled one. Out: what is wrong. No other run says which numbers are right, so each way
to run a program is asked about itself: one seed gives one result, and the next one is another; with the same
seed results move with the inputs as the gradient says. Several draws are distributed as in eager mode.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch

from workloads import (
    device,
    gates,
    generated_compiled_items,
    generated_elsewhere,
    generated_judge,
    generated_left,
    generated_trees,
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
STEPS = {torch.float32: 2.0**-8, torch.float16: 2.0**-3, torch.bfloat16: 2.0**-3}  # shares of each number
SHARE, ROUNDINGS = 0.1, 16.0  # of what random numbers add up to; of the results
STEADY = 0.2  # of a bound: how much a rise may differ from that of smaller steps
FAR = 2.0**-5  # of the largest number: sums of another order are nearer, and other numbers are not
KEPT = 6.5  # standard deviations of a binomial number
DROPOUT = ("nn.functional.dropout", "nn.functional.alpha_dropout", "nn.functional.feature_alpha_dropout")


_OWN = list[list[torch.Generator]]()  # that graphs on a GPU have for what is drawn in both directions


class Run(NamedTuple):
    """What one run gave: results, gradients, and the sum that they are gradients of with its parts' size."""

    given: list[torch.Tensor]
    grads: list[torch.Tensor]
    value: float
    size: float


class Way(NamedTuple):
    """A way to run a program: in eager mode, or compiled; and what tells its refusals from other errors."""

    program: Program
    function: Callable[..., Any]
    refusing: Callable[[], contextlib.AbstractContextManager[None]] = generated_left.witnessing

    def run(self, call: Call, seed: int | None, *, gradients: bool = True) -> Run:
        """The program from a seed, or from where the generator is."""
        with self.refusing():
            return self._run(call, seed, gradients=gradients)

    def _run(self, call: Call, seed: int | None, *, gradients: bool) -> Run:
        call = leaves_of(call)
        if seed is not None:
            _seed(seed)
        given = self.program.prepare(call.args)
        told = self.function(*given), self.program.left(given)
        roots, weights, inputs = rooted(call, told)
        parts = [one.detach().double() * weight.double() for one, weight in zip(roots, weights, strict=True)]
        grads: Any = []
        if gradients and inputs:
            grads = torch.autograd.grad(roots, inputs, weights, allow_unused=True, materialize_grads=True)
        value = sum(float(one.sum()) for one in parts)
        return Run(generated_trees.numbers(told), list(grads), value, _size(parts))


@contextlib.contextmanager
def own_generators() -> Iterator[None]:
    """Note the generators that a compiled graph on a GPU has for what it recomputes.

    PyTorch seeds them from the processor's generator when the graph first runs. No later seed reaches them
    (docs/reference/trust.md).
    """
    torch._dynamo.reset()  # loaded before its parts, which load each other
    wrappers, name = torch._functorch._aot_autograd.runtime_wrappers, "initialize_rng_states"
    make: Any = getattr(wrappers, name, None)  # torch before 2.7 has none, and calls none

    def noting(*args: Any, **kwargs: Any) -> None:
        make(*args, **kwargs)
        _OWN.extend(args[2:4])

    with mock.patch.object(wrappers, name, noting, create=True):
        yield


def _seed(seed: int) -> None:
    """Seed the devices; graphs make generators of their own again, as when they run first."""
    generated_judge.seed_all(seed)
    for states in _OWN:
        states.clear()
    _OWN.clear()


def _size(parts: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(one.square().sum()) for one in parts))


def leaves_of(call: Call) -> Call:
    """The call with tensors that get gradients."""
    places = itertools.count()
    return call.mapped(lambda one: generated_judge._leaf(one, call.fixed, places)) if call.gradients else call


def rooted(call: Call, told: Any) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """The results that have gradients, the gradients that come in, and the inputs that get some."""
    tensors = [leaf for leaf in generated_trees.leaves(told) if generated_trees.is_tensor(leaf)]
    roots = [leaf for leaf in tensors if leaf.requires_grad and leaf.is_floating_point()]
    weights = [generated_judge._weights(leaf, call, n, 0) for n, leaf in enumerate(roots)]
    return roots, weights, [leaf for leaf in call.tensors() if roots and leaf.requires_grad]


def judge(
    item: Item,
    compiled: Callable[..., Any],
    refusing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> tuple[float, str] | None:
    """The worst share of a gate, and words; `None` where eager mode refuses other numbers than the first."""
    program, call = generated_compiled_items.program_of(item.call), item.call
    eager, other = Way(program, program.compiled), Way(program, compiled, refusing)
    refused = generated_left.CALL, "eager mode refuses other numbers", generated_left.RefusedError
    with generated_left.refusing(*refused), generated_elsewhere.answering():
        # PyTorch says that the gradient is 0 of what jumps, and of normal numbers.
        bare = replace(generated_compiled_items.plain(program), place=program.place)
        moves = any(bool(one.any()) for one in Way(bare, bare.compiled).run(call, call.seed).grads)
        found = [
            *_of_eager(item, eager),
            *_of_itself(call, eager, "in eager mode", moves=moves),
            *_of_itself(call, other, "compiled", moves=moves),
            *_beside(call, eager, other),
        ]
        return max(found, key=lambda one: one[0])
    return None


def _of_itself(call: Call, way: Way, mode: str, *, moves: bool) -> Iterator[tuple[float, str]]:
    first, again = way.run(call, call.seed), way.run(call, call.seed)
    same = all(map(_same, first.given + first.grads, again.given + again.grads))
    yield 0.0 if same else math.inf, f"{mode}, the same seed gives other numbers"
    # A program whose results are whole or complex has no gradient.
    turns = DIRECTIONS if same and moves and first.grads else 0
    slopes = [_slope(call, way, first, turn) for turn in range(turns)]
    shares = sorted(one for one in slopes if one is not None)
    if len(shares) > DIRECTIONS // 2:  # one direction may jump, where numbers are near a border
        words = f"{mode}, its gradient is not that of the numbers that forward drew"
        yield shares[(len(shares) - 1) // 2], words


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    mine, its = (each.double().nan_to_num(2.0**100, 2.0**101, -(2.0**101)) for each in (one, other))
    return not mine.numel() or bool((mine - its).abs().max() <= FAR * mine.abs().max())


def _slope(call: Call, way: Way, first: Run, turn: int) -> float | None:
    """How far the sum's rise is from what its gradient says; `None` where smaller steps say otherwise."""
    rises, parts = [], list[torch.Tensor]()
    for part in (1, 2, 4):
        ends = [_moved(call, sign * STEPS[call.dtype] / part, call.seed + turn) for sign in (1, -1)]
        up, down = (way.run(one, call.seed, gradients=False).value for one in ends)
        rises.append(up - down)
        if part == 1:
            inputs = ([one for one in leaves_of(end).tensors() if one.requires_grad] for end in ends)
            moves = [(one.double() - other.double()).detach() for one, other in zip(*inputs, strict=True)]
            pairs = zip(moves, first.grads, strict=True)
            parts = [torch.where(move != 0, grad.double() * move, 0) for move, grad in pairs]
    size = _size(parts)
    noise = ROUNDINGS * gates.unit_roundoff(call.dtype) * first.size + torch.finfo(torch.float32).tiny
    bound = SHARE * max(size if math.isfinite(size) else 0.0, abs(rises[0])) + noise
    steady = all(abs(rises[0] - 2**n * one) <= STEADY * bound for n, one in enumerate(rises))
    if not steady or not size:
        return None
    share = abs(rises[0] - sum(float(one.sum()) for one in parts)) / bound
    return share if math.isfinite(share) else math.inf


def _moved(call: Call, step: float, seed: int) -> Call:
    """Each number that has a gradient larger or smaller by a share of itself: none changes its sign."""
    places = itertools.count()

    def moved(one: torch.Tensor) -> torch.Tensor:
        factors = 1 + step * operands.signs(one.shape, seed).to(one.device)
        return (one.double() * factors).to(one.dtype)

    def change(leaf: Any) -> Any:
        kept = not isinstance(leaf, torch.Tensor) or next(places) in call.fixed
        return operands.in_same_places(leaf, moved) if not kept and leaf.is_floating_point() else leaf

    return call.mapped(change)


def _beside(call: Call, eager: Way, compiled: Way) -> Iterator[tuple[float, str]]:
    """Whether a compiler draws as eager mode does, in each statistic that numbers change."""
    means, variances, stays = [], [], []
    for way in (eager, compiled):
        given = [way.run(call, None if n else call.seed, gradients=False).given for n in range(DRAWS)]
        stays.append([all(map(_same, one, other)) for one, other in itertools.pairwise(given)])
        statistics = torch.stack([_statistics(one) for one in given])
        means.append(statistics.mean(0))
        variances.append(statistics.var(0))
    stuck = not any(stays[0]) and all(stays[1])
    yield math.inf if stuck else 0.0, "compiled, it draws the same numbers again and again"
    unit = gates.unit_roundoff(call.dtype)  # by which a mean may be off, and what varies less is not judged
    apart = ((means[0] - means[1]).abs() - unit).clamp(min=0) / (sum(variances) / DRAWS).sqrt()
    worst = float(torch.where(variances[0].sqrt() > unit / 16, apart, 0.0).max()) / DISTANT
    yield worst, "compiled, its numbers are distributed otherwise than in eager mode"


def _statistics(given: list[torch.Tensor]) -> torch.Tensor:
    """Mean, variance, and what numbers have in common with those a little later, of bounded numbers."""
    flat = torch.cat([one.flatten().double().cpu() for one in given])[:MOST_NUMBERS].atan().nan_to_num()
    centred = flat - flat.mean()
    lags = [(centred[:-lag] * centred[lag:]).mean() for lag in LAGS if 2 * lag < len(flat)]
    return torch.stack([flat.mean(), centred.square().mean(), *lags])


def _of_eager(item: Item, eager: Way) -> Iterator[tuple[float, str]]:
    program, words = eager.program, item.call.args[1][1]
    if program.recomputed:
        plain, ends = replace(program, recomputed=False), []
        for way in (eager, Way(plain, plain.compiled)):
            way.run(item.call, item.call.seed)
            on_gpu = device().type != "cpu"
            ends.append(torch.cuda.get_rng_state() if on_gpu else torch.default_generator.get_state())
        yield 0.0 if torch.equal(*ends) else math.inf, "recomputed, it leaves the generator elsewhere"
    share = words.get("p", 0) if words.get("training", True) else 0
    if item.of.startswith(DROPOUT) and 0 < share < 1:
        ones = torch.ones((2**14, 2, 2, 2, 2)[: max(len(program.shape), 1)], device=device())
        out, alike = (
            program.operator(ones, **words),
            ones.numel() / 2**14,
        )  # at most so many are kept together
        missing = ones.numel() * (1 - share) - float((out > (out.max() + out.min()) / 2).sum())
        bound = KEPT * math.sqrt(ones.numel() * alike * share * (1 - share)) + 1
        yield abs(missing) / bound, "it keeps another share than it was asked for"
