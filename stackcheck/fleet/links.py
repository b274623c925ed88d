"""Which pairs of nodes to try at once, and what they say. In: nodes; outcomes. Out: rounds; culprits. Pure.

The circle method of a round-robin tournament tries every link of n nodes in n - 1 rounds (n for an odd n),
in each of which a node is in one pair at most: https://en.wikipedia.org/wiki/Round-robin_tournament.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stackcheck.fleet.spread import outliers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Pair = tuple[str, str]
# Of fewer than five pairs a spread says nothing, and one of unsteady speeds hides a broken link.
FAR = 1 / 3  # of the median


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """What a bad pair comes from.

    Attributes:
        kind: `node`: most pairs with it are bad; `link`: only this pair is.
        names: One node, or the two ends of the link.
        because: The evidence, in words.
    """

    kind: Literal["node", "link"]
    names: tuple[str, ...]
    because: str


def rounds(nodes: Sequence[str]) -> list[list[Pair]]:
    """Every pair of nodes once, in rounds that have each node at most once."""
    ring: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    half = len(ring) // 2
    found = []
    for _ in range(len(ring) - 1):
        facing = zip(ring[:half], reversed(ring[half:]), strict=True)
        found.append([_ordered(a, b, nodes) for a, b in facing if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found


def _ordered(one: str, other: str, nodes: Sequence[str]) -> Pair:
    return (one, other) if nodes.index(one) < nodes.index(other) else (other, one)


def culprits(failed: Mapping[Pair, str], speeds: Mapping[Pair, float]) -> list[Culprit]:
    """The nodes and links that explain the bad pairs; the nodes first.

    Args:
        failed: Pairs that did not work -> why.
        speeds: The pairs that worked -> busbw in GB/s. A pair that is much slower than the others is bad too.
    """
    bad = dict(failed) | _slow(speeds)
    nodes = _bad_nodes(bad, [*failed, *speeds])
    rest = {pair: why for pair, why in bad.items() if not set(pair) & {node.names[0] for node in nodes}}
    return nodes + [Culprit(kind="link", names=pair, because=why) for pair, why in sorted(rest.items())]


def _slow(speeds: Mapping[Pair, float]) -> dict[Pair, str]:
    """The pairs that stand out from the spread, and those that are far from the median."""
    spread = outliers({_name(pair): value for pair, value in speeds.items()}, direction="min")
    found = {pair: spread[_name(pair)].words() for pair in speeds if _name(pair) in spread}
    middle = statistics.median_high(speeds.values()) if speeds else 0.0
    for pair, speed in speeds.items():
        if speed < FAR * middle:
            found.setdefault(pair, f"less than a third of the median, {middle:.3g} GB/s")
    return {pair: f"{speeds[pair]:.3g} GB/s, {words}" for pair, words in found.items()}


def _bad_nodes(bad: Mapping[Pair, str], tried: Sequence[Pair]) -> list[Culprit]:
    """The nodes of which more than half of the pairs are bad, the worst first.

    A pair of a bad and a healthy node is bad too, so the pairs of a node that is found no longer count.
    """
    found: list[Culprit] = []
    left, pairs = dict(bad), list(tried)
    while left:
        names = sorted({name for pair in left for name in pair})
        shares = {name: (_count(left, name), _count(pairs, name)) for name in names}
        worst = max(names, key=lambda name: (shares[name][0] / shares[name][1], shares[name][0]))
        wrong, total = shares[worst]
        if wrong < 2 or 2 * wrong <= total:
            break
        found.append(Culprit(kind="node", names=(worst,), because=f"{wrong} of its {total} pairs are bad"))
        left = {pair: why for pair, why in left.items() if worst not in pair}
        pairs = [pair for pair in pairs if worst not in pair]
    return found


def _count(pairs: Mapping[Pair, str] | Sequence[Pair], name: str) -> int:
    return sum(name in pair for pair in pairs)


def _name(pair: Pair) -> str:
    return " - ".join(pair)
