"""When a figure got worse. In: values of one metric. Out: decisions by four rules, the surest first.

1. `floor`: far below its certified baseline, twice: it fails at once.
2. `paired`: two images in turn on one node: a slow-down of 2 % is found, as the node is the same.
3. `below_own_baseline`: one chip against its own last nights: chips of a model differ more than nights do.
4. `warnings`: a step in the last nights. It only warns, and only if two nodes or two metrics show it.

How often each rule misses a slow-down or raises a false alarm: docs/reference/trust.md. All of it is pure.
"""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Direction = Literal["min", "max"]

# What is better where no bound says it, by unit; of what is counted per second more is.
BETTER: dict[str, Direction] = {"%": "min", **dict.fromkeys(("us", "ms", "s", "of the gate"), "max")}

FLOOR = 0.10  # a loss that no night explains
PAIRED_LIMIT = 0.01  # the smallest loss of a pair that counts
NOISE_FACTOR = 2.6  # x the spread of one run: 1 false alarm in 1000 medians of 5 against 5
RESOLUTION = 0.02  # what a pair has to resolve, or its node is too noisy to say `equal`
MISS_FACTOR = 1.3  # x the spread of one run, above the limit: found in 95 of 100 pairs
FEWEST_NIGHTS = 7
BASELINE_LIMIT, BASELINE_FACTOR = 0.03, 4.0
NIGHTS = 60  # that are searched for steps
SEGMENT = 3  # nights that a step has to last
STEP = 0.015  # the smallest step that is reported
PENALTY = 6.0  # x variance x log(nights) for each further step
TOGETHER = 2  # nights by which two series may disagree on when it happened
MAD_TO_SD = 1.4826  # of a normal distribution
EIGHTY_PERCENT = 1.2816  # standard deviations inside which 80 % of a normal distribution lie


def better(unit: str, direction: Direction | None) -> Direction | None:
    """The better direction of a metric: that of its bound, else that of its unit; None if neither has one."""
    rate = unit.endswith("/s") or "/s/" in unit
    return direction or BETTER.get(unit, "min" if rate else None)


def loss(reference: float, value: float, direction: Direction) -> float:
    """How much worse a value is than a reference, as a share of it; negative if it is better."""
    if not reference:
        return 0.0 if value == reference else math.inf
    change = value / reference - 1
    return -change if direction == "min" else change


def spread(values: Sequence[float]) -> float:
    """The robust spread of some values, as a share of their median: outliers do not widen it."""
    middle = statistics.median(values)
    return deviation(values) / abs(middle) if middle else 0.0


def deviation(values: Sequence[float]) -> float:
    """The robust standard deviation of some values: from their median absolute deviation."""
    middle = statistics.median(values)
    return MAD_TO_SD * statistics.median(abs(value - middle) for value in values)


def floor(
    baseline: float, first: float, again: float | None, direction: Direction
) -> Literal["pass", "repeat", "fail"]:
    """The hard floor: `repeat` asks for one more run, and `again` is what it measured."""
    if loss(baseline, first, direction) <= FLOOR:
        return "pass"
    if again is None:
        return "repeat"
    return "fail" if loss(baseline, again, direction) > FLOOR else "pass"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What a paired comparison says about one metric.

    Attributes:
        limit: The loss from which it counts: 1 %, or more on a noisy node, and twice what the reference loses
            against itself.
        verdict: `slower`, `equal`; `noisy` if no loss was found and 2 % could not have been.
    """

    loss: float  # how much worse the candidate's median is than the reference's
    limit: float
    noise: float  # the spread of one run on this node, from the runs of the reference against itself
    resolves: float  # the smallest loss that this pair finds in 95 of 100 cases
    verdict: Literal["slower", "equal", "noisy"]


def paired(
    reference: Sequence[float],
    candidate: Sequence[float],
    direction: Direction,
    *,
    again: Sequence[Sequence[float]] = (),
) -> Pair:
    """Judge runs of two images that took turns on one node, with one value a run.

    `again` has the two sides of the reference against itself, which tell the noise of the node.
    """
    noise = _noise((reference, *again))
    itself = [loss(statistics.median(again[0]), statistics.median(side), direction) for side in again]
    limit = max(PAIRED_LIMIT, NOISE_FACTOR * noise, 2 * max(map(abs, itself), default=0.0))
    resolves = limit + MISS_FACTOR * noise
    worse = loss(statistics.median(reference), statistics.median(candidate), direction)
    verdict: Literal["slower", "equal", "noisy"] = "equal" if resolves <= RESOLUTION else "noisy"
    return Pair(
        loss=worse,
        limit=limit,
        noise=noise,
        resolves=resolves,
        verdict="slower" if worse > limit else verdict,
    )


def _noise(sides: Sequence[Sequence[float]]) -> float:
    """The robust spread of one run, from several groups of runs: each run against its group's median."""
    ratios = [value / statistics.median(side) - 1 for side in sides for value in side]
    # Each group's median is the value of one of its runs, so one deviation in each group is zero.
    moved = sorted(abs(ratio) for ratio in ratios)[len(sides) :]
    if not moved:
        return 0.0
    # The second is larger where runs jump between two levels; a few outliers move neither.
    return max(MAD_TO_SD * statistics.median(moved), moved[int(0.8 * len(moved))] / EIGHTY_PERCENT)


