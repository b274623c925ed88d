"""What grows all the time, apart from what grows once. In: readings in their order. Out: growth.

A cache is filled once, and a busy machine disturbs a reading now and then. So the readings are cut into
quarters, and only the least growth from the median of one quarter to that of the next counts. Pure.
"""

import itertools
import statistics
from collections.abc import Sequence

QUARTERS = 4


def least_growth(readings: Sequence[float]) -> float:
    """The least growth from the median of a quarter of the readings to that of the next."""
    size = len(readings) // QUARTERS
    medians = [statistics.median(readings[n * size :][:size]) for n in range(QUARTERS)]
    return min(after - before for before, after in itertools.pairwise(medians))
