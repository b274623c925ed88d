"""What the figures of a check say against it. In: a check, the bounds of this host. Out: words, or nothing.

The image under test wrote the figures, their bounds and their verdicts: none is trusted alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stackcheck.suite.bounds import Bound, Bounds
    from stackcheck.suite.results import CheckResult, Metric

NO_BOUND = "metric {} has no bound on this device model; next: stackcheck baseline"


def flaw(metric: Metric) -> str | None:
    """What the result itself says against a metric of a passed check."""
    if metric.value is None:
        return f"metric {metric.name} has no finite value"
    if metric.verdict == "no_threshold":
        return NO_BOUND.format(metric.name)
    if is_violated(metric):
        return f"{metric.name} {metric.value} {metric.unit} violates {metric.direction} {metric.bound}"
    return None


def is_violated(metric: Metric) -> bool:
    """Whether the metric violates its bound, by its verdict or by its numbers.

    The image under test wrote both, so neither is trusted alone.
    """
    if metric.verdict == "fail":
        return True
    if metric.value is None or metric.bound is None or metric.direction is None:
        return metric.verdict == "pass"  # a pass without a number or a bound has no evidence
    return metric.value < metric.bound if metric.direction == "min" else metric.value > metric.bound


def lacks_bound(check: CheckResult) -> bool:
    """Whether a check failed because its figures have no bound, and for nothing else.

    The image wrote the cause, so its metrics have to agree: one without a bound, none that violates one.
    """
    verdicts = {metric.verdict for metric in check.metrics}
    unbounded = check.cause == "no_threshold" and "no_threshold" in verdicts
    return check.outcome == "failed" and unbounded and not any(map(is_violated, check.metrics))


def accepts(bound: Bound, metric: Metric) -> bool:
    """Whether a figure has a number, and satisfies the bound."""
    return metric.value is not None and bound.accepts(metric.value)


def below_a_guess(check: CheckResult, bounds: Bounds, *, same: bool = True) -> tuple[str, ...]:
    """What speaks against a check, if it is only figures beyond bounds that are derived.

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
        low.append(f"{metric.name} {metric.value:.4g} {metric.unit} {sign} {found.bound:g}, a derived bound")
    return tuple(low)
