"""Generated cases: what nobody named. In: a family, a seed, a count. Out: what failed, and what was judged.

Each case has its own source of numbers, so it can be repeated alone, in tests/acceptance:
`python3 -c "from workloads import generated; print(generated.repeat('operators', 0, 17))"`.
A case that fails is made smaller for as long as it fails.
"""

import contextlib
import importlib
import itertools
import math
import os
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from workloads import (
    device,
    generated_attention,
    generated_doubts,
    generated_draws,
    generated_elsewhere,
    generated_inside,
    generated_jagged,
    generated_judge,
    generated_left,
    generated_operators,
    generated_optimizers,
    generated_processes,
    generated_report,
    generated_sizes,
    generated_words,
    operands,
)
from workloads import generated_variations as variations
from workloads.generated_judge import Call


class Plan(NamedTuple):
    """How many cases: the least, the most, and the seconds in which to go beyond the least."""

    least: int
    most: int
    seconds: float


FACTOR = 4.0  # by which what a healthy operator needs may be left, in units of the judge
WITNESS_S = 2.0  # of float64 on the processor, beside a device: many evaluations follow the first one
# A refusal is loud, and grammars ask for what is refused. These errors are none: a kernel broke.
BROKEN = (
    "cuda error", "hip error", "internal assert", "illegal memory", "misaligned", "cublas_status",
    "cudnn_status",
)  # fmt: skip
NOT_WRITTEN = "NotImplementedError"  # what says so refuses, also where torch says that it takes the call
# Of soak, on a processor and on a GPU: so many turns in any case, then more until the time is over, at most
# so many. A turn is one case; of these families it is one of each operator and type, of each optimizer's
# options and form, and of each function of a size.
TURNS: dict[str, Callable[[], int]] = {
    "operators": lambda: len(generated_operators.rows()),
    "optimizers": lambda: len(generated_optimizers.table()),
    "huge": lambda: len(generated_sizes.NAMES),
    "modules": lambda: len(importlib.import_module("workloads.generated_modules").rows()),
    "transformers": lambda: len(importlib.import_module("workloads.transformers_models").table()),
}
STANDARD_COUNTS = 60, 600  # of sizes, on a processor and on a GPU
PLANS = {
    "operators": (Plan(1, 1, 0), Plan(1, 1, 0)),
    "sizes": (Plan(100, 400, 300), Plan(1000, 3000, 900)),
    "huge": (Plan(0, 0, 0), Plan(1, 20, 300)),
    "optimizers": (Plan(1, 20, 60), Plan(1, 100, 180)),
    "attention": (Plan(100, 1000, 600), Plan(1000, 8000, 900)),
    "jagged": (Plan(40, 400, 30), Plan(200, 4000, 60)),
    "modules": (Plan(1, 1, 0), Plan(1, 1, 0)),
    "noise": (Plan(24, 400, 60), Plan(64, 4000, 120)),
    "triton": (Plan(20, 60, 60), Plan(60, 3000, 180)),
    "transformers": (Plan(1, 1, 0), Plan(1, 1, 0)),
    "torchao": (Plan(600, 600, 0), Plan(600, 600, 0)),
}
IN_PROCESSES = ("operators", "modules", "noise", "triton", "transformers", "torchao")
MOST_PROCESSES = 16
STANDARD_SEED = 0  # the same cases in every run: a certificate and a night ask the same
FEWER_BITS = (
    (torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cuda.matmul, "allow_tf32"),
    (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
)
AGAIN = 3  # calls with the same sizes and other numbers, of which most must fail as well
SHRINKS = 40  # tries for one failure
SHRINK_S = 60.0  # after which no try begins: a compiled one takes seconds
# A kernel that is launched for no element; nothing is damaged by that.
NO_ELEMENT = ("invalid argument", "invalid configuration argument")


def check(
    family: str,
    seed: int,
    least: int,
    most: int,
    *,
    seconds: float = 0,
    sizes: str = "small",
    processes: int = 1,
    chosen: Sequence[int] = (),
) -> dict[str, Any]:
    """Judge cases of a seed from the first on: `least` of them in any case, then until the time is over.

    Or those with the `chosen` numbers.
    """
    ends = time.monotonic() + seconds
    drawn, judged, worst, failed, left = 0, 0, 0.0, [], list[Any]()
    less = dict.fromkeys(generated_report.LESS, 0)
    numbers = itertools.takewhile(lambda n: n < least or time.monotonic() <= ends, range(most))
    cases = ((family, seed, n, sizes) for n in chosen or numbers)
    if processes == 1:
        answers: Iterable[Any] = ((case, _judge(case)) for case in cases)
    else:
        if family == "operators":
            generated_operators.rows()  # before there are copies of this process
        answers = generated_processes.each(_judge, cases, processes)
    for case, answer in answers:
        ended = isinstance(answer, generated_processes.Ended)
        said, counts = (_ended(case, answer), Counter()) if ended else answer
        drawn += 1
        reason = generated_left.why(counts) if said is None else generated_left.JUDGED
        left += [{("case", reason): 1}, counts]
        if said is None:
            continue
        judged += 1
        margin, words = said
        less = {key: count + (generated_report.LESS[key] in words) for key, count in less.items()}
        worst = max(worst, margin) if margin <= 1 else worst
        failed += [words] if margin > 1 else []
    told = {"drawn": drawn, "judged": judged, **less, "left": generated_left.summed(left)}
    return {"family": family, "seed": seed, **told, "worst": worst, "failed": failed}


def _judge(case: tuple[str, int, int, str]) -> tuple[tuple[float, str] | None, Counter[tuple[str, str]]]:
    """What is said of a case, and what was left of it."""
    with _plain(), generated_processes.limited(), generated_left.counted() as counts:
        return _one(*case), counts


def _ended(case: tuple[str, int, int, str], how: generated_processes.Ended) -> tuple[float, str]:
    again = f"    again: {_again(*case)}"
    if case[0] == "triton":
        its: Any = importlib.import_module("workloads.generated_triton")
        again = f"{its.shown(its.draw(*case[1:3]))}{again}"
    words = generated_operators.draw(*case[1:3]) if case[0] == "operators" else case[0]
    return math.inf, f"  {words}: {how.words}\n{again}"


def _again(family: str, seed: int, number: int, sizes: str) -> str:
    return f"generated.repeat({family!r}, {seed}, {number}, {sizes!r})"


def margin(family: str, seed: int, number: int, sizes: str = "small") -> float | None:
    """The distance of one case as a share of its gate; `None` if it is not judged."""
    drawn = generated_draws.drawn(family, seed, number, sizes)
    said = _worst(drawn[1], drawn[2]) if drawn else None
    if drawn is None or said is None:
        return None
    return said[0] if said[0] <= 1 or _repeats(family, drawn[1][said[2]][1], drawn[2]) else None


def repeat(family: str, seed: int, number: int, sizes: str = "small") -> str:
    """One case again, in words."""
    with _plain():
        said = _one(family, seed, number, sizes)
    return "not judged" if said is None else f"{said[0]:.3g} of its gate: {said[1]}"


def attention(**parts: Any) -> str:
    """A case of attention that is given by its parts, in words."""
    return _said(generated_attention.made(generated_attention.Case(**parts)))


def jagged(case: generated_jagged.Case) -> str:
    """A case of jagged tensors, in words."""
    return _said(generated_jagged.made(case))


def module(case: Any, form: str = "") -> str:
    """A case of modules in one of its forms, in words."""
    its: Any = importlib.import_module("workloads.generated_modules")
    return _said(dict(its.forms_of(case))[form], its.needed(case))


def _said(call: Call, needed: float = generated_draws.ATTENTION_NEEDED) -> str:
    with _plain():
        said = _judged(call, needed)
    return "not judged" if said is None else f"{said[0]:.3g} of its gate: {said[1]}"


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    """Run the body without warnings, and with no fewer bits than its types have.

    By default convolutions use TF32, and products in 16 bits may add up parts in 16 bits.
    """
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        for place, name in FEWER_BITS:
            stack.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, False)
        warnings.simplefilter("ignore")
        yield


