"""How near to its gates a numeric check came. In: error and gate of each reading. Out: two metrics.

A margin is error / gate, without a unit: 0 for equal bits, below 1 inside the gate. The metrics have no
bound; they show how the numerics of a stack move from run to run. This module needs no torch.
"""

import math
from collections.abc import Callable, Iterable

WORST, CASES = "numeric_worst_margin", "numeric_cases"


Record = Callable[..., None]  # the fixture `record_metric`


def of(got: float, bound: float) -> float:
    """The margin of one reading; infinite where nothing may differ and something does, NaN stays NaN."""
    if math.isnan(got) or math.isnan(bound):
        return math.nan
    if bound > 0:
        return max(0.0, got / bound)
    return 0.0 if got <= bound else math.inf


def worst(margins: Iterable[float]) -> float:
    """The largest margin; NaN if one of them is."""
    found = tuple(margins)
    return math.nan if any(math.isnan(one) for one in found) else max(found, default=0.0)


def record(record_metric: Record, margin: float, count: int) -> None:
    """Record the worst margin and the number of cases; a margin that is no number fails the check."""
    record_metric(WORST, margin, unit="of the gate")
    record_metric(CASES, count, unit="cases")
