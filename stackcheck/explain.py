"""Why a combination is in, out, refused or not known, and what is nearest to it that is allowed.

In: a combination, or a stack id, the matrix and the rules. Out: an `Explanation`. Pure.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from stackcheck import cells, resolve
from stackcheck.combination import chosen, combination, judge_cell
from stackcheck.nearest import KINDNESS, kindest_first, nearest_allowed
from stackcheck.rules import Judgement

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stackcheck.cells import Cell
    from stackcheck.matrix import Matrix
    from stackcheck.rules import Finding, Rules


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """The answer for one combination.

    Attributes:
        nearest: Allowed combinations that differ in the fewest axes, nearest versions first.
        stacks: The stacks of the matrix that are such a combination.
        excluded: The stacks that the matrix leaves out by choice: id -> its reason.
        experimental: The matrix accepts what is not known of this stack; its certificate says so.
    """

    asked: Mapping[str, str]
    judgement: Judgement
    nearest: tuple[Mapping[str, str], ...]
    stacks: tuple[str, ...] = ()
    excluded: Mapping[str, str] = dataclasses.field(default_factory=dict)
    experimental: bool = False


def explain(asked: Mapping[str, str], rules: Rules, found: Matrix | None = None) -> Explanation:
    """Judge a combination; where it does not say where torch comes from, the kindest source speaks."""
    judgements = kindest_first(asked, rules)
    best = judgements[0]
    if best.answer == "refused" and any("wheels" in rule.axes for rule in best.broken):
        # It may be the source that is wrong: the others say their word too.
        best = merged(asked, judgements)
    cases = [cell for cell in cells.candidates(found) if _is_such(cell, asked, found, rules)] if found else []
    return Explanation(
        asked=asked,
        judgement=best,
        nearest=() if best.answer == "allowed" else tuple(nearest_allowed(asked, rules)),
        **(_places(cases, found) if found else {}),
    )


def explain_stack(name: str, found: Matrix, rules: Rules) -> Explanation | None:
    """Judge a stack of the matrix, with its architectures and test targets; None where there is none."""
    cell = next((cell for cell in cells.candidates(found) if cell.id == name), None)
    if cell is None:
        return None
    settings, vendor = cells.settings_of(cell, found), found.runtimes[cell.runtime].vendor
    asked, values = chosen(cell, vendor), combination(cell, vendor, rules)
    stack = resolve.stack_of(cell, settings, found, values)
    judgements = judge_cell(values, stack.archs, stack.tested_on, rules)
    worst = max(judgements, key=lambda judged: KINDNESS.index(judged.answer))
    # What the rules chose is free to change with what the matrix chose.
    free = {axis: value for axis, value in worst.combination.items() if axis in {*asked, "arch", "driver"}}
    return Explanation(
        asked=free,
        judgement=merged(values, judgements),
        nearest=() if worst.answer == "allowed" else tuple(nearest_allowed(free, rules)),
        experimental=stack.experimental,
        **_places([cell], found),
    )


def merged(combination: Mapping[str, str], judgements: Iterable[Judgement]) -> Judgement:
    """One judgement of several about parts of a combination: a rule that is broken once is broken."""
    findings: dict[str, Finding] = {}
    for finding in (finding for judgement in judgements for finding in judgement.findings):
        if finding.rule.id not in findings or not finding.holds:
            findings[finding.rule.id] = finding
    return Judgement(combination=combination, findings=tuple(findings.values()))


def _is_such(cell: Cell, asked: Mapping[str, str], found: Matrix, rules: Rules) -> bool:
    """Whether a cell has every value that was asked for."""
    vendor = found.runtimes[cell.runtime].vendor
    if any(asked.get(axis, value) != value for axis, value in chosen(cell, vendor).items()):
        return False
    settings = cells.settings_of(cell, found)
    values = combination(cell, vendor, rules)
    stack = resolve.stack_of(cell, settings, found, values)
    several = {"arch": stack.archs, "driver": [target.driver for target in stack.tested_on]}
    return all(value in several.get(axis, [values.get(axis)]) for axis, value in asked.items())


def _places(cases: Iterable[Cell], found: Matrix) -> dict[str, Any]:
    """The cells that are in the matrix, and those that it leaves out."""
    reasons = {cell.id: cells.exclusion(cell, found) for cell in cases}
    return {
        "stacks": tuple(id_ for id_, exclude in reasons.items() if exclude is None),
        "excluded": {id_: exclude.because for id_, exclude in reasons.items() if exclude is not None},
    }
