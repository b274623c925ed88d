"""The stacks between two stacks. In: a good and a bad one of one matrix.
Out: the components in which they differ, and the stack that has some of them from the bad one. Pure.

A mixed stack is resolved like any other: rules fill in what follows (Triton, RCCL, the layout), and refuse
what does not fit. Components that no rule allows apart are one step.
"""

import hashlib
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stackcheck.errors import ConfigurationError, NothingSelectedError, did_you_mean
from stackcheck.matrix import expand, resolve
from stackcheck.matrix.expand import Cell
from stackcheck.matrix.known_issues import KnownIssues
from stackcheck.matrix.matrix import Block, Matrix
from stackcheck.matrix.pins import Pins
from stackcheck.matrix.resolve import packages_of
from stackcheck.matrix.rules import RuleSet
from stackcheck.matrix.stack import Stack

AXES = ("python", "os", "wheels", "torch")
# What belongs to the runtime's version and changes with it.
WITH_RUNTIME = ("builder", "wheel_tag", "archs")
Parts = Mapping[str, Hashable]  # component -> its value in one stack


@dataclass(frozen=True, kw_only=True)
class Component:
    """Something in which the two stacks differ; `None` where a stack lacks it."""

    name: str
    good: Hashable
    bad: Hashable

    @property
    def words(self) -> str:
        """The name and both values in words: `numpy 2.4.5 -> 2.4.6`."""
        return "{} {} -> {}".format(*self.texts)

    @property
    def texts(self) -> tuple[str, str, str]:
        """The component's name, and both values in words."""
        return self.name, _said(self.good), _said(self.bad)


class Between:
    """Two stacks of a matrix, and what lies between them.

    Raises:
        NothingSelectedError: The matrix has no such stack.
        ConfigurationError: They are of two runtimes, or do not differ.
    """

    def __init__(self, matrix: Matrix, rules: RuleSet, issues: KnownIssues, good: str, bad: str) -> None:
        self._matrix, self._rules, self._issues = matrix, rules, issues
        cells = {cell.id: cell for cell in expand.expand(matrix)}
        one, other = (_named(name, cells) for name in (good, bad))
        if one.runtime != other.runtime:
            raise ConfigurationError(
                "the two stacks are of two runtimes, and nothing lies between them",
                got=f"{one.runtime} and {other.runtime}",
                expected="two stacks of one runtime",
            )
        self._cell = one
        self._good, self._bad = self._parts(one), self._parts(other)
        names = [name for name in {**self._good, **self._bad} if self._good.get(name) != self._bad.get(name)]
        self.components = tuple(
            Component(name=name, good=self._good.get(name), bad=self._bad.get(name)) for name in names
        )
        if not names:
            raise ConfigurationError(
                "the two stacks do not differ",
                got=f"{good} and {bad}",
                expected="stacks with different versions",
                next_step="stackcheck list",
            )

    def steps(self) -> tuple[tuple[Component, ...], ...]:
        """The components in order; those that the rules do not allow apart are one step."""
        found: list[tuple[Component, ...]] = []
        waiting: list[Component] = []
        for component in self.components:
            waiting.append(component)
            applied = [each for step in (*found, waiting) for each in step]
            if len(applied) == len(self.components) or self._is_allowed(applied):
                found.append(tuple(waiting))
                waiting = []
        return tuple(found)

    def stack(self, taken: Iterable[Component], pins: Mapping[str, Pins] | None = None) -> Stack:
        """The good stack with some components of the bad one.

        Raises:
            ConfigurationError: A rule or a known issue refuses it.
        """
        parts = dict(self._good) | {each.name: each.bad for each in taken}
        mixed = self._matrix.model_copy(
            update={"stacks": (self._block(parts),), "include": (), "exclude": (), "overrides": ()}
        )
        (stack,) = resolve.resolve(mixed, self._rules, self._issues, pins=pins)
        return stack

    def _is_allowed(self, taken: Iterable[Component]) -> bool:
        try:
            self.stack(taken)
        except ConfigurationError:
            return False
        return True

    def _parts(self, cell: Cell) -> dict[str, Hashable]:
        settings = expand.settings_of(cell, self._matrix)
        runtime = (cell.version, *(getattr(settings, name) for name in WITH_RUNTIME))
        found: dict[str, Hashable] = {"runtime": runtime}
        found |= {axis: getattr(cell, axis) for axis in AXES}
        found["flash_attn"] = (cell.flash_attn, settings.flash_attn_backend)
        found["system packages"] = settings.system_packages
        found |= packages_of(cell, settings, self._matrix)
        found |= {f"extension {name}": version for name, version in (settings.extensions or {}).items()}
        found |= {f"variable {name}": value for name, value in (settings.env or {}).items()}
        return found

    def _block(self, parts: Parts) -> Block:
        if parts["torch"] and parts["wheels"] == "none":
            raise ConfigurationError("torch has no source of wheels", got=f"torch {parts['torch']}")
        version, *with_runtime = _values(parts["runtime"])
        flash, backend = _values(parts["flash_attn"])
        fixed = {"runtime", "flash_attn", "system packages", *AXES}
        groups: dict[str, dict[str, Any]] = {"packages": {}, "extensions": {}, "env": {}}
        for name, value in parts.items():
            kind, _, rest = name.partition(" ")
            group = {"extension": "extensions", "variable": "env"}.get(kind if rest else "", "packages")
            if name not in fixed and value is not None:
                groups[group][rest or name] = value
        wanted = {
            "runtime": self._cell.runtime,
            "version": version,
            "flash_attn": flash,
            "flash_attn_backend": backend,
            "system_packages": parts["system packages"],
            **{axis: parts[axis] for axis in AXES},
            **dict(zip(WITH_RUNTIME, with_runtime, strict=True)),
            **{name: values or None for name, values in groups.items()},
            "size_budget_gb": expand.settings_of(self._cell, self._matrix).size_budget_gb,
            "wheels": parts["wheels"] if parts["torch"] else None,
            "id": f"bisect-{hashlib.sha256(repr(sorted(parts.items(), key=str)).encode()).hexdigest()[:12]}",
        }
        return Block.model_validate({name: value for name, value in wanted.items() if value is not None})


def _named(name: str, cells: Mapping[str, Cell]) -> Cell:
    if name not in cells:
        raise NothingSelectedError(
            "the matrix has no such stack",
            got=name,
            expected=did_you_mean(name, cells),
            next_step="stackcheck list",
        )
    return cells[name]


def _values(value: Hashable) -> tuple[Any, ...]:
    assert isinstance(value, tuple)
    return value


def _said(value: Hashable) -> str:
    if isinstance(value, tuple):
        return " ".join(_said(each) for each in value if each not in {None, ()}) or "none"
    return "none" if value is None else str(value)