def _one(family: str, seed: int, number: int, sizes: str) -> tuple[float, str] | None:
    if family in generated_draws.OF_THEIR_OWN:
        module: Any = importlib.import_module(f"workloads.generated_{family}")
        found: tuple[float, str] | None = module.one(seed, number)
        return found
    drawn = generated_draws.drawn(family, seed, number, sizes)
    said = _worst(drawn[1], drawn[2]) if drawn else None
    if drawn is None or said is None:
        return None
    words, forms, needed = drawn
    margin, told, n = said
    if margin <= 1:
        return margin, f"{words}: {told}"
    form, call = forms[n]
    with generated_left.counted():  # what other calls leave is not this case's
        repeats = _repeats(family, call, needed)
        small = _smaller(call, needed) if repeats else call
    if not repeats:
        generated_left.say(generated_left.CALL, "it does not fail with other numbers")
        return None
    again = _again(family, seed, number, sizes)
    return margin, (
        f"  {words}{form and f' {form}'}: {told}\n    at its smallest {generated_words.shown(small)}: "
        f"{(_judged(small, needed) or said)[1]}\n    again: {again}"
    )


def _worst(forms: list[tuple[str, Call]], needed: float) -> tuple[float, str, int] | None:
    """The worst of calls with equal numbers: its share of the gate, words, and which one it is.

    The words say what excused any of them.
    """
    reference, found = None if forms[0][1].alone else _reference(forms[0][1]), []
    for n, (form, call) in enumerate(forms):
        with generated_left.counted() as counts:
            said = _judged(call, needed, reference)
        generated_left.say(
            f"form {form}".rstrip(), generated_left.JUDGED if said else generated_left.why(counts)
        )
        generated_left.add(counts)
        found += [(*said, n)] if said else []
    if not found:
        return None
    share, told, n = max(found, key=lambda one: one[0])
    marks = [
        mark
        for mark in generated_report.LESS.values()
        if any(mark in one[1] for one in found) and mark not in told
    ]
    return share, "; ".join((told, *marks)), n


