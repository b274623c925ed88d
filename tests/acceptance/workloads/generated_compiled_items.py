"""Small programs for a compiler: an operator of PyTorch's table among views, sums in place and others.

In: a source of numbers, an operator, a type. Out: an `Item`: words, and a call that a processor ran in eager
mode. Drawn are the view of a leaf that the operator reads, what else happens to the leaf, whether it works in
place, a second operator that reads the same view or the first one's result, and what is done to the result.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.checkpoint import checkpoint

from workloads import device, generated_judge, generated_left, generated_operators, generated_trees
from workloads import generated_variations as variations
from workloads.generated_few import Few
from workloads.generated_places import CHANGES, PARTS, PLACES, Shape

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Iterator

    from workloads.generated_judge import Call

# What draws numbers, when its arguments let it.
DRAWING = (
    *generated_operators.DRAWS_ALL, "bernoulli", "multinomial", "nn.functional.dropout",
    "nn.functional.alpha_dropout", "nn.functional.feature_alpha_dropout", "nn.functional.rrelu",
    "nn.functional.fractional_max_pool", "nn.functional.scaled_dot_product",
    "nn.functional.multi_head_attention",
)  # fmt: skip
PARTNERS = 4  # operators that are tried as a second one
MOST_ELEMENTS = 2**14  # of what is placed in something larger, or that a second operator reads
MOST_RESULTS = 32  # of one program, with its gradients
# The shares of programs that have other sizes and other numbers than PyTorch's samples, and so on.
VARIED, PLACED, IN_PLACE, PARTNERED, CHAINED, RECOMPUTED, AUTOCAST = 0.3, 0.6, 0.4, 0.5, 0.6, 0.15, 0.1
APART, HIDDEN, REDUCING = 0.25, 0.6, 0.4
# Of programs that draw numbers: most samples draw none, and few numbers do not tell how they lie.
DRAWING_TRIED, DRAWING_VARIED, DRAWING_RECOMPUTED = 12, 0.7, 0.5
# Recomputed in eager mode, its gradient is made of memory that nobody wrote (docs/reference/trust.md).
RECOMPUTED_WRONG = ("nn.functional.rrelu",)
# It works out places in the type of its operand, and says so where they are beyond its end.
ENDS_IN_HALVES = ("nn.functional.fractional_max_pool",)
# What happens to the leaf beside the operator.
ELSEWHERE = ("", "", "given back as a view", "read again", "changed before", "changed after",
             "changed for the caller")  # fmt: skip
# What happens to the result.
AFTER = ("", "", "summed in place", "written into a buffer", "added to a part of a buffer", "a part changed",
         "a changed part given too", "given twice", *("summed alone",) * 3)  # fmt: skip


@dataclass(frozen=True)
class Program:
    """An operator and what surrounds it: all is in its fields, to be drawn, said and made smaller.

    Its arguments: the operator's first one, the others with their names, and those of a second operator.
    """

    name: str
    operator: Callable[..., Any]
    shape: Shape = ()  # of the operand
    result: Shape = ()  # of what the operator gives
    fixed: frozenset[int] = frozenset()  # the places of tensors without a gradient, which it may change
    place: str = ""
    elsewhere: str = ""
    in_place: Callable[..., Any] | None = None
    partner: str = ""
    other: Callable[..., Any] | None = None
    chained: bool = False
    hidden: bool = False  # what the second operator reads is given to nobody else
    after: str = ""
    buffer: str = "a slice"
    part: str = "all"
    change: str = "times 0.75"
    recomputed: bool = False
    autocast: bool = False

    def __call__(self, *given: Any) -> Any:
        """What the program gives, and what it left in tensors that are not its own."""
        prepared = self.prepare(given)
        return self.compiled(*prepared), self.left(prepared)

    def prepare(self, given: Any) -> Any:
        """What a program may change is a copy."""
        places = itertools.count()
        return generated_trees.mapped(
            given, lambda one: one.clone() if _is(one) and self._changes(next(places)) else one
        )

    def left(self, prepared: Any) -> list[torch.Tensor]:
        """What a program left in the copies."""
        given = [one for one in generated_trees.leaves(prepared) if _is(one)]
        return [one for n, one in enumerate(given) if self._changes(n)]

    def _changes(self, place: int) -> bool:
        return place in self.fixed or (place == 0 and self.elsewhere == "changed for the caller")

    def compiled(self, *given: Any) -> Any:
        """What a compiler gets."""
        with torch.autocast(device().type, dtype=torch.bfloat16, enabled=self.autocast):
            if self.recomputed:
                return checkpoint(self.inside, *given, use_reentrant=False)
            return self.inside(*given)

    def inside(self, first: Any, others: Any, partners: Any) -> tuple[Any, ...]:
        """The operator on a view of the leaf, and what surrounds it."""
        base, more = first, []
        if self.in_place or self.elsewhere in ("changed before", "changed after"):
            base = first.clone()
        if self.elsewhere == "changed before":
            self.changed(base)
        x = PLACES[self.place].take(base, self.shape)
        out = (self.in_place or self.operator)(x, *others[0], **others[1])
        if self.other:
            more.append(self.other(_first(out) if self.chained else x, *partners[0], **partners[1]))
        if self.elsewhere == "given back as a view":
            more.append(base[..., 0:])
        if self.elsewhere == "read again" or self.in_place:
            more.append(base.sin())
        if self.elsewhere in ("changed after", "changed for the caller"):
            self.changed(base)
            more.append(base.sum())
        return tuple(more) if self.hidden and self.other else (self.finished(out), *more)

    def finished(self, out: Any) -> Any:
        """The first result, changed, and the others."""
        if not self.after:
            return out
        # A lazy conjugation is lost where a result is given twice: docs/reference/trust.md, known faults.
        out = generated_trees.mapped(out, lambda one: one.resolve_conj().resolve_neg() if _is(one) else one)
        y = _first(out)
        if self.after == "summed alone":  # as a loss is: the gradient that arrives has stride 0
            return y.sum()
        if self.after == "summed in place":
            total = torch.full_like(y, 0.5)
            total += y
            total.mul_(0.75).add_(y)
            return total, out
        if "buffer" in self.after:
            place = PLACES[self.buffer]
            buffer = place.make(y.new_full(self.result, 0.25)).clone()
            part = place.take(buffer, self.result)
            (part.add_ if "added" in self.after else part.copy_)(y)
            return buffer
        if self.after == "given twice":
            return out, y[..., 0:], y.detach()
        part = self.changed(y)
        return (out, part) if self.after == "a changed part given too" else out

    def changed(self, y: torch.Tensor) -> torch.Tensor:
        """Change a part of a tensor in place, and give the part."""
        part = PARTS[self.part](y) if y.dim() else y
        CHANGES[self.change](part)
        return part

    def smaller(self) -> Iterator[Program]:
        """The same program without one of its parts; the places of arguments stay."""
        for names in LESS:
            less = {name: getattr(plain(self), name) for name in names}
            if any(getattr(self, name) != value for name, value in less.items()):
                yield replace(self, **less)

    def __str__(self) -> str:
        read = f"its result{' alone' * self.hidden}" if self.chained else "the same"
        changes = "changed" in self.elsewhere or "changed" in self.after
        said = (
            (True, f"{self.name}{' in place' * bool(self.in_place)}"),
            (self.place, f"of {self.place} of its leaf"),
            (self.other, f"then {self.partner} of {read}"),
            (self.elsewhere, f"its leaf {self.elsewhere}"),
            (self.after, f"its result {self.after}{f' ({self.buffer})' * ('buffer' in self.after)}"),
            (changes, f"changed: {self.part} {self.change}"),
            (self.recomputed, "recomputed"),
            (self.autocast, "in autocast"),
        )
        return ", ".join(words for holds, words in said if holds)


LESS = (("hidden",), ("other", "partner"), ("in_place",), ("elsewhere",), ("after",), ("recomputed",))


def plain(program: Program) -> Program:
    """The operator with nothing around it."""
    return Program(program.name, program.operator, program.shape, fixed=program.fixed)


def program_of(call: Call) -> Program:
    """The program that a call runs."""
    return cast("Program", call.function)


def _without(call: Call, names: Iterable[str]) -> Call:
    """The call of the same program with nothing drawn for some of its fields."""
    program = program_of(call)
    return replace(call, function=replace(program, **{one: getattr(plain(program), one) for one in names}))


def _is(one: Any) -> bool:
    return isinstance(one, torch.Tensor)


def _first(out: Any) -> Any:
    return next((one for one in generated_trees.leaves(out) if _is(one)), out)


@dataclass(frozen=True)
class Item:
    """One program and its arguments; `of` is the operator that a finding is named by."""

    of: str
    call: Call
    draws: bool = False  # numbers, so that no other run says what is right

    def __str__(self) -> str:
        kinds = {str(one.dtype)[6:] for one in self.call.tensors() if one.is_floating_point()}
        return f"{self.call.function}, {' and '.join(sorted(kinds))}"


def draw(source: random.Random, name: str, kind: str) -> Item | None:
    """One program of an operator and a type; `None` if the processor refuses it in eager mode."""
    if name.startswith(ENDS_IN_HALVES) and kind != "float32":
        generated_left.say(generated_left.CALL, "it ends loudly in halves")
        return None
    drawn = _sample(source, name, kind)
    call = tried(_plain(name, drawn)) if drawn else None
    if not call:
        return None
    with generated_left.refusing("surroundings", "a place does not fit"):
        other = _surrounded(source, call, name, kind)
        for names in ((), *LESS):
            other = _without(other, names)
            if found := tried(other):
                generated_left.say("surroundings")
                return Item(name, found, draws(found))
        generated_left.say("surroundings", "eager mode refuses all of them")
    return Item(name, call, draws(call))


def draws(call: Call) -> bool:
    """Whether a call moves the state of the processor's generator; not if the processor refuses it."""
    generated_judge.seed_all(call.seed)
    before = torch.default_generator.get_state()
    with generated_left.refusing("sample", "whether it draws numbers"):
        generated_judge.results(replace(call, gradients=False))
        return not torch.equal(before, torch.default_generator.get_state())
    return False


