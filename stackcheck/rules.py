"""Rules, and the judgement of a combination by them.

In: rules (compat.py reads them); a combination, axis -> value. Out: a `Judgement` with every rule that
speaks about the combination and whether it holds; the value that the rules ask for on an open axis. A rule
says: when these values, require those, because, source. What nobody has said is *unknown*, a third answer
that is not a yes. Pure.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, Self

from stackcheck.versions import VERSION_AXES, is_version, matches, numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

Axis = Literal[
    "vendor",
    "rocm",
    "cuda",
    "torch",
    "python",
    "os",
    "arch",
    "flash_attn",
    "flash_attn_from",
    "flash_attn_backend",
    "triton",
    "triton_package",
    "torchvision",
    "torchaudio",
    "rccl",
    "nccl",
    "wheels",
    "driver",
    "cxx11abi",
    "layout",
    "beside",  # another framework in the same image
    "device_wheels",  # one | all: the kernels of one GPU or of all
    "render_gid",  # host | a number built into the image
    "variables",  # build | run | both: when an option of an extension is set
]
Answer = Literal["allowed", "refused", "unknown"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rule:
    """One compatibility fact.

    Attributes:
        when: Axis -> patterns, any of which must match, on every axis, for the rule to speak.
        require: Axis -> patterns, any of which must match, on every axis that the combination names.
        unknown: What breaks the rule is not known to fail; nobody has said that it works.
    """

    id: str
    when: Mapping[str, tuple[str, ...]]
    require: Mapping[str, tuple[str, ...]]
    because: str
    source: str
    unknown: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis that the rule looks at."""
        return tuple(sorted({*self.when, *self.require}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A rule that speaks about a combination, and whether it holds."""

    rule: Rule
    holds: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judgement:
    """What the rules say of one combination."""

    combination: Mapping[str, str]
    findings: tuple[Finding, ...]

    @property
    def broken(self) -> tuple[Rule, ...]:
        """The rules that do not hold, refusals first."""
        rules = [finding.rule for finding in self.findings if not finding.holds]
        return tuple(sorted(rules, key=lambda rule: rule.unknown))

    @property
    def answer(self) -> Answer:
        """Refused if one rule refuses; else unknown if nobody has said that it works; else allowed."""
        broken = self.broken
        if not broken:
            return "allowed"
        return "unknown" if broken[0].unknown else "refused"


class _Group:
    """Rules that look at the same axes, and what they found for the values seen so far."""

    def __init__(self, axes: tuple[str, ...], rules: Sequence[Rule]) -> None:
        self.axes = axes
        self.rules = rules
        self.seen: dict[tuple[str | None, ...], tuple[Finding, ...]] = {}

    def can_speak(self, named: Iterable[str]) -> bool:
        """Whether any rule could say something of a combination that names these axes."""
        given = set(named)
        return any(rule.when.keys() <= given and rule.require.keys() & given for rule in self.rules)


class Rules(tuple[Rule, ...]):  # noqa: SLOT001  # it carries two attributes by design
    """The rules of a file, with the versions it knows and the answers found so far.

    Most combinations of a matrix share most of their values, so each group of rules that looks at the same
    axes remembers its findings for the values it has seen.
    """

    versions: Mapping[str, tuple[str, ...]]
    _groups: tuple[_Group, ...]
    _speaking: dict[tuple[str, ...], tuple[_Group, ...]]
    _derived: dict[tuple[str, tuple[str | None, ...]], str | None]

    def __new__(cls, rules: Iterable[Rule], versions: Mapping[str, tuple[str, ...]]) -> Self:
        """The rules in file order, grouped by the axes that they look at."""
        self = super().__new__(cls, rules)
        grouped: dict[tuple[str, ...], list[Rule]] = {}
        for rule in self:
            grouped.setdefault(rule.axes, []).append(rule)
        self.versions = versions
        self._groups = tuple(_Group(axes, members) for axes, members in grouped.items())
        self._speaking = {}
        self._derived = {}
        return self

    def judge(self, combination: Mapping[str, str]) -> Judgement:
        """What every rule says of a combination with one value an axis."""
        named = tuple(combination)
        groups = self._speaking.get(named)
        if groups is None:
            groups = self._speaking[named] = tuple(group for group in self._groups if group.can_speak(named))
        findings: list[Finding] = []
        value_of = combination.get
        for group in groups:
            values = tuple(map(value_of, group.axes))
            found = group.seen.get(values)
            if found is None:
                found = group.seen[values] = tuple(_findings(group.rules, combination))
            findings += found
        return Judgement(combination=combination, findings=tuple(findings))

    def derive(self, combination: Mapping[str, str], axis: str) -> str | None:
        """The value that the rules ask for on an axis that the combination leaves open, if they name one."""
        key = (axis, tuple(map(combination.get, self._deciding(axis))))
        if key not in self._derived:
            self._derived[key] = next(
                (
                    patterns[0]
                    for rule in self
                    if (patterns := rule.require.get(axis)) and not rule.unknown
                    if _names_one(axis, patterns[0]) and _fit(rule.when, combination)
                ),
                None,
            )
        return self._derived[key]

    @lru_cache(maxsize=64)  # noqa: B019  # rules live as long as the process
    def _deciding(self, axis: str) -> tuple[str, ...]:
        """The axes on which the value of another one depends."""
        return tuple(sorted({name for rule in self if axis in rule.require for name in rule.when}))

    def newest(self, axis: str, value: str) -> str:
        """The newest known version that a short one means: `7.2` is 7.2.4."""
        fitting = [known for known in self.versions.get(axis, ()) if matches(axis, value, known)]
        return max(fitting, key=numbers, default=value)


def _names_one(axis: str, pattern: str) -> bool:
    return (axis in VERSION_AXES and is_version(pattern)) or (
        axis in {"triton_package", "layout", "cxx11abi"} and "*" not in pattern
    )


def _fit(condition: Mapping[str, tuple[str, ...]], combination: Mapping[str, str]) -> bool:
    """Whether every axis of a condition is named and fits."""
    for axis, patterns in condition.items():
        value = combination.get(axis)
        if value is None or not any(matches(axis, pattern, value) for pattern in patterns):
            return False
    return True


def _findings(rules: Sequence[Rule], combination: Mapping[str, str]) -> Iterator[Finding]:
    for rule in rules:
        if not _fit(rule.when, combination):
            continue
        asked = {axis: patterns for axis, patterns in rule.require.items() if axis in combination}
        if asked:
            yield Finding(rule=rule, holds=_fit(asked, combination))
