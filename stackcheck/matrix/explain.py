"""Why a combination is allowed, excluded, refused or unknown, and which allowed combinations are nearest.

In: a combination or a stack id, the matrix, the rules, the known issues. Out: an `Explanation`. Pure. The
nearest combinations differ in the fewest axes; among those, the nearest versions come first.
"""

from __future__ import annotations

import dataclasses
import heapq
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from stackcheck.errors import ConfigurationError, did_you_mean
from stackcheck.matrix import expand, resolve
from stackcheck.matrix.expand import Cell
from stackcheck.matrix.known_issues import NO_ISSUES, KnownIssue, KnownIssues
from stackcheck.matrix.matrix import Matrix
from stackcheck.matrix.resolve import chosen, combination, complete, judge_cell, packages_of, replaced
from stackcheck.matrix.rules import Axis, RuleFinding, RuleJudgement, RuleSet
from stackcheck.matrix.stack import Stack
from stackcheck.vendors import environment
from stackcheck.vendors.environment import Renamed, Variable
from stackcheck.versions import VERSION_AXES, numbers

NEAREST = 5
# The search ends after so many judgements: some 50 ms.
MAX_JUDGED = 3000
_Changes = tuple[tuple[str, str], ...]
KINDNESS = ("allowed", "unknown", "refused")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """The answer for one combination.

    Attributes:
        nearest: Allowed combinations that differ in the fewest axes, nearest versions first.
        excluded: The stacks that the matrix leaves out by choice: id -> its reason.
        experimental: The matrix accepts a stack with unknown combinations; its certificate states that.
        environment: Of a stack: what its vendor's containers set, and the image's values, if any.
    """

    asked: Mapping[str, str]
    judgement: RuleJudgement
    nearest: tuple[Mapping[str, str], ...]
    stacks: tuple[str, ...] = ()  # the stacks of the matrix that are such a combination
    excluded: Mapping[str, str] = dataclasses.field(default_factory=dict)
    known_issues: tuple[KnownIssue, ...] = ()  # reported faults of this combination
    experimental: bool = False
    environment: tuple[tuple[Variable, str | None], ...] = ()
    names: tuple[Renamed, ...] = ()  # of a stack: what the other vendor's variables are called


def explain(
    asked: Mapping[str, str], rules: RuleSet, found: Matrix | None = None, issues: KnownIssues = NO_ISSUES
) -> Explanation:
    """Judge a combination; if it does not name the source of torch, the best answer counts."""
    rules = issues.refusing(rules)
    judgements = kindest_first(asked, rules)
    best = judgements[0]
    if best.answer == "refused" and any("wheels" in rule.axes for rule in best.broken):
        # The source of torch may be the reason: show the other sources too.
        best = merged(asked, judgements)
    cases = (
        [cell for cell in expand.candidates(found) if _is_such(cell, asked, found, rules)] if found else []
    )
    return Explanation(
        asked=asked,
        judgement=best,
        nearest=() if best.answer == "allowed" else tuple(nearest_allowed(asked, rules)),
        known_issues=issues.of(complete(best.combination, rules)),
        **(_places(cases, found) if found else {}),
    )


def explain_stack(
    name: str, found: Matrix, rules: RuleSet, issues: KnownIssues = NO_ISSUES
) -> Explanation | None:
    """Judge a stack of the matrix, with its architectures and test targets; None if it has no such stack."""
    cell = next((cell for cell in expand.candidates(found) if cell.id == name), None)
    if cell is None:
        return None
    rules = issues.refusing(rules)
    settings, vendor = expand.settings_of(cell, found), found.runtimes[cell.runtime].vendor
    packages = packages_of(cell, settings, found)
    asked, values = chosen(cell, vendor, packages), combination(cell, vendor, packages, rules)
    stack = resolve.stack_of(cell, settings, found, values, own=replaced(values, cell, rules))
    judgements = judge_cell(values, stack.archs, stack.tested_on or (), rules)
    worst = max(judgements, key=lambda judged: KINDNESS.index(judged.answer))
    # What the rules chose is free to change with what the matrix chose.
    free = {axis: value for axis, value in worst.combination.items() if axis in {*asked, "arch", "driver"}}
    return Explanation(
        asked=free,
        judgement=merged(values, judgements),
        nearest=() if worst.answer == "allowed" else tuple(nearest_allowed(free, rules)),
        known_issues=resolve.known_issues_of(stack, values, issues),
        experimental=stack.experimental,
        environment=tuple(
            (one, stack.env.get(one.name)) for one in environment.variables(vendor) if stack.torch
        ),
        names=environment.names(vendor) if stack.torch else (),
        **_places([cell], found),
    )


