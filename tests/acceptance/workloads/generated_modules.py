"""Generated modules: PyTorch's own table of them, and wider recurrent nets and layers of attention.

In: a source of numbers. Out: calls with equal numbers, whose operands are weights, buffers and inputs.

A call makes a few steps in drawn modes. Its results are what each step gives, the buffers after the last
one, and gradients of inputs and weights. Float64 has the module itself, or the formula of its own grammar.
"""

import contextlib
import copy
import functools
import io
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch.nn.utils import parametrizations, rnn
from torch.utils import _python_dispatch

from workloads import (
    generated_elsewhere,
    generated_judge,
    generated_left,
    generated_modules_draws,
    generated_modules_kept,
    generated_operators,
    generated_trees,
    operands,
)
from workloads import generated_variations as variations
from workloads.generated_judge import Call
from workloads.generated_modules_known import LOOSER, is_wrong_without_gradients, known, needed
from workloads.generated_modules_plain import Own

OWN_TIMES = 3  # of each kind of the own grammar and each type, for one of each row of the table
WRAPPED, VARIED = 0.3, 0.6  # shares of cases of the table
NUMBERS = ("uneven", "zero row", "scaled")
WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    # By default it is an exponential of a matrix, which drawn operators have.
    "orthogonal": functools.partial(parametrizations.orthogonal, orthogonal_map="householder"),
}
TRAIN, EVAL = (True,), (False,)
MODES = (TRAIN, EVAL, (True, True, True), (True, False, True), (False, True))
# What reads where its numbers say, asks no weight for its size, or cancels: its samples keep their sizes.
# Of a group of one number GroupNorm's gradient is 0, and what rounds instead has no unit.
READS = (
    "Embedding", "CTCLoss", "NLLLoss", "MultiMarginLoss", "MultiLabelMarginLoss", "Fractional",
    "CrossEntropy", "RNN", "GRU", "LSTM", "GroupNorm",
)  # fmt: skip
# Their kernels' own gates alone: sums that are far from float64, as in drawn operators, and powers that leave
# their type.
ALONE = ("nn.CTCLoss", "nn.LocalResponseNorm", "nn.LPPool1d", "nn.LPPool2d", "nn.LPPool3d")
# A module with weights of its own, which is made in another way each time.
KEPT, COPIED, STORED = "its own weights", "deepcopy", "a pickle of it"
NO_GRADIENT = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@dataclass(frozen=True)
class Case:
    """A module of the table or of the own grammar; its text repeats it."""

    name: str
    dtype: str
    seed: int
    modes: tuple[bool, ...] = TRAIN
    made: tuple[tuple[str, Any], ...] = ()  # by what it is made; of the table nothing
    given: tuple[tuple[str, Any], ...] = ()  # sizes, and how it is called
    sample: int = 0
    wrapped: str = ""
    sizes: str = ""  # what is varied of a sample, with its weights
    numbers: str = ""

    @property
    def own(self) -> Own | None:
        """The module of the own grammar that it is."""
        is_own = self.name in generated_modules_draws.KINDS
        return Own(self.name, dict(self.made), dict(self.given)) if is_own else None

    @property
    def its_sample(self) -> Any:
        """The sample of the table that it is."""
        return _samples(self.name, self.dtype, training=self.modes[0])[self.sample]


@functools.cache
def table() -> dict[str, Any]:
    """PyTorch's modules by name."""
    with generated_operators.settings_stay():
        from torch.testing._internal.common_modules import module_db
    return {one.name: one for one in module_db}


@functools.cache
def rows() -> list[tuple[str, str]]:
    """Each module and type that has a case in a turn."""
    types = [str(one).removeprefix("torch.") for one in generated_judge.FLOATS]
    names = [*table(), *(one for one in generated_modules_draws.KINDS for _ in range(OWN_TIMES))]
    return [(name, dtype) for name in names for dtype in types]


