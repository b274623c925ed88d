"""Rules that can never be satisfied together.

In: the rules. Out: pairs of them. Rules about different axes may exclude each other: that is how a
combination is refused. Where the axes of one condition are among those of the other, the narrower rule could
never be satisfied: a mistake. Pure.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from stackcheck.versions import VERSION_AXES, matcher

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from stackcheck.matrix.rules import Rule, RuleSet

_Fitting = Callable[[str, tuple[str, ...]], frozenset[str]]


def contradictions(rules: RuleSet) -> tuple[tuple[Rule, Rule, str], ...]:
    """Pairs that can both apply to one combination and require values of an axis that exclude each other."""
    fitting = _fitting(rules)
    return tuple(
        (first, second, axis)
        for axis, asking in _by_required_axis(rules).items()
        for first, second in itertools.combinations(asking, 2)
        if _nested(first, second)
        if _both_apply(first, second, fitting) and not _agree(first, second, axis, fitting)
    )


def _by_required_axis(rules: RuleSet) -> dict[str, list[Rule]]:
    """The rules that are certain, by each axis of which they require something."""
    asking: dict[str, list[Rule]] = {}
    for rule in rules:
        for axis in () if rule.unknown else rule.require:
            asking.setdefault(axis, []).append(rule)
    return asking


def _fitting(rules: RuleSet) -> _Fitting:
    """What answers which of an axis's values fit one of some patterns."""
    pool = _pool(rules)

    @cache
    def fitting(axis: str, patterns: tuple[str, ...]) -> frozenset[str]:
        matchers = [matcher(axis, pattern) for pattern in patterns]
        return frozenset(value for value in pool[axis] if any(fits(value) for fits in matchers))

    return fitting


def _pool(rules: RuleSet) -> Mapping[str, set[str]]:
    """For each axis the values at which an answer can change: all that is named, and what lies just above."""
    pool: dict[str, set[str]] = {axis: set(values) for axis, values in rules.versions.items()}
    for rule in rules:
        for axis, patterns in (*rule.when.items(), *rule.require.items()):
            pool.setdefault(axis, {"0"} if axis in VERSION_AXES else set()).update(_named(axis, patterns))
    return pool


def _named(axis: str, patterns: tuple[str, ...]) -> Iterator[str]:
    for pattern in patterns:
        if axis not in VERSION_AXES:
            yield pattern
        else:
            for version in re.findall(r"[0-9][0-9A-Za-z.]*", pattern):
                yield version
                yield f"{version}.999"


def _nested(first: Rule, second: Rule) -> bool:
    return first.when.keys() <= second.when.keys() or second.when.keys() <= first.when.keys()


def _both_apply(first: Rule, second: Rule, fitting: _Fitting) -> bool:
    """Whether one combination can fit both conditions."""
    return not any(
        fitting(axis, first.when[axis]).isdisjoint(fitting(axis, second.when[axis]))
        for axis in first.when.keys() & second.when.keys()
    )


def _agree(first: Rule, second: Rule, axis: str, fitting: _Fitting) -> bool:
    """Whether one value of an axis satisfies both requirements, within both conditions."""
    spoken_of = [fitting(axis, rule.when[axis]) for rule in (first, second) if axis in rule.when]
    asked = [fitting(axis, rule.require[axis]) for rule in (first, second)]
    return bool(frozenset.intersection(*asked, *spoken_of))