def below_own_baseline(values: Sequence[float], value: float, direction: Direction) -> bool | None:
    """Whether a value is worse than the last nights of the same chip; None without enough nights."""
    if len(values) < FEWEST_NIGHTS:
        return None
    limit = max(BASELINE_LIMIT, BASELINE_FACTOR * spread(values))
    return loss(statistics.median(values), value, direction) > limit


@dataclass(frozen=True, kw_only=True)
class Step:
    """A change of level: the index of its first night, and how much worse the figure is from then on."""

    night: int
    loss: float


def steps(values: Sequence[float], direction: Direction) -> list[Step]:
    """The steps in a series of nights, by the segmentation with the least squared error plus a penalty."""
    nights = list(values[-NIGHTS:])
    if len(nights) < 2 * SEGMENT or min(nights) <= 0:
        return []
    offset = len(values) - len(nights)
    edges = _segments([math.log(value) for value in nights])
    found = []
    for before, start, end in zip(edges, edges[1:], edges[2:], strict=False):
        worse = loss(statistics.median(nights[before:start]), statistics.median(nights[start:end]), direction)
        if abs(worse) >= STEP:
            found.append(Step(night=offset + start, loss=worse))
    return found


def _segments(values: Sequence[float]) -> list[int]:
    """The edges of the best segments: optimal partitioning (Jackson et al., arXiv math/0309285), O(n^2)."""
    count = len(values)
    moves = [b - a for a, b in itertools.pairwise(values)]
    sigma = MAD_TO_SD * statistics.median(abs(move) for move in moves) / math.sqrt(2)
    penalty = PENALTY * max(sigma, 1e-4) ** 2 * math.log(count)
    sums, squares = [0.0], [0.0]
    for value in values:
        sums.append(sums[-1] + value)
        squares.append(squares[-1] + value * value)
    best, last = [-penalty] + [math.inf] * count, [0] * (count + 1)
    for end in range(SEGMENT, count + 1):
        for start in (0, *range(SEGMENT, end - SEGMENT + 1)):
            error = squares[end] - squares[start] - (sums[end] - sums[start]) ** 2 / (end - start)
            cost = best[start] + error + penalty
            if cost < best[end]:
                best[end], last[end] = cost, start
    edges = [count]
    while edges[-1]:
        edges.append(last[edges[-1]])
    return edges[::-1]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One metric of one node over nights, the oldest first."""

    node: str
    check: str
    metric: str
    direction: Direction
    nights: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Warned:
    """A worse level that several series agree on."""

    night: int  # the first night of it
    loss: float  # the largest loss
    nodes: tuple[str, ...]  # where it was seen
    metrics: tuple[str, ...]  # `check metric` of each series that shows it


def warnings(series: Iterable[Series]) -> list[Warned]:
    """The steps to the worse that two nodes or two metrics show within two nights; the newest first."""
    found = [
        (each.nights[step.night], step.loss, each)
        for each in series
        for step in steps(each.values, each.direction)
        if step.loss > 0
    ]
    groups: dict[tuple[str, ...], list[tuple[int, float, Series]]] = defaultdict(list)
    for item in found:
        groups["metric", item[2].check, item[2].metric].append(item)  # the same metric on several nodes
        groups["node", item[2].node].append(item)  # several metrics on the same node
    warned = {_warned(cluster) for items in groups.values() for cluster in _clusters(items)}
    return sorted((each for each in warned if each), key=lambda each: (-each.night, -each.loss))


def _clusters(items: list[tuple[int, float, Series]]) -> Iterable[list[tuple[int, float, Series]]]:
    """Steps that are at most `TOGETHER` nights apart from the first of them."""
    cluster: list[tuple[int, float, Series]] = []
    for item in sorted(items, key=lambda each: each[0]):
        if cluster and item[0] - cluster[0][0] > TOGETHER:
            yield cluster
            cluster = []
        cluster.append(item)
    yield cluster


def _warned(cluster: Sequence[tuple[int, float, Series]]) -> Warned | None:
    nodes = sorted({each.node for _, _, each in cluster})
    metrics = sorted({f"{each.check} {each.metric}" for _, _, each in cluster})
    if len(nodes) < 2 and len(metrics) < 2:
        return None
    return Warned(
        night=min(night for night, _, _ in cluster),
        loss=max(worse for _, worse, _ in cluster),
        nodes=tuple(nodes),
        metrics=tuple(metrics),
    )