@functools.lru_cache(maxsize=512)
def _samples(name: str, dtype: str, *, training: bool) -> list[Any]:
    generated_judge.seed_all(0)
    info = table()[name]
    inputs = info.module_inputs_func(
        info, device=torch.device("cpu"), dtype=getattr(torch, dtype), requires_grad=True, training=training
    )
    return [
        one
        for one in inputs
        if one.forward_input
        and not any(isinstance(each, rnn.PackedSequence) for each in one.forward_input.args)
    ]  # the own grammar packs rows itself: their sizes stay on the processor


def draw(source: random.Random, seed: int, number: int) -> Case:
    """One case; each row has its turn."""
    turn, place = divmod(number, len(rows()))
    name, dtype = random.Random(f"modules {seed} {turn}").sample(rows(), len(rows()))[place]
    case = Case(name, dtype, source.randrange(2**31))
    if name in generated_modules_draws.KINDS:
        modes = source.choice((TRAIN, EVAL, EVAL) if "BatchNorm" not in name else MODES)
        _, made, given = generated_modules_draws.draw(source, name, training=any(modes))
        return replace(case, modes=modes, made=tuple(made.items()), given=tuple(given.items()))
    stateful = table()[name].train_and_eval_differ or name.startswith(("nn.Conv", "nn.Linear"))
    case = replace(case, modes=source.choice(MODES) if stateful else TRAIN)
    samples = _samples(name, dtype, training=case.modes[0])
    wraps = name in ("nn.Linear", "nn.Embedding") or name.startswith("nn.Conv")
    wrapped = source.choice(tuple(WRAPS)) if wraps and source.random() < WRAPPED else ""
    reads = any(word in name for word in READS)
    overflows = dtype == "float16" and len(case.modes) > 1  # a variance that a later step takes
    return replace(
        case, sample=source.randrange(len(samples)), wrapped=wrapped,
        sizes=source.choice(("", *variations.SIZES)) if not reads and source.random() < VARIED else "",
        numbers=source.choice(NUMBERS) if source.random() < VARIED and not overflows else "",
    )  # fmt: skip


class Stepped(nn.Module):  # type: ignore[misc]
    """A module that makes the steps of a case, and gives its buffers too."""

    def __init__(self, case: Case) -> None:
        """Make the module of a case, with whatever weights."""
        super().__init__()
        self.case = case
        if case.own:
            self.its = generated_modules_draws.module(case.own)
        else:
            given = case.its_sample.constructor_input
            self.its = table()[case.name].module_cls(*given.args, **given.kwargs)
        self.its = WRAPS[case.wrapped](self.its) if case.wrapped else self.its
        for one in self.its.modules():  # what is random has no right result
            if any(case.modes) and isinstance(one, nn.Dropout):
                one.p = 0.0
            if any(case.modes) and isinstance(getattr(one, "dropout", None), float):
                one.dropout = 0.0

    def forward(self, args: Any, kwargs: Any) -> Any:
        """Each step has half of the numbers of the one before."""
        out = []
        for n, training in enumerate(self.case.modes):
            self.its.train(training)
            for one in self.its.modules():  # backward of the step before has the ones that were there
                one._buffers.update({key: generated_trees.copied(its) for key, its in one._buffers.items()})
            half = functools.partial(_times, 2.0**-n)
            out.append(_called(self.its, self.case, *generated_trees.mapped((args, kwargs), half)))
        return out, list(self.its.buffers())


def _times(factor: float, leaf: Any) -> Any:
    return leaf * factor if factor != 1 and generated_trees.is_number(leaf) else leaf


def _called(its: nn.Module, case: Case, args: Any, kwargs: Any) -> Any:
    return generated_modules_draws.called(its, case.own, kwargs) if case.own else its(*args, **kwargs)


@functools.lru_cache(maxsize=64)
def _template(case: Case) -> Stepped:
    """A module whose weights are never used; a lazy one has seen its inputs."""
    generated_judge.seed_all(case.seed)
    stepped = Stepped(case)
    if case.name.startswith("nn.Lazy"):
        with torch.no_grad():
            stepped.its(*generated_trees.mapped(case.its_sample.forward_input.args, lambda one: one.float()))
    return stepped


