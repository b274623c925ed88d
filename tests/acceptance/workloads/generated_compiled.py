"""Generated programs, compiled, recomputed and offloaded, beside the same in eager mode and in float64.

In: a source of numbers. Out: the worst share of a gate, and words.

A compiled program may round in other places than eager does: its gate is eager's own distance from float64.
A recomputed or offloaded one has the same bits, since the same kernels run again. One that draws random
numbers is judged in `generated_random`, by properties.
"""

import contextlib
import functools
import os
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from workloads import (
    device,
    generated_chains,
    generated_judge,
    generated_operators,
    generated_random,
    generated_variations,
    operands,
)
from workloads.generated_judge import Call

# What a healthy program needs, in units of the judge, where eager needs less; and how far it may leave that.
NEEDED, FACTOR = 8.0, 4.0
EXCUSED = 512.0  # up to here, rounding that changes with the inputs' last bits is the algorithm's
INDUCTOR = 0.08  # the share of a processor's programs for which a C++ compiler is started: seconds, not 0.1 s
STEPS = 3  # of an optimizer
UNEVEN = ((17, 5), (1,), (130,), (), (3, 1, 33), (64, 2), (7,))  # an optimizer's tensors
Change = Callable[[torch.Tensor], Any]
Judged = tuple[float, str] | None
Forms = Mapping[str, Callable[..., Any]]