def _plain(name: str, call: Call) -> Call:
    first = call.args[0] if call.args else None
    shape = tuple(first.shape) if isinstance(first, torch.Tensor) else ()
    program = Program(name, generated_operators.function_of(name), shape, fixed=call.fixed)
    return replace(
        call, function=program, args=(first, (call.args[1:], dict(call.kwargs)), ((), {})), kwargs={}
    )


def _sample(source: random.Random, name: str, kind: str, *, varied: bool = True) -> Call | None:
    """One of PyTorch's samples with drawn sizes and numbers, on the processor."""
    op, dtype = generated_operators.table()[name], getattr(torch, kind)
    samples = generated_operators._samples(name, dtype)
    if not samples:
        generated_left.say(generated_left.CALL, "no sample can be judged")
        return None
    seed = source.randrange(2**31)
    chosen = source.sample(samples, min(len(samples), DRAWING_TRIED if name.startswith(DRAWING) else 1))
    calls = [generated_operators._call(op, dtype, one, seed) for one in chosen]
    function = generated_operators.function_of(name)
    call = next((one for one in calls[1:] if draws(replace(one, function=function))), calls[0])
    if source.random() < APART * varied and not generated_operators._skipped(op, dtype, "view"):
        call = variations.in_other_places(call, source)
    if name.startswith(DRAWING):
        larger = variations.SIZES[source.choice(list(variations.SIZES))]
        return (larger(call, source) if source.random() < DRAWING_VARIED * varied else None) or call
    sizes = source.choice(generated_operators.SIZES) if source.random() < VARIED * varied else ""
    numbers = source.choice(generated_operators.NUMBERS) if source.random() < VARIED * varied else ""
    case = generated_operators.Case(name, kind, sizes, numbers, seed)
    return generated_operators._varied(call, case, source) or call


