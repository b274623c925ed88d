"""Why a combination is in, out or not known, what is nearest to it, and which rules contradict each other.

In: `axis=value` texts or a stack's combination, and the rules. Out: an `Explanation`; pairs of rules. Pure.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import TYPE_CHECKING, get_args

from stackcheck.errors import ConfigurationError
from stackcheck.rules import Axis
from stackcheck.versions import VERSION_AXES, is_version, matches, numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from stackcheck.rules import Judgement, Rule, Rules

AXES: frozenset[str] = frozenset(get_args(Axis))
NEAREST = 5
_VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+*-]{0,60}")
# What follows from others is not offered as something to change.
_FIXED = frozenset({"vendor", "cxx11abi", "layout", "triton_package"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """The answer for one combination.

    Attributes:
        nearest: Allowed combinations that differ in the fewest axes, nearest versions first.
    """

    asked: Mapping[str, str]
    judgement: Judgement
    nearest: tuple[Mapping[str, str], ...]


def parse_question(texts: Sequence[str], rules: Rules) -> dict[str, str]:
    """`rocm=7.2`, or `rocm7.2.4`, as axis -> value; a short version is its newest known patch.

    Raises:
        ConfigurationError: A text is no `axis=value`, or its axis is not known.
    """
    asked: dict[str, str] = {}
    for text in texts:
        short = re.fullmatch(r"(rocm|cuda)([0-9][0-9.]*)", text)
        axis, _, value = f"{short[1]}={short[2]}".partition("=") if short else text.partition("=")
        axis = axis.replace("-", "_")
        if axis not in AXES:
            raise ConfigurationError(
                "no such axis", got=text[:80], expected="axis=value with one of " + ", ".join(sorted(AXES))
            )
        if _VALUE.fullmatch(value) is None or (axis in VERSION_AXES and not is_version(value)):
            raise ConfigurationError(f"no value for {axis}", got=text[:80], expected=f"{axis}=VALUE")
        if axis in asked and asked[axis] != value:
            raise ConfigurationError(f"{axis} was given twice", got=text[:80])
        asked[axis] = rules.newest(axis, value) if axis in VERSION_AXES else value
    return _with_vendor(asked)


def _with_vendor(asked: dict[str, str]) -> dict[str, str]:
    """The combination with the vendor that its runtime or architecture belongs to."""
    found = {
        vendor
        for vendor, holds in (
            ("amd", "rocm" in asked or asked.get("arch", "").startswith("gfx") or "rccl" in asked),
            ("nvidia", "cuda" in asked or asked.get("arch", "").startswith("sm_") or "nccl" in asked),
        )
        if holds
    }
    if "vendor" not in asked and found:
        # With both named, the runtime says which; the other one then breaks a rule.
        asked["vendor"] = "amd" if "rocm" in asked or found == {"amd"} else "nvidia"
    if asked.get("rocm") and asked.get("cuda"):
        raise ConfigurationError("rocm and cuda were both given", expected="one of them")
    return asked


def explain(asked: Mapping[str, str], rules: Rules) -> Explanation:
    """Judge a combination; where it does not say where torch comes from, the kindest source speaks."""
    judgements = [rules.judge(given) for given in _with_wheels(asked)]
    order = ("allowed", "unknown", "refused")
    best = min(judgements, key=lambda judged: (order.index(judged.answer), len(judged.broken)))
    if best.answer == "refused":
        findings = {finding.rule.id: finding for judged in judgements for finding in judged.findings}
        best = dataclasses.replace(best, findings=tuple(findings.values()))
    nearest = () if best.answer == "allowed" else tuple(_nearest(asked, best, rules))
    return Explanation(asked=asked, judgement=best, nearest=nearest)


def _with_wheels(asked: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    sources = {"amd": ("upstream", "amd"), "nvidia": ("upstream", "index")}.get(asked.get("vendor", ""), ())
    if "wheels" in asked or "torch" not in asked or not sources:
        yield asked
        return
    for source in sources:
        yield {**asked, "wheels": source}


def _nearest(asked: Mapping[str, str], judged: Judgement, rules: Rules) -> Iterator[Mapping[str, str]]:
    """Allowed combinations with one axis changed, or two where one is not enough."""
    involved = {axis for rule in judged.broken for axis in rule.axes}
    changeable = sorted(axis for axis in asked if axis in involved and axis not in _FIXED)
    found = 0
    for count in (1, 2):
        for candidate in _candidates(asked, changeable, count, rules):
            if any(rules.judge(given).answer == "allowed" for given in _with_wheels(candidate)):
                yield candidate
                found += 1
                if found == NEAREST:
                    return
        if found:
            return


def _candidates(
    asked: Mapping[str, str], axes: Sequence[str], count: int, rules: Rules
) -> Iterator[Mapping[str, str]]:
    """Every combination with `count` axes changed, the nearest versions first."""
    options = []
    for chosen in itertools.combinations(axes, count):
        steps = [_steps(axis, asked[axis], rules) for axis in chosen]
        for values in itertools.product(*steps):
            distance = sum(step for step, _ in values)
            changed = dict(zip(chosen, (value for _, value in values), strict=True))
            options.append((distance, {**asked, **changed}))
    options.sort(key=lambda option: option[0])
    for _, candidate in options:
        yield candidate


def _steps(axis: str, value: str, rules: Rules) -> list[tuple[int, str]]:
    """The other known values of an axis, each with how many known versions lie between."""
    known = [other for other in rules.versions.get(axis, ()) if other != value]
    if axis not in VERSION_AXES:
        return [(1, other) for other in known]
    ranked = sorted({*known, value}, key=numbers)
    here = ranked.index(value)
    return [(abs(ranked.index(other) - here), other) for other in known]


def contradictions(rules: Rules) -> tuple[tuple[Rule, Rule, str], ...]:
    """Pairs of rules about the same axes that can both speak and ask for values that exclude each other.

    Rules about different axes may exclude each other: that is how a combination is refused. Where the axes of
    one condition are among those of the other, the narrower rule could never be satisfied: a mistake.
    """
    certain = [rule for rule in rules if not rule.unknown]
    pool = _pool(certain, rules)
    return tuple(
        (first, second, axis)
        for first, second in itertools.combinations(certain, 2)
        for axis in sorted(first.require.keys() & second.require.keys())
        if _nested(first, second)
        and _both_speak(first, second, pool)
        and not _agree(first, second, axis, pool)
    )


def _pool(rules: Iterable[Rule], known: Rules) -> dict[str, set[str]]:
    """For each axis the values at which an answer can change: all that is named, and what lies just above."""
    pool: dict[str, set[str]] = {axis: set(values) for axis, values in known.versions.items()}
    for rule in rules:
        for axis, patterns in (*rule.when.items(), *rule.require.items()):
            for pattern in patterns:
                named = re.findall(r"[0-9][0-9A-Za-z.]*", pattern) if axis in VERSION_AXES else [pattern]
                pool.setdefault(axis, set()).update(named)
                if axis in VERSION_AXES:
                    pool[axis].update(f"{version}.999" for version in named)
    return pool


def _nested(first: Rule, second: Rule) -> bool:
    return first.when.keys() <= second.when.keys() or second.when.keys() <= first.when.keys()


def _both_speak(first: Rule, second: Rule, pool: Mapping[str, set[str]]) -> bool:
    """Whether one combination can fit both conditions."""
    return all(
        any(
            _any(axis, first.when[axis], value) and _any(axis, second.when[axis], value)
            for value in pool[axis]
        )
        for axis in first.when.keys() & second.when.keys()
    )


def _agree(first: Rule, second: Rule, axis: str, pool: Mapping[str, set[str]]) -> bool:
    """Whether one value of an axis satisfies both requirements, within both conditions."""
    asked = [rule.require[axis] for rule in (first, second)]
    asked += [rule.when[axis] for rule in (first, second) if axis in rule.when]
    fitting = [value for value in pool[axis] if all(_any(axis, patterns, value) for patterns in asked)]
    possible = [value for value in pool[axis] if all(_any(axis, patterns, value) for patterns in asked[2:])]
    return bool(fitting) or not possible


def _any(axis: str, patterns: Iterable[str], value: str) -> bool:
    return any(matches(axis, pattern, value) for pattern in patterns)
