"""Generated cases: what nobody named. In: a family, a seed, a count. Out: what failed, and what was judged.

Each case has its own source of numbers, so it can be repeated alone, in tests/acceptance:
`python3 -c "from workloads import generated; print(generated.repeat('operators', 0, 17))"`.
A case that fails is made smaller for as long as it fails.
"""

import contextlib
import functools
import multiprocessing
import os
import random
import resource
import signal
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from workloads import (
    device,
    generated_attention,
    generated_chains,
    generated_inside,
    generated_judge,
    generated_operators,
    generated_sizes,
    margins,
)
from workloads.generated_judge import Call


class Plan(NamedTuple):
    """How many cases: the least, the most, and the seconds in which to go beyond the least."""

    least: int
    most: int
    seconds: float


# What a healthy operator needs, in units of the judge, and by how much it may be left.
NEEDED, FACTOR = 4.0, 4.0
# Of an operator's result, which has the roundings of all its kernels; each of these is judged by itself.
# A lost element is 100 units in bfloat16 and 800 in float16.
OPERATORS_NEED = {"float32": 256.0, "float16": 32.0, "bfloat16": 16.0}
# Up to here, rounding that changes with the inputs' last bits is the algorithm's, where no kernel is judged.
EXCUSED = 512.0  # float32 computed in TF32 is off by 8192 units
ATTENTION_NEEDED = 8.0  # two softmaxes' worth of roundings, one of them in the gradient
# A refusal is loud, and grammars ask for what is refused. These errors are none: a kernel broke.
BROKEN = (
    "cuda error",
    "hip error",
    "internal assert",
    "illegal memory",
    "misaligned",
    "cublas_status",
    "cudnn_status",
)
# Of soak, on a processor and on a GPU: so many cases in any case, then more until the time is over, at most
# so many. A turn of the operators is one case of each operator and type.
PLANS = {
    "operators": (Plan(1, 1, 0), Plan(0, 0, 0)),
    "sizes": (Plan(100, 400, 300), Plan(1000, 3000, 900)),
    "attention": (Plan(100, 1000, 600), Plan(1000, 8000, 900)),
    "chains": (Plan(10, 60, 600), Plan(60, 240, 900)),
}
MOST_PROCESSES = 16
MOST_S = 300  # of one case, on a busy machine
MOST_BYTES = 2 * 2**30  # of one process, beyond what it has when it starts
SHRINKS = 40  # tries for one failure
SHOWN = 64  # elements of a tensor that is printed whole
# What is drawn: words, the calls with equal numbers (and what is special about each), and the units it needs.
Drawn = tuple[str, list[tuple[str, Call]], float]


@dataclass(frozen=True)
class Share:
    """What one process judges: the first `least` of the numbers, and then more until the clock `ends`."""

    family: str
    seed: int
    numbers: range
    least: int
    ends: float
    sizes: str
    place: int