def _repeats(family: str, call: Call, needed: float) -> bool:
    """Whether a call of operators that fails does so with most other numbers too, as a fault does.

    Sizes and places in memory stay. What takes no other numbers has failed.
    """
    if family != "operators":
        return True
    others = (variations.rescaled(call, random.Random(call.seed + n)) for n in range(1, AGAIN + 1))
    said = [one[0] > 1 for one in (_judged(other, needed) for other in others) if one is not None]
    return 2 * sum(said) > len(said) or not said


def _reference(call: Call) -> generated_judge.Reference | None:
    """What float64 says; `None` if it does not take the call either."""
    with generated_left.refusing(generated_left.CALL, "float64 refuses it"):
        reference = generated_judge.Reference(call)
        if reference.right:
            return reference
        generated_left.say(generated_left.CALL, "it gives no number")
    return None


def _judged(
    call: Call, needed: float, reference: generated_judge.Reference | None = None
) -> tuple[float, str] | None:
    """The distance as a share of its gate, and words; `None` if float64 does not take it either."""
    began, elsewhere = time.process_time(), call.on is not None
    inside = generated_inside.Inside(call.looser)
    reference = None if call.alone else reference or _reference(call)
    if (reference is None and not (call.inside and is_sent(call))) or (call.breaks and elsewhere):
        words = "it breaks a healthy device" if call.breaks else "float64 refuses it"
        generated_left.say(generated_left.CALL, words)
        return None
    if elsewhere and time.process_time() - began > WITNESS_S:
        generated_left.say(generated_left.CALL, "float64 takes too long")
        return None
    if reference:
        operands.leave_nan(reference.right, call.dtype, call.on)
    try:
        got = generated_judge.results(call, within=inside if call.inside else None)
    except Exception as error:  # noqa: BLE001
        words = generated_elsewhere.first_line(error)
        # No compiler works beneath a dispatch mode, and FlexAttention always has one.
        taken = call.taken and not is_in_torch_dispatch_mode() and NOT_WRITTEN not in words
        broken = taken or (not call.breaks and any(word in words.lower() for word in BROKEN))
        broken |= isinstance(error, generated_inside.JudgeError)
        broken = broken and not generated_left.is_for_memory(error)
        refused = elsewhere and words.endswith(NO_ELEMENT) and _gives_nothing(call)
        if broken and not refused:
            return math.inf, words
        generated_left.say(generated_left.CALL, f"refused by a {type(error).__name__}")
        return None
    bound = FACTOR * needed
    units = (
        generated_doubts.of_result(call, got, reference, bound) if reference and not inside.is_open else None
    )
    if reference and units is not None and units > bound and inside.has_chosen:
        outputs = replace(call, gradients=False)
        units = generated_doubts.of_result(outputs, generated_judge.results(outputs), reference, bound)
        inside.marks.add(generated_inside.DOUBTED)
    said = [inside.worst] if inside.worst else []
    if units is not None:
        said.append((units / bound, f"{units:.3g} units from float64, {bound:.3g} allowed"))
    share, told = max(said, default=(None, ""))
    if share is not None:
        return share, "; ".join((told, *sorted(inside.marks)))
    generated_left.say(generated_left.CALL, "float64 does not say what is right")
    return None