def _half(x: torch.Tensor) -> torch.Tensor:
    return x.narrow(-1, 0, x.shape[-1] // 2 + 1) if x.dim() else x


def _before_in_place(x: torch.Tensor) -> torch.Tensor:
    _half(x := x.clone()).mul_(0.75)
    return x


def _its_input(x: torch.Tensor) -> torch.Tensor:
    _half(x.unsqueeze(0).select(0, 0)).mul_(0.75)
    return x


def _part_overwritten(x: torch.Tensor) -> torch.Tensor:
    return x.slice_scatter(_half(x).square(), -1, 0, _half(x).shape[-1]) if x.dim() else x


def _diagonal_overwritten(x: torch.Tensor) -> torch.Tensor:
    return x.diagonal_scatter(x.diagonal() * 2, 0) if x.dim() == 2 else x


def _copied_into(x: torch.Tensor) -> torch.Tensor:
    buffer = x.new_ones(*x.shape, 3)
    buffer[..., 1].copy_(x)
    return buffer


def _views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 2
    view = _half(y)
    view.mul_(0.5)
    return y, view


CHANGES = "its input changed through a view"
# What is done to the first operand: the same shape and type. A program is traced through it.
BEFORE: dict[str, Change] = {
    "": lambda x: x,
    "a view with gaps": lambda x: torch.stack((x, x), -1)[..., 0],
    "a turned view": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "a clone changed in place": _before_in_place,
    CHANGES: _its_input,
}
# And to the first result.
AFTER: dict[str, Change] = {
    "": lambda x: x,
    "a part overwritten": _part_overwritten,
    "the diagonal overwritten": _diagonal_overwritten,
    "copied into a buffer": _copied_into,
    "a changed view given too": _views,
    "in place": lambda x: (x * 1).mul_(x.detach() + 1),
}


class Program:
    """A function between two changes; a second one takes the first one's result."""

    def __init__(self, functions: list[Callable[..., Any]], before: str, after: str) -> None:
        """The functions in order, and the names of the changes."""
        self.functions, self.before, self.after = functions, before, after

    def __call__(self, first: Any, *args: Any, **kwargs: Any) -> Any:
        """What the last function gives, and the first result changed."""
        given = self.functions[0](BEFORE[self.before](first), *args, **kwargs)
        for function in self.functions[1:]:
            given = function(given[0] if isinstance(given, tuple | list) else given)
        if isinstance(given, tuple | list):
            return AFTER[self.after](given[0]), *given[1:]
        return AFTER[self.after](given)


def judge(source: random.Random, seed: int) -> Judged:
    """One case of a kind that is drawn; `None` if nobody can say what is right."""
    torch._dynamo.reset()
    return source.choices(list(KINDS), list(KINDS.values()))[0](source, seed % 2**31)


def backend(source: random.Random, share: float = INDUCTOR) -> str:
    """Inductor, or on most draws of a processor what traces for it; always, where no C++ compiler is."""
    drawn = source.random() < share
    if device().type == "cpu" and not (drawn and shutil.which(os.environ.get("CXX", "g++"))):
        return "aot_eager"
    return "inductor"


def compiled(
    function: Callable[..., Any], name: str, *, dynamic: bool | None = None, whole: bool = True
) -> Callable[..., Any]:
    """The function compiled, if it should be `whole` as one graph."""
    made: Callable[..., Any] = torch.compile(function, backend=name, dynamic=dynamic, fullgraph=whole)
    return made


def _alone(function: Callable[..., Any], *args: Any, changes: bool = False, **kwargs: Any) -> Any:
    """The function with clones of its tensors; it also gives what it left in them.

    Only what it `changes` has gradients there: recomputation adds those in another order.
    """
    args, kwargs = generated_judge.mapped((args, kwargs), lambda one: one.clone() if _has(one) else one)
    given = function(*args, **kwargs)
    left = [one for one in generated_judge.leaves((args, kwargs)) if _has(one)]
    return given, left if changes else [one.detach() for one in left]


def _has(one: Any) -> bool:
    return isinstance(one, torch.Tensor)


def recomputed(function: Callable[..., Any], *args: Any, reentrant: bool = False, **kwargs: Any) -> Any:
    """The function under recomputation, which sees tensors only outside of lists, both ways."""
    tensors = [one for one in generated_judge.leaves((args, kwargs)) if _has(one)]

    def flat(*given: torch.Tensor) -> Any:
        mine = iter(given)
        own, named = generated_judge.mapped((args, kwargs), lambda one: next(mine) if _has(one) else one)
        return tuple(generated_judge.leaves(function(*own, **named)))

    return checkpoint(flat, *tensors, use_reentrant=reentrant)


def offloaded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The function with the tensors that it saves for its gradients kept in the host's memory."""
    with torch.autograd.graph.save_on_cpu(pin_memory=device().type != "cpu"):
        return function(*args, **kwargs)


def _beside(call: Call, forms: Forms, words: str, needed: float = NEEDED) -> Judged:
    """The worst of other forms of a call's function, by eager's own distance from float64."""
    try:
        reference = generated_judge.Reference(call)
        own = generated_judge.distance(call, generated_judge.results(call), reference)
    except Exception:  # noqa: BLE001 float64 or eager refuses
        return None
    if own is None or own > EXCUSED:
        return None
    bound, found = FACTOR * max(needed, own), []
    for form, function in forms.items():
        other = replace(call, function=function)
        got = generated_judge.results(other)
        units = generated_judge.distance(other, got, reference, enough=bound / 2)
        if units is not None and bound < units <= EXCUSED:
            units = generated_judge.distance(other, got, reference, excused=True)
        if units is not None:
            told = f"{units:.3g} units from float64, {bound:.3g} allowed"
            found.append((units / bound, f"{words} {form}: {told}"))
    return max(found, default=None)


def _same_bits(call: Call, forms: Forms, words: str) -> Judged:
    """Infinity if another form has other bits than eager, which repeats its own."""
    try:
        right, again = (generated_random.by_backward(call) for _ in range(2))
    except Exception:  # noqa: BLE001 eager refuses
        return None
    if not _equal(right, again):
        return None
    for form, function in forms.items():
        if not _equal(right, generated_random.by_backward(replace(call, function=function))):
            return float("inf"), f"{words} {form}: other bits than eager, not 0 units from float64"
    return 0.0, words


def _equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(
        a.shape == b.shape
        and torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(some, others, strict=True)
    )


def _operators(source: random.Random) -> tuple[str, Program, Call] | None:
    """An operator or a pair of them, between two changes.

    On a GPU as PyTorch's samples are: another size may be a place beyond an operand's end.
    """
    name, dtype = source.choice(generated_operators.rows())
    sizes = source.choice(("", "odd")) if device().type == "cpu" else ""
    base = _call(name, dtype, source, sizes, source.choice(("", "", "uneven", "zero row", "expanded")))
    if base is None:
        return None
    functions, words = [base.function], f"{name} {sizes} {dtype}"
    second = source.choice([one for one, kind in generated_operators.rows() if kind == dtype])
    if source.random() < 0.5 and (other := _call(second, dtype, source)) and len(other.tensors()) == 1:
        functions.append(lambda x: other.function(x, *other.args[1:], **other.kwargs))
        words += f", then {second}"
    before, after = source.choice(list(BEFORE)), source.choice(list(AFTER))
    words += f"{before and f', of {before}'}{after and f', then {after}'}"
    return words, Program(functions, before, after), base


def _call(name: str, dtype: str, source: random.Random, sizes: str = "", numbers: str = "") -> Call | None:
    """An operator's call whose first argument is a tensor."""
    case = generated_operators.Case(name, dtype, sizes, numbers, source.randrange(2**31))
    forms = generated_operators.forms_of(case)
    return forms[0][1] if forms and _has(forms[0][1].args[0]) else None


def _programs(source: random.Random, seed: int) -> Judged:
    """Operators or a chain of steps: recomputed and offloaded with the same bits, and compiled."""
    drawn = generated_chains.draw(source, seed) if source.random() < 0.25 else _operators(source)
    if drawn is None:
        return None
    words, program, base = drawn
    changes = getattr(program, "before", "") == CHANGES
    alone = functools.partial(functools.partial, _alone, changes=changes)
    call = replace(base, function=alone(program))
    saved: dict[str, Callable[..., Any]] = {"offloaded": functools.partial(offloaded, program)}
    if not changes:  # recomputed, it would change its input again
        saved["recomputed"] = functools.partial(recomputed, program)
        saved["recomputed reentrant"] = functools.partial(recomputed, program, reentrant=True)
    again = call.gradients and not changes and source.random() < 0.25
    inner = saved["recomputed"] if again else program
    name, dynamic = backend(source), source.choice((False, True))
    function = alone(compiled(inner, name, dynamic=dynamic))
    if dynamic and (other := generated_variations.SIZES["odd"](call, source)):
        with contextlib.suppress(Exception):  # another size first, so that the graph is for more than one
            generated_judge.results(replace(other, function=function))
    told = f"{'recomputed and ' * again}compiled by {name}{' for all sizes' * dynamic}"
    found = [_beside(call, {told: function}, words)]
    if call.gradients:
        found.append(_same_bits(call, {form: alone(one) for form, one in saved.items()}, words))
    return max((one for one in found if one), default=None)


# Their names and settings, with those that are not PyTorch's defaults.
OPTIMIZERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.01}),
    ("AdamW", {"lr": 0.01, "maximize": True, "betas": (0.8, 0.95)}),
    ("Adagrad", {"lr": 0.1}),
    ("NAdam", {"lr": 0.01}),
    ("Adamax", {"lr": 0.01}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.5}),
    ("Adadelta", {"lr": 1.0}),
)
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


