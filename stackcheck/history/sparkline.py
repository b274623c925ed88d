"""A row of numbers as a line of text. In: numbers in order of time. Out: a sparkline."""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

LEVELS = "▁▂▃▄▅▆▇█"
WIDTH = 40


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """One character a value, from least to largest; of more values than `width`, medians of groups."""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [statistics.median(values[a:b]) for a, b in itertools.pairwise(edges)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    if low == high:
        return LEVELS[len(LEVELS) // 2] * len(values)
    return "".join(LEVELS[round((value - low) / (high - low) * (len(LEVELS) - 1))] for value in values)