def run(weights: Any, buffers: Any, args: Any, kwargs: Any, *, case: Case, form: str = "") -> Any:
    """The steps with these weights; with those of a module that was loaded or copied, by its form."""
    if form in (KEPT, COPIED, STORED):
        leaves = generated_trees.leaves((weights, args, kwargs))
        on = next((one for one in leaves if generated_trees.is_number(one)), None)
        load = functools.partial(_loaded, case, form, buffers=buffers, on=on)
        return generated_modules_kept.called(load, weights, (args, kwargs))
    state = {**weights, **buffers}
    with NO_GRADIENT.get(form, contextlib.nullcontext)():
        return torch.func.functional_call(_template(case), state, (args, kwargs))


def _loaded(case: Case, form: str, weights: Any, buffers: Any, on: torch.Tensor | None) -> nn.Module:
    """A module with these weights of its own, where a tensor is and of its type."""
    with _python_dispatch._disable_current_modes():  # what loads it is none of its kernels
        its = Stepped(case)
        its = its if on is None else its.to(on.device, on.dtype)
        its.load_state_dict({**weights, **buffers})
        if form == STORED:
            place = io.BytesIO()
            torch.save(its, place)
            place.seek(0)
            return cast("nn.Module", torch.load(place, weights_only=False))
        return copy.deepcopy(its) if form == COPIED else its


def formula(weights: Any, buffers: Any, _: Any, kwargs: Any, *, case: Case) -> Any:
    """The steps of the own grammar, by its formula."""
    assert case.own
    out = []
    weights, state = _of_its(weights), _of_its(buffers)
    for n, training in enumerate(case.modes):
        x = generated_trees.mapped(kwargs, functools.partial(_times, 2.0**-n))
        out.append(generated_modules_draws.formula(case.own, weights, state, x, training=training))
    return out, list(state.values())


def _of_its(given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("its."): one for name, one in given.items()}