def _steps(
    name: str, settings: dict[str, Any], backend_name: str | None, *tensors: torch.Tensor
) -> list[torch.Tensor]:
    """An optimizer's tensors after a few steps; each step's gradients are the last one's, turned."""
    count = len(tensors) // 2
    held = [one.clone().requires_grad_() for one in tensors[:count]]
    optimizer = getattr(torch.optim, name)(held, **settings)
    step = optimizer.step if backend_name is None else compiled(optimizer.step, backend_name, whole=False)
    for turn in range(STEPS):
        for one, grad in zip(held, tensors[count:], strict=True):
            one.grad = grad.roll(turn, 0) if grad.dim() else grad * (1 + turn)
        step()
    return [one.detach() for one in held]


def _optimizers(source: random.Random, seed: int) -> Judged:
    name, settings = source.choice(OPTIMIZERS)
    shapes = source.sample(UNEVEN, source.randrange(2, len(UNEVEN) + 1))
    given = tuple(
        operands.normal(*one, dtype=torch.float32, seed=seed + n) for n, one in enumerate(shapes * 2)
    )
    ways: list[dict[str, Any]] = [{"foreach": True}, {"foreach": False}]
    ways += [{"fused": True}] if name in FUSED else []
    ways += [{"foreach": True, "capturable": True}] if device().type != "cpu" and name != "SGD" else []
    way, traced = source.choice(ways), backend(source)
    traces = {} if way.get("fused") else {f"compiled by {traced}": traced}
    forms = {
        form: functools.partial(_steps, name, {**settings, **way}, one)
        for form, one in {"as it is": None, **traces}.items()
    }
    right = functools.partial(_steps, name, {**settings, "foreach": False}, None)
    return _beside(
        Call(right, given, {}, torch.float32, seed=seed), forms, f"{name} {settings} {way} {shapes}"
    )


def _random(source: random.Random, seed: int) -> Judged:
    draw = generated_random.draw(source)
    name = backend(source, 5 * INDUCTOR)
    ways: dict[str, Callable[..., Any]] = {
        "eager": draw,
        "offloaded": functools.partial(offloaded, draw),
        "recomputed": functools.partial(recomputed, draw),
        "recomputed reentrant": functools.partial(recomputed, draw, reentrant=True),
        f"compiled by {name}": compiled(draw, name),
        f"recomputed and compiled by {name}": compiled(functools.partial(recomputed, draw), name),
    }
    way = source.choice(list(ways))
    said = generated_random.judge(ways[way], draw, seed)
    return said and (said[0], f"{draw} {way}: {said[1]}")


# Each kind with how often it is drawn.
KINDS = {_programs: 9, _random: 3, _optimizers: 1}