def merged(combination: Mapping[str, str], judgements: Iterable[RuleJudgement]) -> RuleJudgement:
    """One judgement of several about parts of a combination: a rule that is broken once is broken."""
    findings: dict[str, RuleFinding] = {}
    for finding in (finding for judgement in judgements for finding in judgement.findings):
        if finding.rule.id not in findings or not finding.holds:
            findings[finding.rule.id] = finding
    return RuleJudgement(combination=combination, findings=tuple(findings.values()))


def kindest_first(asked: Mapping[str, str], rules: RuleSet) -> list[RuleJudgement]:
    """The rules' judgements, the most favourable first: one for each source of torch, if none was named."""
    sources = {"amd": ("upstream", "amd"), "nvidia": ("upstream", "index")}.get(asked.get("vendor", ""), ())
    open_ = "torch" in asked and "wheels" not in asked
    judgements = [rules.judge({**asked, "wheels": source}) for source in sources if open_]
    return sorted(judgements or [rules.judge(asked)], key=kindness)


def kindness(judged: RuleJudgement) -> tuple[int, int]:
    """Sorts judgements, the kindest first."""
    return KINDNESS.index(judged.answer), len(judged.broken)


def nearest_allowed(asked: Mapping[str, str], rules: RuleSet) -> Iterator[Mapping[str, str]]:
    """Allowed combinations with the fewest axes changed, at most `NEAREST`, and where their torch comes from.

    A best-first search: to repair a broken rule, one of the axes that it looks at has to change. So only
    these are changed, one at a time. The fewest changes and broken rules go first.
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

    def __init__(self, asked: Mapping[str, str], changes: _Changes, distance: int, rules: RuleSet) -> None:
        self.asked = asked
        self.changes = changes
        self.distance = distance
        self.judged = kindest_first({**asked, **dict(changes)}, rules)[0]
        self.order = (len(changes) + len(self.judged.broken), distance, changes)

    def __lt__(self, other: _Step) -> bool:
        """The order of the search."""
        return self.order < other.order

    def further(self, rules: RuleSet) -> Iterator[_Step]:
        """This one with one more axis changed."""
        for axis in _changeable(self.judged, self.asked, dict(self.changes)):
            for distance, value in _values(axis, self.asked[axis], rules):
                changes = tuple(sorted((*self.changes, (axis, value))))
                yield _Step(self.asked, changes, self.distance + distance, rules)


def _changeable(judged: RuleJudgement, asked: Mapping[str, str], changed: Mapping[str, str]) -> list[str]:
    """The axes of the broken rule that leaves the fewest to change: one of them must change."""
    choices = [
        sorted(axis for axis in rule.axes if axis in asked and axis not in changed and axis != "vendor")
        for rule in judged.broken
    ]
    return min(choices, key=len)


def _values(axis: str, value: str, rules: RuleSet) -> list[tuple[int, str]]:
    """The other known values of an axis, each with how many known versions lie between."""
    known = [other for other in rules.versions.get(axis, ()) if other != value]
    if axis not in VERSION_AXES:
        return [(1, other) for other in known]
    ranked = sorted({*known, value}, key=numbers)
    here = ranked.index(value)
    return [(abs(ranked.index(other) - here), other) for other in known]


def _is_such(cell: Cell, asked: Mapping[str, str], found: Matrix, rules: RuleSet) -> bool:
    """Whether a cell has every value that was asked for."""
    vendor = found.runtimes[cell.runtime].vendor
    settings = expand.settings_of(cell, found)
    packages = packages_of(cell, settings, found)
    if any(asked.get(axis, value) != value for axis, value in chosen(cell, vendor, packages).items()):
        return False
    values = combination(cell, vendor, packages, rules)
    stack = resolve.stack_of(cell, settings, found, values, own=replaced(values, cell, rules))
    several = {"arch": stack.archs, "driver": _drivers(stack, asked)}
    return all(value in several.get(axis, [values.get(axis)]) for axis, value in asked.items())


def _drivers(stack: Stack, asked: Mapping[str, str]) -> list[str | None]:
    """The drivers that a stack is tested with; any, if it names no machine: then the rules alone decide."""
    return [asked.get("driver")] if stack.tested_on is None else [one.driver for one in stack.tested_on]


def _places(cases: Iterable[Cell], found: Matrix) -> dict[str, Any]:
    """The cells that are in the matrix, and those that it leaves out."""
    reasons = {cell.id: expand.exclusion(cell, found) for cell in cases}
    return {
        "stacks": tuple(id_ for id_, exclude in reasons.items() if exclude is None),
        "excluded": {id_: exclude.because for id_, exclude in reasons.items() if exclude is not None},
    }


AXES: frozenset[str] = frozenset(get_args(Axis))
_VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,60}")
_VERSION = re.compile(r"\d{1,9}(\.\d{1,9}){0,5}((a|b|rc|\.post|\.dev)\d{1,9})?(\+[A-Za-z0-9.]{1,40})?")
# The parts of a stack id, without `=`: the name of an axis there, and its name here.
_NAMED = {"rocm": "rocm", "cuda": "cuda", "torch": "torch", "fa": "flash_attn", "py": "python"}
_PART = re.compile(rf"({'|'.join(_NAMED)})([0-9][0-9A-Za-z.]*)")


def parse_question(texts: Sequence[str], rules: RuleSet, stacks: Iterable[str] = ()) -> dict[str, str]:
    """`rocm=7.2`, or `rocm7.2.4`, as axis -> value; a short version is its newest patch that fits.

    A text in the form of a stack id (`rocm7.2.4-torch2.6.0-py3.12-ubuntu24.04`) is all that it names.
    `stacks` are the ids of the matrix: a wrong text may be meant as one of them.

    Raises:
        ConfigurationError: A text is not `axis=value`, or its axis is not known.
    """
    asked: dict[str, str] = {}
    for text in (part for whole in texts for part in _parts(whole, rules)):
        axis, _, value = text.partition("=")
        axis = axis.replace("-", "_")
        if axis not in AXES:
            raise ConfigurationError(
                "no such axis" if "=" in text else "no such stack, and no such axis",
                got=text[:80],
                expected=_meant(texts, axis, stacks) or "axis=value with one of " + ", ".join(sorted(AXES)),
                next_step=None if "=" in text else "stackcheck list",
            )
        if not (_VERSION if axis in VERSION_AXES else _VALUE).fullmatch(value):
            raise ConfigurationError(
                f"invalid value for {axis}",
                got=text[:80],
                expected=_meant(texts, axis, stacks) or f"{axis}=VALUE",
            )
        if axis in asked and asked[axis] != value:
            raise ConfigurationError(f"{axis} was given twice", got=text[:80])
        asked[axis] = value
    return _newest(_with_vendor(asked), rules)


def _meant(texts: Sequence[str], axis: str, stacks: Iterable[str]) -> str | None:
    near_axis = did_you_mean(axis, AXES) if axis not in {*texts, *AXES} else None
    return near_axis or (did_you_mean(texts[0], stacks) if len(texts) == 1 else None)


def _newest(asked: Mapping[str, str], rules: RuleSet) -> dict[str, str]:
    """Each short version as the newest known one that it means; of ROCm, as the one that fits best.

    torch's wheels bring a ROCm of their own, and not the newest patch.
    """
    whole = {
        axis: rules.newest(axis, value) if axis in VERSION_AXES else value for axis, value in asked.items()
    }
    patches = rules.meant("rocm", asked["rocm"]) if "rocm" in asked else []
    return min(
        [{**whole, "rocm": patch} for patch in patches],
        key=lambda one: kindness(kindest_first(one, rules)[0]),
        default=whole,
    )


def _parts(text: str, rules: RuleSet) -> Iterator[str]:
    """The `axis=value` texts that a part of a stack id, or the whole of it, stands for."""
    if "=" in text:
        yield text
        return
    for part in text.split("-"):
        named = _PART.fullmatch(part)
        if named:
            yield f"{_NAMED[named[1]]}={named[2]}"
        elif part in rules.versions.get("os", ()):
            yield f"os={part}"
        elif part == "cpu":
            yield "vendor=cpu"
        else:
            yield "wheels=amd" if part == "amd" else part


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
        # If both are named, the runtime decides; the other one then breaks a rule.
        asked["vendor"] = "amd" if "rocm" in asked or found == {"amd"} else "nvidia"
    if asked.get("rocm") and asked.get("cuda"):
        raise ConfigurationError("rocm and cuda were both given", expected="one of them")
    return asked
