"""Generated optimizers: those of PyTorch's own table, in each of their forms.

In: a seed and a number. Out: a call.

A few steps of a few weights, beside the plain form in float64 with the same gradients: the weights, and what
the optimizer keeps of each. Drawn are options, form, type, sizes, places in memory, a weight that has no
gradient once, and steps that overflow, which a scaler must leave out.
"""

import functools
import inspect
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import optim
from torch.amp.grad_scaler import GradScaler

from workloads import device, generated_known, generated_operators, generated_trees, operands
from workloads.generated_judge import FLOATS, Call
from workloads.generated_sizes import GROWS_FROM

# What has no plain form that float64 can follow.
LEFT_OUT = {
    "LBFGS": "it asks for the loss itself",
    "Muon": "it works in bfloat16 by its definition",
    "SparseAdam": "it takes sparse gradients only",
}
PLAIN, LISTS, FUSED, CAPTURED = "one by one", "lists", "fused", "captured"
OPTIONS = {
    PLAIN: {"foreach": False},
    LISTS: {"foreach": True},
    FUSED: {"fused": True},
    CAPTURED: {"foreach": True},
}
SIZES = (
    (0,),  # not for Adafactor, which divides by it
    (),
    (1,),
    (3,),
    (7,),
    (16, 1),
    (33,),
    (5, 13),
    (64, 65),
    (3, 4, 2, 5),
    (2**16 + 3,),
    (257, 300),
)
DENSE, BEHIND, TURNED = "dense", "behind one number", "turned"
PLACES = (DENSE, DENSE, BEHIND, TURNED)
TIMES = (1.0, -0.5, 2.0, 0.25)  # of its first gradient, in each step
LEAST, MOST = 0.5, 2.0  # of a gradient: near 0 the squares of halves underflow
LONG, LONG_STEP = 0.7, 1.0  # of a default one a weight in 16 bits keeps nothing
# A fused form works out 1 - beta^step in float32, where the default ones leave few bits of it; and in float16
# the default epsilon is 0, so a gradient that its weight decay cancels would be divided by it.
BETAS, EPS = (0.5, 0.75), 2.0**-6
SCALED, SCALE = 0.5, 2.0**10
NEEDED = 16.0  # units; of 3,520 cases on a processor the worst was at half of the gate, four times that
Weights = Sequence[torch.Tensor]


class Case(NamedTuple):
    """An optimizer's name in `torch.optim`, its options and form, and what it gets."""

    name: str
    options: Mapping[str, Any]
    form: str
    dtype: torch.dtype
    sizes: tuple[tuple[int, ...], ...]
    places: tuple[str, str]  # of weights and of gradients
    absent: int  # the weight that has no gradient in the second step
    steps: tuple[int, ...] = tuple(range(len(TIMES)))
    overflows: tuple[int, ...] = ()  # those that a scaler must leave out

    def __str__(self) -> str:
        """All of it in words."""
        given = ", ".join(f"{key}={value}" for key, value in self.options.items())
        sizes = ", ".join("x".join(map(str, one)) or "scalar" for one in self.sizes)
        words = [f"{self.name}({given}) {self.form}", str(self.dtype), f"weights {sizes}"]
        words += [f"weights {self.places[0]}, gradients {self.places[1]}"]
        if self.absent < len(self.sizes):
            words.append(f"no second gradient of weight {self.absent}")
        if self.overflows:
            words.append(f"a scaler, overflow in steps {', '.join(map(str, self.overflows))}")
        return "; ".join(words)


@functools.cache
def table() -> tuple[tuple[str, Mapping[str, Any], str], ...]:
    """Each optimizer of PyTorch's table with each of its options, in each form that this device has."""
    with generated_operators.settings_stay():
        from torch.testing._internal.common_optimizers import optim_db

    kind, rows = device().type, []
    for info in optim_db:
        has = {
            PLAIN: True,
            LISTS: "foreach" in info.supported_impls,
            FUSED: "fused" in info.supported_impls and kind in info.supports_fused_on,
        }
        for given in info.optim_inputs_func(device=kind):
            forms = {**has, CAPTURED: kind == "cuda" and given.kwargs.get("capturable")}
            rows += [(info.optim_cls.__name__, given.kwargs, form) for form, there in forms.items() if there]
    return tuple(row for row in rows if row[0] not in LEFT_OUT)