def tried(call: Call) -> Call | None:
    """The call if a processor takes it in eager mode: on a GPU, a place outside an operand ends the process.

    Its unit is that of the shortest type in it: a compiler may leave out a rounding to that. What may be
    worked out again must also run when it is not: a tracer works it out once.
    """
    kept, many = None, 0
    with generated_left.refusing(generated_left.CALL, "eager mode refuses it"):
        if program_of(call).recomputed:
            generated_judge.results(_without(call, ["recomputed"]))
        with Few():
            many = len(generated_judge.results(call))
        with Few() as mode:  # the gradients that come in have been rounded to a short type
            generated_judge.results(replace(call, gradients=False))
        kept = mode.types
    if many > MOST_RESULTS:
        generated_left.say(generated_left.CALL, "it gives more results than a program may have")
    if kept is None or many > MOST_RESULTS:
        return None
    types = [call.dtype, *(one for one in generated_judge.HALVES if one in kept)]
    unit = max(types, key=lambda one: torch.finfo(one).eps)
    return replace(call, dtype=unit)


def shares_unsaid(call: Call) -> bool:
    """Whether an operator's results share its first operand's memory and are no views of it.

    As of `unsafe_split`, and of dropout of nothing, which in eager mode gives its operand itself. A compiler
    gives copies: what becomes of one when the other is changed nobody promises (docs/reference/trust.md).
    """
    program, first = program_of(call), call.args[0]
    with torch.no_grad():
        out = program.operator(first, *call.args[1][0], **call.args[1][1])
    return any(
        one is first or (_memory(one) == _memory(first) and not one._is_view())
        for one in generated_trees.leaves(out)
        if _is(one)
    )


