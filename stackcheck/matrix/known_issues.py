"""images/known-issues.yaml -> KnownIssues: reported faults of versions and devices, read strictly.

In: the file; the values of a combination. Out: the issues that it has. A row that says `refuse` is also a
rule that refuses the combination; one that says `warn` is shown by every verb and signed into the
certificate.
"""

import functools
import itertools
from collections.abc import (
    Iterable,
    Iterator,
    Mapping,  # pydantic reads annotations at run time
    Sequence,
)
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, StringConstraints

from stackcheck.files import yamlfile
from stackcheck.files.border import Closed
from stackcheck.matrix.compat import Condition
from stackcheck.matrix.rules import Axis, Rule, RuleSet, one_of
from stackcheck.policy import CheckName, Link, Sentence
from stackcheck.versions import VERSION_AXES, is_pattern

Severity = Literal["refuse", "warn"]
# Axes of which a stack has several values: each architecture, and each driver of its test machines.
_Key = tuple[tuple[str | None, ...], tuple[str, ...], tuple[str, ...]]
_FixedVersion = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)*$", max_length=40)]


def _as_list(value: object) -> object:
    """One check may be written without brackets."""
    return [value] if isinstance(value, str) else value


class KnownIssue(Closed):
    """One reported fault: a row of the file.

    Attributes:
        when: Axis -> patterns, as in a rule: any of them must match, on every axis.
        checks: The checks that fail because of it, as a waiver names them; none if no run shows it.
        first_good: Axis -> the first version without it; None if no release is known to be without it.
    """

    id: str = Field(pattern=r"^K-[a-z0-9]+([.-][a-z0-9]+)*$", max_length=60)
    when: Condition = Field(min_length=1)
    symptom: Sentence  # what a user sees, in one sentence
    issue: Link  # where it is tracked: a URL, or OWNER/REPOSITORY#NUMBER
    source: Sentence  # how the versions are known
    severity: Severity  # `refuse`: the combination is not allowed. `warn`: it is allowed, with a warning
    checks: Annotated[tuple[CheckName, ...], BeforeValidator(_as_list)] = Field(default=(), alias="check")
    first_good: Annotated[Mapping[Axis, _FixedVersion], Field(min_length=1, max_length=1)] | None = Field(
        default=None, alias="fixed_in"
    )

    def __hash__(self) -> int:
        """The hash of the id, which stands once in the file."""
        return hash(self.id)

    def hits(self, combination: Mapping[str, str]) -> bool:
        """Whether a combination names every axis of `when` and fits there."""
        return all(
            axis in combination and one_of(axis, patterns)(combination[axis])
            for axis, patterns in self.when.items()
        )

    def as_rule(self) -> Rule:
        """The rule that refuses what fits `when`."""
        because = f"{self.symptom.rstrip('.')} ({self.issue}; {self.fix})"
        when = {str(axis): patterns for axis, patterns in self.when.items()}
        return Rule(id=self.id, when=when, require={}, because=because, source=self.place, forbids=True)

    @property
    def fixed_in(self) -> str | None:
        """The first version without it: `torch 2.12.0`."""
        return next((" ".join(one) for one in (self.first_good or {}).items()), None)

    @property
    def fix(self) -> str:
        """The first version without it, in words."""
        return f"fixed in {self.fixed_in}" if self.fixed_in else "no fixed release is known"

    @property
    def place(self) -> str:
        """Where it is written down."""
        return f"[known issue] images/known-issues.yaml; {self.source}"

    def as_json(self) -> dict[str, Any]:
        """What `--json` and a certificate say of it."""
        keys = ("id", "severity", "symptom", "issue", "fixed_in")
        return {key: getattr(self, key) for key in keys} | {"checks": [*self.checks]}


class _IssuesFile(Closed):
    schema_: Literal["1"] = Field(alias="schema")
    issues: tuple[KnownIssue, ...] = Field(min_length=1, max_length=1000)


