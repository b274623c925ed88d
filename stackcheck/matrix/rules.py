"""Rules, and the judgement of a combination by them.

In: rules (compat.py reads them); a combination, axis -> value. Out: a `RuleJudgement` with every rule that
applies to the combination and whether it holds; the value that the rules ask for on an open axis. A rule
reads: when these values, require those, because, source. What no source states is *unknown*: a third
answer, which is not a yes. Pure.
"""

import dataclasses
import re
from collections.abc import (  # a named tuple's annotations are read at run time
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import cache, cached_property, lru_cache, partial
from operator import itemgetter
from typing import Generic, Literal, NamedTuple, Self, TypeVar

from stackcheck.versions import VERSION_AXES, is_version, matcher, matches, numbers

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
    "torchao",
    "transformers",
    "amdsmi",
    "rccl",
    "nccl",
    "wheels",
    "driver",
    "cxx11abi",
    "layout",
    "beside",  # another framework in the same image
    "device_wheels",  # one | all: the kernels of the stack's own architectures, a wheel each, or of all
    "render_gid",  # host | a number built into the image
    "bitsandbytes",  # cuda | rocm: what it was compiled for
    "kernels",  # hip | triton | cuda | ptx: what the kernels of an extension are written in
    "variables",  # build | run | both: when an option of an extension is set
]
Answer = Literal["allowed", "refused", "unknown"]
# Axes that are no versions, whose value follows from the others.
_CHOSEN = frozenset({"triton_package", "layout", "cxx11abi", "device_wheels"})
_IS_NAME = re.compile(r"[A-Za-z0-9._-]+").fullmatch

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rule:
    """One compatibility fact.

    Attributes:
        when: Axis -> patterns, any of which must match, on every axis, for the rule to apply.
        require: Axis -> patterns, any of which must match, on every axis that the combination names.
    """

    id: str
    when: Mapping[str, tuple[str, ...]]
    require: Mapping[str, tuple[str, ...]]
    because: str
    source: str
    unknown: bool = False  # what breaks the rule is not known to fail, but no source states that it works
    closing: bool = False  # it only states that what is not listed is unknown
    forbids: bool = False  # it requires nothing: a combination that fits `when` is refused (a known issue)

    @cached_property
    def axes(self) -> frozenset[str]:
        """Every axis that the rule looks at."""
        return frozenset((*self.when, *self.require))

    def can_apply(self, named: frozenset[str]) -> bool:
        """Whether it could say something of a combination that names these axes."""
        return self.when.keys() <= named and (self.forbids or not named.isdisjoint(self.require))

    def applies(self, combination: Mapping[str, str]) -> bool:
        """Whether the combination, which names every axis of `when`, fits there."""
        return all(fits(combination[axis]) for axis, fits in self._when)

    def holds(self, combination: Mapping[str, str]) -> bool:
        """Whether what the combination names is what the rule requires."""
        holds = all(fits(combination[axis]) for axis, fits in self._require if axis in combination)
        return holds and not self.forbids

    @cached_property
    def _when(self) -> tuple[tuple[str, Callable[[str], bool]], ...]:
        return tuple((axis, one_of(axis, patterns)) for axis, patterns in self.when.items())

    @cached_property
    def _require(self) -> tuple[tuple[str, Callable[[str], bool]], ...]:
        return tuple((axis, one_of(axis, patterns)) for axis, patterns in self.require.items())

    def names_one(self, axis: str) -> bool:
        """Whether it requires one value of an axis, and not a range or an unconfirmed choice."""
        if self.unknown or axis not in self.require:
            return False
        first = self.require[axis][0]
        return is_version(first) if axis in VERSION_AXES else axis in _CHOSEN and _IS_NAME(first) is not None


