"""What the figures of a check say against it. In: a check, the bounds of this host. Out: words, or nothing.

The image under test wrote the figures, their bounds and their verdicts: none is trusted alone. Each figure is
timed by a child, which runs the image's code. `test_witness_of_speed` asks for a chain of products that
nobody can shorten, and the controller measures it by its own clock; the drivers' counters say how long each
device worked at all. And no device is faster than its datasheet: that holds for bytes too.
"""

from collections.abc import Iterator, Mapping

from stackcheck.suite.bounds import Bound, Key
from stackcheck.suite.results import CheckResult, Metric, RunResult
from stackcheck.vendors.seen import Seen

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


TFLOPS = "TFLOP/s"
CLOCKED, CLAIMED_S = "witness_tflops", "witness_said_seconds"
# A figure is of a rested device and its best shape; at its power cap an H200 is slower by 1.3.
SLACK = 2.0
EIGHT_BITS = 2  # products of 8 bits are as much faster than those of 16
# Clocks above those of a datasheet; the fastest recorded figure is 0.90 of it (a copy on an H100).
BEYOND = 1.25
LEAST_BUSY = 0.5  # of the seconds that a child claims: counters are read twice a second


def clock_problems(result: RunResult, seen: Seen | None, ceilings: Mapping[Key, float]) -> Iterator[str]:
    """What contradicts the figures of a run on GPUs; a processor's have no bound."""
    if result.host.vendor == "cpu":
        return
    reached = _lowest(result, CLOCKED)
    for check in result.checks:
        if not check.metrics:
            continue
        yield from _too_fast(check, reached)
        yield from _idle(check, seen)
        yield from _impossible(check, ceilings)


def clock_words(result: RunResult, seen: Seen | None) -> str:
    """What is confirmed, for the certificate; empty for a processor."""
    if result.host.vendor == "cpu":
        return ""
    reached = _lowest(result, CLOCKED)
    clock = (
        "no figure by this host's clock"
        if reached is None
        else f"{reached:.4g} {TFLOPS} by this host's clock"
    )
    read = [value for value in (seen.busy_s if seen else {}).values() if value is not None]
    if not read:
        return f"{clock}; the devices' own counters were not read"
    return f"{clock}; devices busy for {min(read):.3g} s or more by their own counters"


def _too_fast(check: CheckResult, reached: float | None) -> Iterator[str]:
    for metric in check.metrics:
        if reached is None or metric.unit != TFLOPS or metric.value is None:
            continue
        most = reached * SLACK * (EIGHT_BITS if metric.conditions.get("dtype") == "fp8" else 1)
        if metric.value > most:
            yield (
                f"{check.id}: {metric.name} {metric.value:.4g} {TFLOPS}: by this host's clock the device "
                f"multiplied at {reached:.4g} {TFLOPS}, so no figure can be more than {most:.4g}"
            )


def _impossible(check: CheckResult, ceilings: Mapping[Key, float]) -> Iterator[str]:
    for index, metric in enumerate(check.metrics):
        limit = ceilings.get((check.id, index))
        if limit is not None and metric.value is not None and metric.value > limit * BEYOND:
            yield (
                f"{check.id}: {metric.name} {metric.value:.4g} {metric.unit}: the datasheet of this device "
                f"says {limit:.4g}, so no figure can be more than {limit * BEYOND:.4g}"
            )


def _idle(check: CheckResult, seen: Seen | None) -> Iterator[str]:
    claimed = next((metric.value for metric in check.metrics if metric.name == CLAIMED_S), None) or 0.0
    for device in check.devices if seen else ():
        busy_s = seen.busy_s.get(device) if seen else None
        if busy_s is not None and busy_s < LEAST_BUSY * claimed:
            yield (
                f"{check.id}: the child says that device {device} worked for {claimed:.3g} s, "
                f"and by its driver's counter it was busy for {busy_s:.3g} s in the whole run"
            )


def _lowest(result: RunResult, name: str) -> float | None:
    """The lowest value of a metric."""
    found = (metric for check in result.checks for metric in check.metrics if metric.name == name)
    return min((metric.value for metric in found if metric.value is not None), default=None)
