"""Why a combination is in, out or not known, and what is nearest to it that is allowed.

In: `axis=value` texts or a stack's combination, and the rules. Out: an `Explanation`. Pure.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, get_args

from stackcheck.errors import ConfigurationError
from stackcheck.nearest import kindest_first, nearest_allowed
from stackcheck.rules import Axis
from stackcheck.versions import VERSION_AXES, is_version

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stackcheck.rules import Judgement, Rules

AXES: frozenset[str] = frozenset(get_args(Axis))
_VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+*-]{0,60}")


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
    judgements = kindest_first(asked, rules)
    best = judgements[0]
    if best.answer == "refused":
        findings = {finding.rule.id: finding for judged in judgements for finding in judged.findings}
        best = dataclasses.replace(best, findings=tuple(findings.values()))
    nearest = () if best.answer == "allowed" else tuple(nearest_allowed(asked, rules))
    return Explanation(asked=asked, judgement=best, nearest=nearest)
