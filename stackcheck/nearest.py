"""The allowed combinations that are nearest to one that is not.

In: a combination and the rules. Out: combinations that differ from it in the fewest axes, the nearest
versions first. Pure.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from stackcheck.versions import VERSION_AXES, numbers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from stackcheck.rules import Judgement, Rules

NEAREST = 5
# The search ends after so many judgements: some 50 ms.
MAX_JUDGED = 3000
_Changes = tuple[tuple[str, str], ...]
KINDNESS = ("allowed", "unknown", "refused")


def kindest_first(asked: Mapping[str, str], rules: Rules) -> list[Judgement]:
    """A judgement for each place where torch can come from, where the combination does not say it."""
    sources = {"amd": ("upstream", "amd"), "nvidia": ("upstream", "index")}.get(asked.get("vendor", ""), ())
    open_ = "torch" in asked and "wheels" not in asked
    judgements = [rules.judge({**asked, "wheels": source}) for source in sources if open_]
    return sorted(
        judgements or [rules.judge(asked)],
        key=lambda judged: (KINDNESS.index(judged.answer), len(judged.broken)),
    )


def nearest_allowed(asked: Mapping[str, str], rules: Rules) -> Iterator[Mapping[str, str]]:
    """Allowed combinations with the fewest axes changed, at most `NEAREST`, and where their torch comes from.

    A best-first search: what is allowed differs, for every broken rule, in one of the axes that it looks at.
    So only these are changed, one at a time. First goes what has the fewest changes made and rules broken.
    """
    queue = [_Step(asked, (), 0, rules)]
    seen = {queue[0].changes}
    found: list[int] = []
    while queue and len(found) < NEAREST and len(seen) < MAX_JUDGED:
        step = heapq.heappop(queue)
        if found and len(step.changes) > found[0]:
            return
        if step.judged.answer == "allowed":
            found.append(len(step.changes))
            yield step.judged.combination
            continue
        for further in step.further(rules):
            if further.changes not in seen:
                seen.add(further.changes)
                heapq.heappush(queue, further)


class _Step:
    """A combination on the way: what was changed, how far, and which rules are still broken."""

    def __init__(self, asked: Mapping[str, str], changes: _Changes, distance: int, rules: Rules) -> None:
        self.asked = asked
        self.changes = changes
        self.distance = distance
        self.judged = kindest_first({**asked, **dict(changes)}, rules)[0]
        self.order = (len(changes) + len(self.judged.broken), distance, changes)

    def __lt__(self, other: _Step) -> bool:
        """The order of the search."""
        return self.order < other.order

    def further(self, rules: Rules) -> Iterator[_Step]:
        """This one with one more axis changed."""
        for axis in _changeable(self.judged, self.asked, dict(self.changes)):
            for distance, value in _values(axis, self.asked[axis], rules):
                changes = tuple(sorted((*self.changes, (axis, value))))
                yield _Step(self.asked, changes, self.distance + distance, rules)


def _changeable(judged: Judgement, asked: Mapping[str, str], changed: Mapping[str, str]) -> list[str]:
    """The axes of the broken rule that leaves the fewest to change: one of them must change."""
    choices = [
        sorted(axis for axis in rule.axes if axis in asked and axis not in changed and axis != "vendor")
        for rule in judged.broken
    ]
    return min(choices, key=len)


def _values(axis: str, value: str, rules: Rules) -> list[tuple[int, str]]:
    """The other known values of an axis, each with how many known versions lie between."""
    known = [other for other in rules.versions.get(axis, ()) if other != value]
    if axis not in VERSION_AXES:
        return [(1, other) for other in known]
    ranked = sorted({*known, value}, key=numbers)
    here = ranked.index(value)
    return [(abs(ranked.index(other) - here), other) for other in known]
