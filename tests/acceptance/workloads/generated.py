"""Generated cases: what nobody named. In: a family, a seed, a count. Out: what failed, and what was judged.

Each case has its own source of numbers, so it can be repeated alone, in tests/acceptance:
`python3 -c "from workloads import generated; print(generated.repeat('operators', 0, 17))"`.
A case that fails is made smaller for as long as it fails.
"""

import contextlib
import functools
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from workloads import (
    device,
    generated_attention,
    generated_chains,
    generated_judge,
    generated_operators,
    generated_sizes,
    margins,
)
from workloads.generated_judge import Call

# What a healthy operator needs, in units of the judge, and by how much it may be left.
NEEDED, FACTOR = 4.0, 4.0
# Up to here, rounding that changes with the inputs' last bits is the algorithm's. Beyond, a profile says so.
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
# Cases: of a processor and of a GPU in what certifies, and of both in soak.
COUNTS = {
    "operators": (300, 1500, 5000, 30_000),
    "sizes": (16, 150, 400, 3000),
    "attention": (24, 250, 1000, 8000),
    "chains": (2, 10, 60, 240),
}
SHRINKS = 40  # tries for one failure
SHOWN = 64  # elements of a tensor that is printed whole
Drawn = tuple[str, Call, float]


def check(family: str, seed: int, count: int, sizes: str = "small") -> dict[str, Any]:
    """Judge `count` cases of a seed."""
    judged, worst, failed = 0, 0.0, []
    with _plain():
        for number in range(count):
            said = _one(family, seed, number, sizes)
            if said is None:
                continue
            judged += 1
            margin, words = said
            worst = max(worst, margin) if margin <= 1 else worst
            failed += [words] if margin > 1 else []
    return {
        "family": family,
        "seed": seed,
        "drawn": count,
        "judged": judged,
        "worst": worst,
        "failed": failed,
    }


def source(family: str, seed: int, number: int) -> random.Random:
    """The numbers that a case is drawn from."""
    return random.Random(f"{family} {seed} {number}")


def margin(family: str, seed: int, number: int, sizes: str = "small") -> float | None:
    """The distance of one case as a share of its gate; `None` if it is not judged."""
    drawn = _drawn(family, source(family, seed, number), seed * 1_000_003 + number, sizes)
    said = _judged(drawn[1], drawn[2]) if drawn else None
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
    if not report["drawn"] or report["judged"] < least * report["drawn"]:
        raise AssertionError(
            f"only {report['judged']} of {report['drawn']} could be judged, at least {least:.0%} must be"
        )


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    """Without warnings, and without TF32, which convolutions use by default."""
    was = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = was


def _one(family: str, seed: int, number: int, sizes: str) -> tuple[float, str] | None:
    drawn = _drawn(family, source(family, seed, number), seed * 1_000_003 + number, sizes)
    if drawn is None:
        return None
    words, call, needed = drawn
    said = _judged(call, needed)
    if said is None or said[0] <= 1:
        return said and (said[0], words)
    small = _smaller(call, needed)
    told = _judged(small, needed) or said
    again = f"generated.repeat({family!r}, {seed}, {number}, {sizes!r})"
    return said[
        0
    ], f"  {words}: {said[1]}\n    at its smallest {_shown(small)}: {told[1]}\n    again: {again}"


def _drawn(family: str, source: random.Random, seed: int, sizes: str) -> Drawn | None:
    if family == "operators":
        case = generated_operators.draw(source, seed)
        call = _fitting(lambda: generated_operators.call_of(case))
        needed = generated_operators.needed(case.operator)
        return (str(case), call, max(NEEDED, needed)) if call else None
    if family == "sizes":
        large = generated_sizes.draw(source, seed, sizes)
        return (*large, NEEDED) if large else None
    if family == "attention":
        return (*generated_attention.draw(source, seed), ATTENTION_NEEDED)
    words, compiled, eager = generated_chains.draw(source, seed, "inductor")
    own = generated_judge.distance(eager)
    return None if own is None else (words, compiled, max(NEEDED, own))


def _fitting(make: Callable[[], Call | None]) -> Call | None:
    try:
        return make()
    except Exception:  # noqa: BLE001 the variation does not fit the sample
        return None


def _judged(call: Call, needed: float) -> tuple[float, str] | None:
    """The distance as a share of its gate, and words; `None` if float64 does not take it either."""
    try:
        if not generated_judge.results(generated_judge.wide(call.right or call)):
            return None
    except Exception:  # noqa: BLE001
        return None
    try:
        got = generated_judge.results(call)
    except Exception as error:  # noqa: BLE001
        words = f"{type(error).__name__}: {error}".splitlines()[0]
        return (float("inf"), words) if any(word in words.lower() for word in BROKEN) else None
    units, bound = generated_judge.distance(call, got), FACTOR * needed
    if units is not None and bound < units <= EXCUSED and not call.noisy:
        units = generated_judge.distance(replace(call, noisy=True), got)
    return None if units is None else (units / bound, f"{units:.3g} units from float64, {bound:.3g} allowed")


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


def of_tier(family: str, tier: str, seed: int) -> dict[str, Any]:
    """What a tier draws on this device: a processor gets seconds, a GPU a minute, and soak half an hour."""
    gpu = device().type == "cuda"
    count = COUNTS[family][(tier == "soak") * 2 + gpu]
    return check(family, seed, count, "large" if gpu or tier == "soak" else "small")


def lacks_a_processor() -> dict[str, Any] | None:
    """Drawn operators run on processors alone, where a value outside of a domain is an exception."""
    reason = "a value outside of an operator's domain ends the process"
    return {"feature": "drawn operators", "reason": reason} if device().type == "cuda" else None