def _memory(one: torch.Tensor) -> int | None:
    return one.untyped_storage().data_ptr() if one.layout is torch.strided and one.numel() else None


def _surrounded(source: random.Random, call: Call, name: str, kind: str) -> Call:
    """The call with drawn surroundings, which may not fit."""
    program, first, op = program_of(call), call.args[0], generated_operators.table()[name]
    again = DRAWING_RECOMPUTED if name.startswith(DRAWING) else RECOMPUTED
    made: dict[str, Any] = {"after": source.choice(AFTER), "change": source.choice(list(CHANGES))}
    made |= {"part": source.choice(list(PARTS)), "buffer": source.choice(list(PLACES))}
    made |= {
        "recomputed": source.random() < again and call.gradients and name not in RECOMPUTED_WRONG,
        "autocast": kind == "float32" and source.random() < AUTOCAST,
    }
    result = _first(generated_judge.results(replace(call, gradients=False)))
    large = not _is(result) or not result.is_floating_point() or result.numel() > MOST_ELEMENTS
    if large or (result.dim() < PLACES[made["buffer"]].dims and "buffer" in made["after"]):
        made["after"] = ""
    made["result"] = tuple(result.shape) if _is(result) else ()
    partners, fixed = cast("Any", ((), {})), call.fixed
    if _is(first) and shares_unsaid(call):
        around = {key: made[key] for key in ("recomputed", "autocast")}
        return replace(call, function=replace(program, **around))
    if _is(first) and first.is_floating_point() and first.numel() <= MOST_ELEMENTS:
        there = {key: place for key, place in PLACES.items() if first.dim() >= place.dims}
        fits = [key for key, place in there.items() if not (place.other_numbers and _is_exact(name))]
        made["place"] = source.choice(fits) if source.random() < PLACED else ""
        made["elsewhere"] = source.choice(ELSEWHERE)
        its = op.inplace_variant
        if its and not generated_operators.is_seeded(its) and source.random() < IN_PLACE:
            made["in_place"] = its
        made["chained"] = source.random() < CHAINED
        into = result if made["chained"] else first
        reducing = made["chained"] and source.random() < REDUCING
        found = _partner(source, into, kind, reducing=reducing) if source.random() < PARTNERED else None
        if found:
            made["partner"], other = found
            made["hidden"] = made["chained"] and source.random() < HIDDEN
            made["other"] = generated_operators.function_of(made["partner"])
            partners = (other.args[1:], dict(other.kwargs))
            offset = len(call.tensors()) - 1
            fixed |= {offset + n for n in other.fixed if n}
        first = PLACES[made["place"]].make(first).clone()
    return replace(
        call,
        function=replace(program, fixed=fixed, **made),
        args=(first, call.args[1], partners),
        fixed=fixed,
    )


def _is_exact(name: str) -> bool:
    """Whether an operator needs operands of one kind, or reads where their numbers or strides say."""
    reads = (*generated_operators.READS_BY_NUMBERS, *generated_operators.READS_BEYOND)
    return generated_operators._is_exact(name) or name.startswith(reads)


def _partner(source: random.Random, into: Any, kind: str, *, reducing: bool) -> tuple[str, Call] | None:
    """An operator of the same type that takes a given tensor as its first argument."""
    if not _is(into) or into.dtype is not getattr(torch, kind):
        return None
    names = [name for name, each in generated_operators.rows() if each == kind and not _is_exact(name)]
    if reducing:  # the gradient of a sum is one number for all, which a compiler keeps with stride 0
        names = [name for name in names if "Reduction" in type(generated_operators.table()[name]).__name__]
    for name in source.sample(names, PARTNERS):
        call = _sample(source, name, kind, varied=False)
        if call and call.args and _is(call.args[0]) and call.args[0].is_floating_point():
            other = replace(call, args=(into.detach().clone(), *call.args[1:]))
            plain = _plain(name, other)
            if tried(plain) and not shares_unsaid(plain):
                return name, other
    return None
