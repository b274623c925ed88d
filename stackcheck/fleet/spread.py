"""Which nodes stand out from their own fleet. In: one figure of each node. Out: the outliers. Pure.

Median and MAD: a few broken nodes move neither, while they move a mean and widen a standard deviation until
they hide themselves (Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993: modified z-score, 3.5).
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from stackcheck.history import regressions

LIMIT_Z = 3.5
FEWEST = 5  # of fewer figures a spread says nothing
# A fleet of equal figures has no spread: nobody cares about a node that is this much slower.
SMALLEST_LOSS = 0.02


@dataclass(frozen=True, kw_only=True)
class Outlier:
    """A figure that is worse than the fleet's."""

    value: float
    median: float
    z: float  # how many robust standard deviations it is worse
    loss: float  # how much worse than the median, as a share of it
    of: int  # how many nodes were compared

    def words(self) -> str:
        """For a table: how much worse, and than what."""
        return (
            f"{100 * self.loss:.1f} % worse than the median of {self.of} ({self.median:.4g}), z {self.z:.1f}"
        )


def outliers(values: Mapping[str, float], direction: Literal["min", "max"] | None) -> dict[str, Outlier]:
    """The nodes whose figure is worse than the fleet's, the worst first; none of fewer than five.

    Args:
        values: Node -> figure.
        direction: `min` if more is better, `max` if less is; None: nobody says, so either side stands out.
    """
    if len(values) < FEWEST:
        return {}
    median = statistics.median(values.values())
    scale = max(regressions.deviation(list(values.values())), SMALLEST_LOSS * abs(median) / LIMIT_Z)
    found = {}
    for node, value in values.items():
        worse = {"min": median - value, "max": value - median, None: abs(value - median)}[direction]
        if scale and worse / scale > LIMIT_Z:
            loss = worse / abs(median) if median else float("inf")
            found[node] = Outlier(value=value, median=median, z=worse / scale, loss=loss, of=len(values))
    return dict(sorted(found.items(), key=lambda item: -item[1].z))
