"""images/compat.yaml -> Rules: the compatibility facts, read strictly.

In: the file. Out: `RuleSet`. A row of a table becomes a rule; a closed table adds one for what it does not
list, with the answer *unknown*. Every rule has its source.
"""

import functools
import itertools
import re
from collections.abc import (
    Callable,
    Iterator,
    Mapping,  # pydantic reads annotations at run time
    Sequence,
)
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from stackcheck.errors import ConfigurationError
from stackcheck.files import yamlfile
from stackcheck.files.border import Closed
from stackcheck.matrix.rules import Axis, Rule, RuleSet
from stackcheck.versions import VERSION_AXES, is_pattern, is_version, matcher

# About ten times the present number; a limit, because `compat check` compares all pairs of rules.
MAX_RULES = 3_000
MAX_PATTERNS = 8_000
# Axes whose values are judged by other rules only; of NVIDIA's drivers only the lowest are listed.
OPEN_AXES = frozenset({"driver", "beside", "device_wheels", "render_gid", "variables"})


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Patterns = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=60)], ...],
    BeforeValidator(_as_list),
    Field(min_length=1, max_length=200),
]
Condition = Mapping[Axis, Patterns]
Sentence = Annotated[str, Field(min_length=1, max_length=600)]


class _Rule(Closed):
    id: str = Field(pattern=r"^R[0-9]+[A-Za-z0-9.-]*$", max_length=80)
    when: Condition = Field(min_length=1)
    require: Condition = Field(min_length=1)
    because: Sentence
    source: Annotated[tuple[str, ...], BeforeValidator(_as_list), Field(min_length=1)]
    unknown: bool = False


class _CompatRow(Closed):
    require: Patterns
    because: Sentence | None = None
    unknown: bool = False
    source: Annotated[tuple[str, ...], BeforeValidator(_as_list), Field(min_length=1)] | None = None


def _as_row(value: object) -> object:
    return {"require": value} if isinstance(value, str | list) else value


class _Also(Closed):
    """Values beside those of the rows that load and that nobody tests: allowed as experimental.

    `{value}` in a pattern is the first value of the row.
    """

    require: Patterns
    because: Sentence
    source: Annotated[tuple[str, ...], BeforeValidator(_as_list), Field(min_length=1)]


class _Table(Closed):
    id: str = Field(pattern=r"^R[0-9]+[A-Za-z0-9.-]*$", max_length=80)
    when: Condition = Field(default_factory=dict)
    key: Axis
    value: Axis
    because: Sentence
    source: Annotated[tuple[str, ...], BeforeValidator(_as_list), Field(min_length=1)]
    closed: bool = True
    also: _Also | None = None
    rows: Mapping[str, Annotated[_CompatRow, BeforeValidator(_as_row)]] = Field(min_length=1, max_length=1000)


class _CompatFile(Closed):
    schema_: Literal["1"] = Field(alias="schema")
    sources: Mapping[str, Sentence]
    versions: Mapping[Axis, Patterns]
    rules: tuple[_Rule, ...] = Field(default=(), max_length=5000)
    tables: tuple[_Table, ...] = Field(default=(), max_length=500)


def load_rules(path: Path) -> RuleSet:
    """Read compat.yaml.

    Raises:
        ConfigurationError: One line a problem, each with its place.
    """
    return _of_bytes(yamlfile.read_bytes(path), path.name)


@functools.lru_cache(maxsize=8)
def _of_bytes(data: bytes, name: str) -> RuleSet:
    """The rules in a file. Equal bytes are the same object, which keeps what it found out of combinations."""
    return parse(yamlfile.parse(data, name), name)


def parse(value: Mapping[str, Any], name: str = "compat.yaml") -> RuleSet:
    """The rules in a mapping that was read from YAML."""
    file = yamlfile.validated(_CompatFile, value, name)
    rules = [Rule(**_sourced(rule, file, f"{name}: rules[{index}]")) for index, rule in enumerate(file.rules)]
    for index, table in enumerate(file.tables):
        rules += _rows(table, file, f"{name}: tables[{index}]")
    problems = [*_problems(rules, name)]
    if problems:
        raise yamlfile.refused(problems)
    rules += [*_vocabulary(rules, file)]
    return RuleSet(rules, {str(axis): values for axis, values in file.versions.items()})


def _sourced(rule: _Rule, file: _CompatFile, place: str) -> dict[str, Any]:
    return {**dict(rule), "source": _source(rule.source, file, place)}


