"""What a check failed that is only a guess. In: checks, bounds of this host. Out: reasons of an UNFIT run.

A bound of class derived was measured on no such device, and the limits of time of a vendor on which nobody
ran the suites are a multiple of another's. A healthy device may miss either, so neither blames an image; and
neither was held, so nothing is certified. A figure more than `FAR` beyond its bound stays UNFIT for the same
reason, but no baseline takes it: else three runs of a slow kernel would become the measure of that kernel.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from stackcheck.suite.bounds import Bounds
from stackcheck.suite.figures import accepts, flaw, is_violated
from stackcheck.suite.results import CheckResult

GUESSED = "guessed bound:"  # begins the reason of a check whose figures are under derived bounds alone
OVERDUE = "guessed limit:"  # begins the reason of a check that was ended by the clock
# No guess was so wrong yet: healthy H100s met all 25 derived bounds that were measured later, and the worst
# one known, of B200's training, was 1.15 times the best public figure. Broken kernels are: 10 of 88 TFLOP/s.
FAR = 2.0
MEASURE = "it may be wrong, so this says nothing sure about the image; next: stackcheck baseline"
OTHER_STACK = (
    "run another stack on this machine; if it is as slow, correct the rule in "
    "tests/acceptance/derived.json, with a source, and run python -m harness.derive"
)
DOUBT = (
    f"more than {FAR:g} times beyond it, which is rather a fault than a wrong guess: "
    f"no baseline takes it; next: {OTHER_STACK}"
)
WAIT = (
    "nobody has measured how long it takes on this vendor, so this says nothing sure about the image; next: "
    "read the stacks; if the ranks were at work, raise TIME_LIMIT_FACTOR in tests/acceptance/vendors"
)


class Low(NamedTuple):
    """A figure beyond a derived bound: in words, and how many times beyond."""

    words: str
    times: float


class Guess(NamedTuple):
    """Why a check says nothing; `measurable`: whether a baseline of this machine can replace the guess."""

    reason: str
    measurable: bool


def times_beyond(value: float, bound: float, direction: str) -> float:
    """How many times a figure is beyond its bound; 1 or less where it satisfies it."""
    worse, better = (bound, value) if direction == "min" else (value, bound)
    return worse / better if better > 0 else math.inf


def find(checks: Iterable[CheckResult], bounds: Bounds, *, same: bool = True) -> dict[str, Guess]:
    """The checks against which guesses alone speak; `same`: the run used the thresholds of this checkout."""
    found = {}
    for check in checks:
        if low := below(check, bounds, same=same):
            far = any(one.times > FAR for one in low)
            words = "; ".join(one.words for one in low)
            reason = f"{GUESSED} {check.id}: {words}; {DOUBT if far else MEASURE}"
            found[check.id] = Guess(reason, measurable=not far)
        elif is_overdue(check, bounds):
            first = (check.reason or "it did not end in time").splitlines()[0]
            found[check.id] = Guess(f"{OVERDUE} {check.id}: {first}; {WAIT}", measurable=False)
    return found


def is_overdue(check: CheckResult, bounds: Bounds) -> bool:
    """Whether the clock alone ended a check, on a vendor whose limits of time are a guess."""
    ended = check.outcome == "failed" and check.cause == "time_limit"
    return ended and bounds.limits_are_guessed and not any(map(flaw, check.metrics))


def below(check: CheckResult, bounds: Bounds, *, same: bool = True) -> tuple[Low, ...]:
    """The figures beyond bounds that are derived, if nothing else speaks against a check.

    The image wrote the cause. So each figure that violates a bound must have a number, and violate the
    derived bound that this host looks up, which is the one that the image reports. A run by other thresholds
    (not `same`) reports others, and its check may have passed: the bounds of this host alone decide there.
    """
    by_bounds = check.outcome == "failed" and check.cause == "bound"
    if not by_bounds and (same or check.outcome != "passed" or any(map(flaw, check.metrics))):
        return ()
    low = []
    for index, metric in enumerate(check.metrics):
        found = bounds.of.get((check.id, index))
        newly = not same and found is not None and not accepts(found, metric)
        if not (newly or is_violated(metric)):
            continue
        if found is None or found.kind != "derived" or metric.value is None or found.accepts(metric.value):
            return ()
        if same and (metric.bound, metric.direction) != (found.bound, found.direction):
            return ()
        sign = "<" if found.direction == "min" else ">"
        words = f"{metric.name} {metric.value:.4g} {metric.unit} {sign} {found.bound:g}, a derived bound"
        low.append(Low(words, times_beyond(metric.value, found.bound, found.direction)))
    return tuple(low)