class KnownIssues(tuple[KnownIssue, ...]):  # noqa: SLOT001  # it carries what it has answered
    """The issues of a file, in its order. Stacks that share the values that rows look at are judged once."""

    _axes: tuple[str, ...]
    _answers: dict[_Key, tuple[KnownIssue, ...]]
    _refusing: tuple[RuleSet, RuleSet] | None  # the rules that were given last, and those with the refusals

    def __new__(cls, issues: Iterable[KnownIssue] = ()) -> Self:
        """The issues in file order."""
        self = super().__new__(cls, issues)
        self._axes = tuple(sorted({axis for issue in self for axis in issue.when}))
        self._answers = {}
        self._refusing = None
        return self

    def of(
        self, values: Mapping[str, str], archs: Iterable[str] = (), drivers: Iterable[str | None] = ()
    ) -> tuple[KnownIssue, ...]:
        """The issues of a combination, with any of its architectures and any of its drivers."""
        key = (tuple(map(values.get, self._axes)), tuple(archs), tuple(sorted({*filter(None, drivers)})))
        if key not in self._answers:
            cases = [*_cases(values, key[1], key[2])]
            self._answers[key] = tuple(issue for issue in self if any(map(issue.hits, cases)))
        return self._answers[key]

    def refusing(self, rules: RuleSet) -> RuleSet:
        """The rules, with those that refuse what a row of severity `refuse` names."""
        if self._refusing is None or self._refusing[0] is not rules:
            refusals = [issue.as_rule() for issue in self if issue.severity == "refuse"]
            self._refusing = rules, RuleSet([*rules, *refusals], rules.versions)
        return self._refusing[1]


NO_ISSUES = KnownIssues()


def _cases(
    values: Mapping[str, str], archs: Sequence[str], drivers: Sequence[str]
) -> Iterator[Mapping[str, str]]:
    """The combination with each pair of an architecture and a driver that it may have."""
    for arch, driver in itertools.product(archs or (None,), drivers or (None,)):
        added = {"arch": arch, "driver": driver}
        yield {**values, **{axis: value for axis, value in added.items() if value is not None}}


def load_known_issues(path: Path) -> KnownIssues:
    """Read known-issues.yaml.

    Raises:
        ConfigurationError: One line a problem, each with its place.
    """
    return _of_bytes(yamlfile.read_bytes(path), path.name)


@functools.lru_cache(maxsize=8)
def _of_bytes(data: bytes, name: str) -> KnownIssues:
    """The issues in a file. Equal bytes are the same object, which keeps what it answered."""
    return parse(yamlfile.parse(data, name), name)


def parse(value: Mapping[str, Any], name: str = "known-issues.yaml") -> KnownIssues:
    """The issues in a mapping that was read from YAML."""
    file = yamlfile.validated(_IssuesFile, value, name)
    problems = [*_problems(file.issues)]
    if problems:
        raise yamlfile.refused(f"{name}: {problem}" for problem in problems)
    return KnownIssues(file.issues)


def _problems(rows: Sequence[KnownIssue]) -> Iterator[str]:
    """Duplicate ids, text that is not a pattern for its axis, and a fix that the row itself contradicts."""
    seen: set[str] = set()
    for row in rows:
        if row.id in seen:
            yield f"{row.id}: duplicate id"
        seen.add(row.id)
        for axis, patterns in row.when.items():
            yield from (
                f"{row.id}: when.{axis}: {pattern!r} is not a value, a version or a comparison"
                for pattern in patterns
                if not is_pattern(axis, pattern)
            )
        for axis, version in (row.first_good or {}).items():
            if axis not in row.when or axis not in VERSION_AXES:
                yield f"{row.id}: fixed_in.{axis}: `when` names no versions of {axis}"
            elif one_of(axis, row.when[axis])(version):
                yield f"{row.id}: fixed_in.{axis}: `when` still includes {version}"