def _source(keys: Sequence[str], file: _CompatFile, place: str) -> str:
    """`KEY: what it is`, for every key."""
    for key in keys:
        if key not in file.sources:
            raise ConfigurationError(f"{place}.source: {key[:80]!r} is not under `sources`")
    return "; ".join(f"[{key}] {file.sources[key]}" for key in keys)


def _plain(condition: Condition) -> dict[str, tuple[str, ...]]:
    return {str(axis): patterns for axis, patterns in condition.items()}


def _rows(table: _Table, file: _CompatFile, place: str) -> Iterator[Rule]:
    """One rule for each row, and for a closed table one about what is not listed."""
    for key, row in table.rows.items():
        when = {**_plain(table.when), table.key: (key,)}
        because = (row.because or table.because).replace("{key}", key)
        also = table.also.require if table.also else ()
        yield Rule(
            id=f"{table.id}[{key}]",
            when=when,
            require={table.value: (*row.require, *(one.replace("{value}", row.require[0]) for one in also))},
            because=because.replace("{values}", ", ".join(row.require)),
            source=_source(row.source or table.source, file, f"{place}.rows.{key}"),
            unknown=row.unknown,
        )
        if table.also:
            yield Rule(
                id=f"{table.id}-untested[{key}]",
                when=when,
                require={table.value: row.require},
                because=table.also.because.replace("{key}", key).replace("{values}", ", ".join(row.require)),
                source=_source(table.also.source, file, f"{place}.also"),
                unknown=True,
            )
    if table.closed:
        yield Rule(
            id=f"{table.id}[unlisted]",
            when={table.value: ("*",), **_plain(table.when)},
            require={table.key: tuple(table.rows)},
            because=f"no source lists more pairs of {table.key} and {table.value} than this table",
            source=_source(table.source, file, place),
            unknown=True,
            closing=True,
        )


def _vocabulary(rules: Sequence[Rule], file: _CompatFile) -> Iterator[Rule]:
    """For each axis whose values no range covers, one rule: what is named nowhere is not known."""
    for axis, known in file.versions.items():
        if axis not in OPEN_AXES:
            named = {
                pattern
                for rule in rules
                for condition in (rule.when, rule.require)
                for pattern in condition.get(axis, ())
                if not rule.unknown and _is_closed(axis, pattern)
            }
            yield Rule(
                id=f"R0-known[{axis}]",
                when={axis: ("*",)},
                require={axis: (*known, *sorted(named - {*known}))},
                because=f"no row names it: add it to `versions.{axis}`, with the rules of its documents",
                source="[versions] images/compat.yaml",
                unknown=True,
                closing=True,
            )


def _is_closed(axis: str, pattern: str) -> bool:
    """Whether a pattern names values, and not all those above or below one."""
    if axis in VERSION_AXES:
        return is_version(pattern) or (">" in pattern and "<" in pattern)
    return not any(sign in pattern for sign in "*?[")


def _problems(rules: Sequence[Rule], name: str) -> Iterator[str]:
    """Duplicate ids, and text that is not a pattern for its axis."""
    patterns = sum(len(one) for rule in rules for one in (*rule.when.values(), *rule.require.values()))
    if len(rules) > MAX_RULES or patterns > MAX_PATTERNS:
        yield f"{name}: more than {MAX_RULES} rules or {MAX_PATTERNS} patterns"
        return
    seen: set[str] = set()
    for rule in rules:
        if rule.id in seen:
            yield f"{name}: {rule.id}: duplicate id"
        seen.add(rule.id)
        for axis, texts in (*rule.when.items(), *rule.require.items()):
            for pattern in texts:
                if not is_pattern(axis, pattern):
                    yield f"{name}: {rule.id}: {axis}: {pattern!r} is not a value, a version or a comparison"


_Fitting = Callable[[str, tuple[str, ...]], frozenset[str]]


def contradictions(rules: RuleSet) -> tuple[tuple[Rule, Rule, str], ...]:
    """Pairs that can both apply to one combination and require values of an axis that exclude each other."""
    fitting = _fitting(rules)
    return tuple(
        (first, second, axis)
        for axis, asking in _by_required_axis(rules).items()
        for first, second in itertools.combinations(asking, 2)
        if (first.when.keys() <= second.when.keys() or second.when.keys() <= first.when.keys())
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