def draw(source: random.Random, seed: int, number: int) -> Case:
    """One case; each row of the table has its turn."""
    turn, row = divmod(number, len(table()))
    name, options, form = random.Random(f"{seed} {turn}").sample(table(), len(table()))[row]
    dtype, count = source.choice(FLOATS), source.choice((1, 3, 4, 6))
    few = source.sample(SIZES[name == "Adafactor" :], 2)  # weights of equal sizes can be mixed up
    sizes = tuple(source.choice(few) for _ in range(count))
    place = source.choice(PLACES)
    # Autograd gives a gradient its weight's strides. Of others fused forms refuse to work on a GPU, and are
    # silently wrong on a processor.
    places = (place, place if form == FUSED else source.choice(PLACES))
    if "lr" not in options and source.random() < LONG:
        options = {**options, "lr": LONG_STEP}
    takes = inspect.signature(getattr(optim, name)).parameters
    options = {**options, "betas": BETAS} if "betas" in takes else options
    if dtype is torch.float16 and "eps" in takes and isinstance(takes["eps"].default, float):
        options = {**options, "eps": EPS}
    case = Case(name, options, form, dtype, sizes, places, source.randrange(6))
    if form == CAPTURED:
        return case._replace(absent=count)
    if dtype is torch.float32 and source.random() < SCALED:
        overflows = tuple(sorted(source.sample(case.steps, source.choice((1, 2)))))
        return case._replace(sizes=((7,), *sizes[1:]), absent=count, overflows=overflows)
    return case


def needed(case: Case) -> float:
    """How many units a healthy optimizer needs: Adafactor adds up whole weights."""
    longest = max(math.prod(size) for size in case.sizes)
    return NEEDED * (max(1.0, math.sqrt(longest / GROWS_FROM)) if case.name == "Adafactor" else 1.0)


def known(case: Case) -> bool:
    """Whether torch is known to be wrong in this case.

    The fused form of SGD leaves weights in 16 bits as they are on a processor, but for the last few
    (pytorch#191763, until torch 2.13). Where a scaler leaves out the first step, it goes on with a momentum
    that nobody wrote (LibreYOLO#771; no correction is known).
    """
    if (case.name, case.form) != ("SGD", FUSED):
        return False
    halves = device().type == "cpu" and case.dtype is not torch.float32
    not_updated = halves and not generated_known.torch_is_newer_than(2, 13)
    return not_updated or (0 in case.overflows and bool(case.options.get("momentum")))


def made(case: Case, seed: int) -> Call:
    """The call that a case is, with the call that float64 evaluates."""
    drawn, weights, grads = random.Random(seed), list[torch.Tensor](), list[torch.Tensor]()
    for size in case.sizes:
        weights.append(operands.normal(*size, dtype=case.dtype, seed=drawn.randrange(2**31)))
        x = operands.normal(*size, dtype=case.dtype, seed=drawn.randrange(2**31))
        grads.append(torch.where(x < 0, -1, 1) * x.abs().clamp(LEAST, MOST))
    steps = tuple(one for one in case.steps if one not in case.overflows)
    plain = case._replace(form=PLAIN, places=(DENSE, DENSE), steps=steps, overflows=())
    right = Call(stepped, (weights, grads), {"case": plain}, case.dtype, seed=seed)
    call = Call(stepped, (weights, grads), {"case": case}, case.dtype, seed=seed, right=right)
    # In 16 bits squares change with the last bits by so much that all of one could be lost.
    return replace(call, steps=True, taken=True, excused=case.dtype is torch.float32)


def stepped(weights: Weights, grads: Weights, case: Case) -> list[torch.Tensor]:
    """Some steps: the weights after them, and then what the optimizer keeps of each."""
    weights = [_placed(one, case.places[0]).requires_grad_() for one in weights]
    given = [_placed(one, case.places[1]) for one in grads]
    kept = {key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in case.options.items()}
    optimizer = getattr(optim, case.name)(weights, **kept, **OPTIONS[case.form])
    scaler = GradScaler(device().type, SCALE, enabled=bool(case.overflows))
    run = _replayed(optimizer) if case.form == CAPTURED else lambda: scaler.step(optimizer)
    for step in case.steps:
        scale = float(scaler.scale(torch.ones((), device=device())))  # asked first, or it has none yet
        for place, (weight, own, grad) in enumerate(zip(weights, given, grads, strict=True)):
            own.copy_(grad * (TIMES[step] * scale))
            weight.grad = None if (step, place) == (1, case.absent) else own
        if step in case.overflows:
            given[0][-1] = torch.inf
        run()
        scaler.update()
    states = [optimizer.state[weight][key] for weight in weights for key in sorted(optimizer.state[weight])]
    return [one.detach() for one in (*weights, *states) if generated_trees.is_number(one)]


def _replayed(optimizer: optim.Optimizer) -> Callable[[], None]:
    """The first step eagerly, as it makes what is kept; then one graph, again and again."""
    graphs = list[torch.cuda.CUDAGraph]()

    def run() -> None:
        if not optimizer.state:
            with torch.cuda.stream(torch.cuda.Stream()):
                optimizer.step()
            torch.cuda.synchronize()
            return
        if not graphs:
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[0]):
                optimizer.step()
        graphs[0].replay()

    return run


def _placed(x: torch.Tensor, place: str) -> torch.Tensor:
    """A copy with equal numbers: dense, where it begins one number later, or with its axes turned."""
    if place == BEHIND:
        return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)
    if place == TURNED and x.dim() == len("nchw"):
        return x.clone(memory_format=torch.channels_last)
    if place == TURNED and x.dim() == len("mn"):
        return x.t().clone(memory_format=torch.contiguous_format).t()
    return x.clone()