def _gives_nothing(call: Call) -> bool:
    """Whether no result of a call has an element."""
    given = generated_judge.witness(generated_judge.wide(replace(call, gradients=False)))
    return not any(one.numel() for one in given)


def is_sent(call: Call) -> bool:
    """Whether a call may run where it runs: a device that is handed what a processor refuses may be lost.

    Asked in float64, as that is what says what is right; a call that float64 does not take has no witness.
    """
    if call.on is None:
        return True
    try:
        generated_judge.witness(generated_judge.wide(call))
    except generated_left.RefusedError:
        return False
    return True


def _smaller(call: Call, needed: float) -> Call:
    """The same failure with fewer elements, and without gradients if they are not what is wrong."""
    tries, ends = iter(range(SHRINKS)), time.monotonic() + SHRINK_S
    going = True
    while going:
        going = False
        for other in generated_words.candidates(call):
            if next(tries, None) is None or time.monotonic() > ends:
                return call
            try:
                said = _judged(other, needed)
            except Exception:  # noqa: BLE001 with less in it, it may be no call of this operator
                continue
            if said and said[0] > 1:
                call, going = other, True
                break
    return call


def of_soak(family: str, seed: int) -> dict[str, Any]:
    """What soak draws on this device: IN_PROCESSES in one process for each core, all else in one."""
    least, most, seconds = PLANS[family][device().type != "cpu"]
    turn = TURNS.get(family, lambda: 1)()
    processes = _processes() if family in IN_PROCESSES else 1
    name, sizes = (
        ("sizes", family) if family == "huge" else (family, "small" if family in IN_PROCESSES else "large")
    )
    report = check(name, seed, least * turn, most * turn, seconds=seconds, sizes=sizes, processes=processes)
    return {**report, "least": least * turn}


def of_standard(family: str) -> dict[str, Any]:
    """What the tiers that certify draw: one case of each operator or optimizer, or some sizes. They stay."""
    if family == "operators":
        chosen = generated_operators.once(STANDARD_SEED)
        report = check(family, STANDARD_SEED, 0, 0, processes=_processes(), chosen=chosen)
        return {**report, "least": len(chosen)}
    count = TURNS[family]() if family in TURNS else STANDARD_COUNTS[device().type != "cpu"]
    return {**check(family, STANDARD_SEED, count, count, sizes="large"), "least": count}


def _processes() -> int:
    return min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