def check(
    family: str,
    seed: int,
    least: int,
    most: int,
    *,
    seconds: float = 0,
    sizes: str = "small",
    processes: int = 1,
) -> dict[str, Any]:
    """Judge cases of a seed from the first on: `least` of them in any case, then until the time is over."""
    ends = time.monotonic() + seconds
    shares = [
        Share(family, seed, range(n, most, processes), -(-(least - n) // processes), ends, sizes, n)
        for n in range(processes)
    ]
    parts = [_share(shares[0])] if processes == 1 else _in_processes(shares)
    return {
        "family": family,
        "seed": seed,
        "drawn": sum(part["drawn"] for part in parts),
        "judged": sum(part["judged"] for part in parts),
        "worst": max(part["worst"] for part in parts),
        "failed": [words for part in parts for words in part["failed"]],
    }


def _in_processes(shares: list[Share]) -> list[dict[str, Any]]:
    """Each share in a copy of this process, which has torch loaded already."""
    generated_operators.rows()
    at = multiprocessing.RawArray("q", len(shares))
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(len(shares), mp_context=fork, initializer=alone, initargs=(at,)) as pool:
        running = [pool.submit(_share, share) for share in shares]
        try:
            return [one.result() for one in running]
        except BrokenProcessPool:
            one = shares[0]
            again = "generated.repeat({0.family!r}, {0.seed}, {1}, {0.sizes!r})"
            cases = [again.format(one, number) for number in at]
            raise AssertionError(f"a case ended its process; it is one of: {'; '.join(cases)}") from None


_AT: list[Any] = []


def alone(at: Any) -> None:
    """One thread, and a bound on memory: an operator may have the square of its operands in between.

    Its cases end in time, or it ends: `limited`.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    torch.set_num_threads(1)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
    _AT[:] = [at]


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """End this process, if it runs cases alone, where one takes too long: no kernel hears an exception."""
    signal.alarm(MOST_S if _AT else 0)
    try:
        yield
    finally:
        signal.alarm(0)


def _share(share: Share) -> dict[str, Any]:
    judged, worst, drawn, failed = 0, 0.0, 0, []
    with _plain():
        for number in share.numbers:
            if drawn >= share.least and time.monotonic() > share.ends:
                break
            drawn += 1
            if _AT:
                _AT[0][share.place] = number
            with limited():
                said = _one(share.family, share.seed, number, share.sizes)
            if said is None:
                continue
            judged += 1
            margin, words = said
            worst = max(worst, margin) if margin <= 1 else worst
            failed += [words] if margin > 1 else []
    return {"drawn": drawn, "judged": judged, "worst": worst, "failed": failed}


def source(family: str, seed: int, number: int) -> random.Random:
    """The numbers that a case is drawn from."""
    return random.Random(f"{family} {seed} {number}")


def margin(family: str, seed: int, number: int, sizes: str = "small") -> float | None:
    """The distance of one case as a share of its gate; `None` if it is not judged."""
    drawn = _drawn(family, seed, number, sizes)
    said = _worst(drawn[1], drawn[2]) if drawn else None
    return said[0] if said else None


def repeat(family: str, seed: int, number: int, sizes: str = "small") -> str:
    """One case again, in words."""
    with _plain():
        said = _one(family, seed, number, sizes)
    return "not judged" if said is None else f"{said[0]:.3g} of its gate: {said[1]}"


def require(report: Mapping[str, Any], record_metric: margins.Record, least: float) -> None:
    """Keep seed, number of cases and the worst margin; fail with each case that failed.

    A grammar whose cases are mostly refused proves nothing, so the share that was judged has a bound.
    """
    record_metric("generated_seed", report["seed"], unit="seed")
    record_metric("generated_drawn", report["drawn"], unit="cases")
    margins.record(record_metric, report["worst"], report["judged"])
    if report["failed"]:  # raised, not asserted: pytest does not rewrite asserts here, and -O removes them
        raise AssertionError(
            "\n".join([f"{len(report['failed'])} of {report['judged']} failed", *report["failed"]])
        )
    if report["drawn"] < report["least"]:
        raise AssertionError(f"only {report['drawn']} of at least {report['least']} cases were drawn")
    if not report["drawn"] or report["judged"] < least * report["drawn"]:
        raise AssertionError(
            f"only {report['judged']} of {report['drawn']} could be judged, at least {least:.0%} must be"
        )


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    """Run the body without warnings, and without TF32, which convolutions use by default."""
    was = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = was


def _one(family: str, seed: int, number: int, sizes: str) -> tuple[float, str] | None:
    drawn = _drawn(family, seed, number, sizes)
    said = _worst(drawn[1], drawn[2]) if drawn else None
    if drawn is None or said is None:
        return None
    words, forms, needed = drawn
    margin, told, n = said
    if margin <= 1:
        return margin, words
    form, call = forms[n]
    small = _smaller(call, needed)
    again = f"generated.repeat({family!r}, {seed}, {number}, {sizes!r})"
    return margin, (
        f"  {words}{form and f' {form}'}: {told}\n    at its smallest {_shown(small)}: "
        f"{(_judged(small, needed) or said)[1]}\n    again: {again}"
    )


def _worst(forms: list[tuple[str, Call]], needed: float) -> tuple[float, str, int] | None:
    """The worst of calls with equal numbers: its share of the gate, words, and which one it is."""
    reference, found = None if forms[0][1].alone else _reference(forms[0][1]), []
    for n, (_, call) in enumerate(forms):
        said = _judged(call, needed, reference)
        found += [(*said, n)] if said else []
    return max(found, default=None, key=lambda one: one[0])


def _reference(call: Call) -> generated_judge.Reference | None:
    """What float64 says; `None` if it does not take the call either."""
    try:
        reference = generated_judge.Reference(call)
    except Exception:  # noqa: BLE001
        return None
    return reference if reference.right else None


def _drawn(family: str, seed: int, number: int, sizes: str) -> Drawn | None:
    mixed = seed * 1_000_003 + number
    if family == "operators":
        case = generated_operators.draw(seed, number)
        forms = generated_operators.forms_of(case)
        return (str(case), forms, OPERATORS_NEED[case.dtype]) if forms else None
    if family == "sizes":
        words, call = generated_sizes.draw(source(family, seed, number), mixed, sizes)
        return words, [("", call)], NEEDED
    if family == "attention":
        words, call = generated_attention.draw(source(family, seed, number), mixed)
        return words, [("", call)], ATTENTION_NEEDED
    words, compiled, eager = generated_chains.draw(source(family, seed, number), mixed, "inductor")
    own = generated_judge.distance(eager)
    return None if own is None else (words, [("", compiled)], max(NEEDED, own))


def _judged(
    call: Call, needed: float, reference: generated_judge.Reference | None = None
) -> tuple[float, str] | None:
    """The distance as a share of its gate, and words; `None` if float64 does not take it either."""
    reference, inside = None if call.alone else reference or _reference(call), generated_inside.Inside()
    if reference is None and not call.inside:
        return None
    try:
        with inside if call.inside else contextlib.nullcontext():
            got = generated_judge.results(call)
    except Exception as error:  # noqa: BLE001
        words = f"{type(error).__name__}: {error}".splitlines()[0]
        broken = not call.breaks and any(word in words.lower() for word in BROKEN)
        return (float("inf"), words) if broken else None
    said = [inside.worst] if inside.worst else []
    bound = FACTOR * needed
    units = generated_judge.distance(call, got, reference, enough=bound / 2) if reference else None
    if units is not None and units > bound and call.inside:  # rounding that changes with the last bits
        units = generated_judge.distance(replace(call, noisy=True), got, reference)
    elif units is not None and bound < units <= EXCUSED and not call.noisy:
        units = generated_judge.distance(call, got, reference, excused=True)
    if units is not None:
        said.append((units / bound, f"{units:.3g} units from float64, {bound:.3g} allowed"))
    return max(said, default=None)


def _smaller(call: Call, needed: float) -> Call:
    """The same failure with fewer elements, and without gradients if they are not what is wrong."""
    tries = iter(range(SHRINKS))
    going = True
    while going:
        going = False
        for other in _candidates(call):
            if next(tries, None) is None:
                return call
            said = _judged(other, needed)
            if said and said[0] > 1:
                call, going = other, True
                break
    return call


def _candidates(call: Call) -> Iterator[Call]:
    if call.right is not None:
        return  # two calls of one case: its own words say all
    if call.gradients:
        yield replace(call, gradients=False)
    if any(not one.is_floating_point() and one.dtype is not torch.bool for one in call.tensors()):
        return  # places in another operand: beyond its end, a kernel on a GPU ends the process
    for size in sorted({size for one in call.tensors() for size in one.shape if size > 1}, reverse=True):
        for less in {1, size // 2, size - 1}:
            yield call.mapped(functools.partial(_cut, size=size, less=less))


def _cut(leaf: Any, size: int, less: int) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    for n, one in enumerate(leaf.shape):
        leaf = leaf.narrow(n, 0, less) if one == size else leaf
    return leaf


def _shown(call: Call) -> str:
    name = getattr(call.function, "__name__", type(call.function).__name__)
    args = [_words(one) for one in call.args] + [f"{key}={_words(one)}" for key, one in call.kwargs.items()]
    return f"{name}({', '.join(args)}){' with gradients' if call.gradients else ''}"


def _words(one: Any) -> str:
    """A tensor as an expression if it is small: its numbers, type and strides."""
    if isinstance(one, list | tuple):
        return f"[{', '.join(_words(each) for each in one)}]"
    if not isinstance(one, torch.Tensor):
        return repr(one)
    if one.numel() > SHOWN:
        return f"{one.dtype} {tuple(one.shape)} strides {one.stride()}"
    made = f"torch.tensor({one.tolist()}, dtype={one.dtype})"
    return made if one.is_contiguous() else f"{made} with strides {one.stride()}"


def of_soak(family: str, seed: int) -> dict[str, Any]:
    """What soak draws on this device: operators in one process for each processor core, all else in one."""
    least, most, seconds = PLANS[family][device().type != "cpu"]
    turn = len(generated_operators.rows()) if family == "operators" else 1
    processes = min(len(os.sched_getaffinity(0)), MOST_PROCESSES) if family == "operators" else 1
    sizes = "small" if family == "operators" else "large"
    report = check(family, seed, least * turn, most * turn, seconds=seconds, sizes=sizes, processes=processes)
    return {**report, "least": least * turn}


def lacks_a_processor() -> dict[str, Any] | None:
    """The lack of a processor, for drawn operators: on a GPU a value outside of a domain ends the process."""
    reason = "a value outside of an operator's domain ends the process"
    return {"feature": "drawn operators", "reason": reason} if device().type == "cuda" else None