def _weight(one: torch.Tensor, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers of which none is 0 or 1 as in a new module, in products as large as their inputs."""
    own = operands.normal(*one.shape, dtype=torch.float32, seed=seed).cpu()
    own = own * one[0].numel() ** -0.5 if one.dim() > 1 else one.detach().float() + 0.25 * own
    return own.to(dtype)


def _buffer(name: str, one: torch.Tensor, dtype: torch.dtype, seed: int) -> torch.Tensor:
    if name.endswith(("running_mean", "running_var")):
        own = operands.normal(*one.shape, dtype=torch.float32, seed=seed).cpu()
        own = own.abs() + 0.5 if name.endswith("var") else own
        return own.to(dtype)
    return generated_trees.copied(one).to(dtype) if one.is_floating_point() else generated_trees.copied(one)


def base(case: Case) -> Call:
    """The call as it is."""
    dtype, its = getattr(torch, case.dtype), _template(case)
    weights = {
        name: _weight(one, dtype, case.seed + n) for n, (name, one) in enumerate(its.named_parameters())
    }
    buffers = {
        name: _buffer(name, one, dtype, case.seed + n) for n, (name, one) in enumerate(its.named_buffers())
    }
    if case.own:
        right: Any = functools.partial(formula, case=case)
        args, kwargs = (), generated_modules_draws.inputs(case.own, dtype, case.seed)
        flags = ["mask" not in name and "padding" not in name for name in kwargs]
    else:
        right, given = None, case.its_sample.forward_input
        leaves = generated_trees.leaves((given.args, given.kwargs))
        flags = [one.requires_grad for one in leaves if isinstance(one, torch.Tensor)]
        args, kwargs = generated_trees.mapped((given.args, given.kwargs), generated_trees.copied)
    flags = [True] * len(weights) + [False] * len(buffers) + flags
    call = Call(
        functools.partial(run, case=case), (weights, buffers, args, kwargs), {}, dtype, gradients=True,
        seed=case.seed, fixed=frozenset(n for n, learned in enumerate(flags) if not learned),
        alike=case.seed % 4 == 2, uneven=bool(case.seed % 2), steps=True, excused=case.name in table(),
        inside=case.name in table(), looser=LOOSER,
        overflows=case.name in table() or case.dtype == "float16", alone=case.name in ALONE,
    )  # fmt: skip
    return replace(call, right=replace(call, function=right)) if right else call


def forms_of(case: Case) -> list[tuple[str, Call]]:
    """The calls of a case that must agree; a form that a case has, a simpler case has too."""
    source, call = random.Random(case.seed), base(case)
    if case.sizes:
        other = variations.SIZES[case.sizes](call, source)
        generated_left.say("module of other sizes", generated_left.JUDGED if other else "no size fits")
        call = other or call
    call = (variations.NUMBERS[case.numbers](call, source) if case.numbers else None) or call

    inside = call.alone or (call.inside and case.dtype != "float32")  # halves lose by what kernels are

    def in_form(form: str, **changed: Any) -> Call:
        return replace(call, function=functools.partial(run, case=case, form=form), inside=inside, **changed)

    forms = {"": call, "as views": variations.in_other_places(call, source)}
    if not case.sizes:  # a module of its own has the sizes of its sample
        forms |= {one: in_form(one) for one in (KEPT, COPIED, STORED) if one != STORED or not case.wrapped}
    if is_wrong_without_gradients(case):
        generated_left.say("known", "the fast path of encoders")
    else:
        forms |= {one: in_form(one, gradients=False) for one in NO_GRADIENT}
    # On a device halves of many rows end in an internal assertion ("launch bounds"), which is loud.
    pools = case.name == "nn.AdaptiveAvgPool2d" and generated_elsewhere.place() is not None
    if any(one.dim() in (4, 5) for one in call.tensors()) and not pools:
        forms["channels last"] = call.mapped(_channels_last)
    for form, one in forms.items():
        smaller = functools.partial(_smaller, case, form)
        forms[form] = replace(
            one,
            on=generated_elsewhere.place(),
            words=f"module(generated_modules.{case}, {form!r})",
            smaller=smaller,
        )
    return list(forms.items())


def _chosen(case: Case) -> list[tuple[str, Call]]:
    """Of forms that are much alike, one each."""
    source = random.Random(case.seed + 1)
    kept, without = source.choice((KEPT, COPIED, STORED)), source.choice(tuple(NO_GRADIENT))
    passed = {KEPT, COPIED, STORED, *NO_GRADIENT} - {kept, without}
    return [(form, call) for form, call in forms_of(case) if form not in passed]


def _smaller(case: Case, form: str) -> Iterator[Call]:
    for one in simpler(case):
        found = None
        with generated_left.counted(), contextlib.suppress(*generated_left.REFUSED):
            found = dict(forms_of(one)).get(form)
        if found is not None:
            yield found


def simpler(case: Case) -> Iterator[Case]:
    """Cases with one condition less, or with a smaller size."""
    for name in ("wrapped", "sizes", "numbers"):
        if getattr(case, name):
            yield _with(case, name, "")
    for n in range(len(case.modes) if len(case.modes) > 1 else 0):
        yield replace(case, modes=case.modes[:n] + case.modes[n + 1 :])
    for field in ("made", "given"):
        pairs = getattr(case, field)
        for n, (key, value) in enumerate(pairs):
            for less in _less(value):
                yield _with(case, field, (*pairs[:n], (key, less), *pairs[n + 1 :]))


def _with(case: Case, field: str, value: Any) -> Case:
    changed: dict[str, Any] = {field: value}
    return replace(case, **changed)


def _less(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [False] * value
    if isinstance(value, str):
        return [] if value in {"", "relu", "tanh", "gelu"} else [""]
    if isinstance(value, int):
        return sorted({one for one in (1, value // 2, value - 1) if 0 < one < value})
    return []


def _channels_last(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.dim() not in (4, 5):
        return leaf
    order = torch.channels_last if leaf.dim() == 4 else torch.channels_last_3d
    return leaf.contiguous(memory_format=order)


def drawn(source: random.Random, seed: int, number: int) -> tuple[str, list[tuple[str, Call]], float] | None:
    """Words, the calls, and the units that they need; `None` if it is left, and for what reason is said."""
    case = draw(source, seed, number)
    if known(case):
        generated_left.say(generated_left.CALL, "a known fault")
        return None
    with generated_left.refusing(generated_left.CALL, "torch does not make it"):
        return str(case), _chosen(case), needed(case)
    return None