@lru_cache(maxsize=10_000)
def one_of(axis: str, patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """Whether a value of an axis fits one of the patterns; the answer is cached."""
    matchers = [matcher(axis, pattern) for pattern in patterns]
    return cache(lambda value: any(fits(value) for fits in matchers))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleFinding:
    """A rule that applies to a combination, and whether it holds."""

    rule: Rule
    holds: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleJudgement:
    """The rules' answer for one combination."""

    combination: Mapping[str, str]
    findings: tuple[RuleFinding, ...]

    @property
    def broken(self) -> tuple[Rule, ...]:
        """The rules that do not hold, refusals first."""
        rules = [finding.rule for finding in self.findings if not finding.holds]
        return tuple(sorted(rules, key=lambda rule: rule.unknown))

    @property
    def answer(self) -> Answer:
        """Refused if one rule refuses; else unknown if no source states that it works; else allowed."""
        broken = self.broken
        if not broken:
            return "allowed"
        return "unknown" if broken[0].unknown else "refused"


class _Cached(NamedTuple, Generic[_T]):
    """A function of some axes of a combination, with a cache: each set of their values is computed once."""

    values: Callable[[Mapping[str, str]], tuple[str, ...]]
    answer: Callable[[tuple[str, ...]], _T]


class _Answers(NamedTuple):
    """What the rules that look at the same axes say, and those of them that are broken."""

    findings: tuple[RuleFinding, ...]
    broken: tuple[Rule, ...]


class RuleSet(tuple[Rule, ...]):  # noqa: SLOT001  # it carries attributes by design
    """The rules of a file, with the versions it knows, and an index of them by the axes that they look at.

    Most combinations of a matrix share most of their values. So the rules that look at the same axes are
    judged once for the values of these axes, and their findings are cached.
    """

    versions: Mapping[str, tuple[str, ...]]
    _judges: dict[tuple[str | None, ...], tuple[_Cached[_Answers], ...]]
    _choices: dict[tuple[str, ...], _Cached[str | None]]

    def __new__(cls, rules: Iterable[Rule], versions: Mapping[str, tuple[str, ...]]) -> Self:
        """The rules in file order."""
        self = super().__new__(cls, rules)
        self.versions = versions
        self._judges = {}
        self._choices = {}
        return self

    def judge(self, combination: Mapping[str, str], *, about: str | None = None) -> RuleJudgement:
        """What all rules say of a combination with one value an axis, or those alone about one axis."""
        findings: list[RuleFinding] = []
        for values, answers in self._judges_of(combination, about):
            findings += answers(values(combination)).findings
        return RuleJudgement(combination=combination, findings=tuple(findings))

    def broken(self, combination: Mapping[str, str], *, about: str | None = None) -> list[Rule]:
        """The rules that a combination breaks: of a judgement, what decides."""
        broken: list[Rule] = []
        for values, answers in self._judges_of(combination, about):
            broken += answers(values(combination)).broken
        return broken

    def _judges_of(self, combination: Mapping[str, str], about: str | None) -> tuple[_Cached[_Answers], ...]:
        """The cached judgements for a combination that names these axes."""
        shape = (about, *combination)
        if shape not in self._judges:
            self._judges[shape] = tuple(self._index(frozenset(combination), about))
        return self._judges[shape]

    def _index(self, named: frozenset[str], about: str | None) -> Iterator[_Cached[_Answers]]:
        """The rules that can apply to a combination of these axes, by the axes that they look at."""
        by_axes: dict[frozenset[str], list[Rule]] = {}
        for rule in self:
            if rule.can_apply(named) and (about is None or about in rule.axes):
                by_axes.setdefault(named & rule.axes, []).append(rule)
        # Rules that look at a part of the axes of others join them: fewer look-ups for every combination.
        groups: dict[frozenset[str], list[Rule]] = {}
        for axes, rules in sorted(by_axes.items(), key=lambda entry: len(entry[0]), reverse=True):
            groups.setdefault(next((wider for wider in groups if axes <= wider), axes), []).extend(rules)
        for axes, rules in groups.items():
            yield _cached(sorted(axes), partial(_answers, rules))

    def derive(self, combination: Mapping[str, str], axis: str) -> str | None:
        """The value that the rules ask for on an axis that the combination leaves open, if they name one."""
        shape = (axis, *combination)
        choice = self._choices.get(shape)
        if choice is None:
            rules = [rule for rule in self if rule.names_one(axis) and rule.when.keys() <= set(combination)]
            axes = sorted({name for rule in rules for name in rule.when})
            choice = self._choices[shape] = _cached(axes, partial(_first_value, rules, axis))
        return choice.answer(choice.values(combination))

    def newest(self, axis: str, value: str) -> str:
        """The newest known version that a short one means: `7.2` is 7.2.4."""
        return next(iter(self.meant(axis, value)), value)

    def meant(self, axis: str, value: str) -> list[str]:
        """Every known version that a short one means, the newest first."""
        fitting = [known for known in self.versions.get(axis, ()) if matches(axis, value, known)]
        return sorted(fitting, key=numbers, reverse=True)


def _cached(axes: Sequence[str], answer: Callable[[Mapping[str, str]], _T]) -> _Cached[_T]:
    """A cached function that reads these axes alone."""
    # With one key `itemgetter` returns no tuple, so the first key is given twice.
    values = itemgetter(*axes, axes[0]) if axes else lambda _: ()
    return _Cached(values, cache(lambda seen: answer(dict(zip(axes, seen, strict=False)))))


def _first_value(rules: Sequence[Rule], axis: str, combination: Mapping[str, str]) -> str | None:
    return next((rule.require[axis][0] for rule in rules if rule.applies(combination)), None)


def _answers(rules: Sequence[Rule], combination: Mapping[str, str]) -> _Answers:
    findings = tuple(
        RuleFinding(rule=rule, holds=rule.holds(combination)) for rule in rules if rule.applies(combination)
    )
    return _Answers(findings, tuple(finding.rule for finding in findings if not finding.holds))
